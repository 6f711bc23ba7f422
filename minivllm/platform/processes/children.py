"""Start, output and end of child processes. Torch-free."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator

import psutil

from minivllm.platform.untrusted import printable
from minivllm.redaction import hide

TAIL_LINES = 15
LAST = 3  # lines in an error
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
