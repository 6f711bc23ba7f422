"""Child processes: their start, their output and their end. Torch-free."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import IO, Any

import psutil

from minivllm.platform.untrusted import printable
from minivllm.redaction import hide

TAIL_LINES = 15
LAST = 3  # lines in an error
EXIT_REASON_S = 1.0  # for a process that seems to have ended
STOP_S = 5.0  # for a process to end
PIPES: dict[str, Any] = {
    "stdin": subprocess.DEVNULL,
    "stdout": subprocess.PIPE,
    "stderr": subprocess.STDOUT,
}
PR_SET_PDEATHSIG = 1


def module_path() -> str:
    """A PYTHONPATH with which a child process imports the same modules, a user's own included."""
    return os.pathsep.join(dict.fromkeys(entry or os.getcwd() for entry in sys.path))


def die_with(parent: int) -> None:
    """End this process when its parent ends, also by a kill, since an orphan would hold the device.

    Args:
        parent: process id of the parent.
    """
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


@contextlib.contextmanager
def family_ended(pid: int) -> Iterator[None]:
    """Inside, a process is ended; then what still runs of it and of all that it had started is
    killed."""
    family: list[psutil.Process] = []
    with contextlib.suppress(psutil.Error):
        head = psutil.Process(pid)
        family = [head, *head.children(recursive=True)]
    yield
    for process in family:
        with contextlib.suppress(psutil.Error):
            process.kill()  # psutil makes sure that it is still the same process


class CopiedOutput:
    """Copies lines, but for secrets, to descriptor 2, which is whichever log this process writes at
    the time.

    Args:
        prefix: before each line.
        listen: gets each line.
    """

    def __init__(self, prefix: str = "", listen: Callable[[str], None] | None = None) -> None:
        self._prefix, self._listen = prefix, listen
        self._tail: deque[str] = deque(maxlen=TAIL_LINES)

    def copy(self, lines: Iterable[bytes]) -> None:
        """Copy until there are no more lines.

        Args:
            lines: a pipe or a socket's file.
        """
        for line in lines:
            text = hide(line.decode(errors="replace"))
            words = printable(text).rstrip()
            self._tail.append(words)
            if self._listen is not None:
                self._listen(words)
            with contextlib.suppress(OSError):
                os.write(2, f"{self._prefix}{text}".encode())

    @property
    def last(self) -> str:
        """The last lines that are not empty, in one; empty where there are none."""
        return " | ".join([line for line in self._tail if line.strip()][-LAST:])


def _copy(output: CopiedOutput, pipe: IO[bytes] | None) -> None:
    if pipe is not None:
        with pipe as lines:
            output.copy(lines)


class ChildProcess:
    """A process that is started here: its output is copied to this process's log, and it is ended
    together with all that it has started.

    Args:
        command: program and arguments.
        prefix, listen: see CopiedOutput.
        options: of `subprocess.Popen`, in place of no input and one pipe for all output.

    Attributes:
        by_itself_s: seconds that `stop` waits before it ends the process.
        killed_s: seconds that `stop` waits for a killed process to be gone; None: as long as it
            takes.
    """

    by_itself_s = 0.0
    killed_s: float | None = STOP_S

    def __init__(
        self,
        command: Sequence[str],
        prefix: str = "",
        listen: Callable[[str], None] | None = None,
        **options: Any,
    ) -> None:
        self.process: subprocess.Popen[bytes] = subprocess.Popen(command, **(PIPES | options))
        self.pid = self.process.pid
        self._output = CopiedOutput(prefix, listen)
        self.reader = threading.Thread(
            target=self.reading(), name=f"output of {self.pid}", daemon=True
        )
        self.reader.start()

    def reading(self) -> Callable[[], None]:
        """What a thread of its own calls: it copies the output until that ends. It does not hold
        this object: a process that ends with its connection ends where nobody holds it."""
        return partial(_copy, self._output, self.process.stdout)

    def exit_code(self, seconds: float | None) -> int | None:
        """The exit code of a process that ends within so many seconds; None waits for it."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.process.wait(seconds)
        return None

    def exit_reason(self) -> str:
        """How it ended, if it has, and the last lines that it printed."""
        state = "is still running"
        if (code := self.exit_code(EXIT_REASON_S)) is not None:
            self.reader.join(EXIT_REASON_S)  # its last lines may still be on their way
            state = f"ended with exit code {code}"
        return f"{state}; it printed last: {self._output.last or 'nothing'}"

    def kill(self) -> None:
        """End it at once."""
        self.process.kill()

    def stop(self, grace_s: float = STOP_S) -> None:
        """End it and all that it has started, by force what has not ended within `grace_s`
        seconds."""
        with family_ended(self.pid):
            if self.exit_code(self.by_itself_s) is None:
                if self.process.stdin is not None:
                    with contextlib.suppress(OSError):
                        self.process.stdin.close()
                self.process.terminate()
                self.exit_code(grace_s)
        self.exit_code(self.killed_s)
        self.reader.join(1)
