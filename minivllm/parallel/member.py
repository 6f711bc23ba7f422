"""The process of a rank that rank 0 has started, with its output and its end."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress

from minivllm.platform.children import module_path
from minivllm.redaction import hide

TAIL_LINES = 15


class Member:
    """The process of a rank, started from here; its output is copied to this one's.

    Args:
        rank: its number.
        command: program and arguments.
        died: told once it has ended, in a thread of its own.
    """

    def __init__(self, rank: int, command: Sequence[str], died: Callable[[Member], None]) -> None:
        self.rank, self._died = rank, died
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONPATH": module_path(), "PYTHONUNBUFFERED": "1"},
        )
        self._tail: deque[str] = deque(maxlen=TAIL_LINES)
        self.watch = threading.Thread(target=self._watch, name=f"rank {rank}", daemon=True)
        self.watch.start()

    def _watch(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as lines:
            for line in lines:
                text = hide(line.decode(errors="replace")).rstrip()
                self._tail.append(text)
                with suppress(OSError):  # descriptor 2 is whichever log this process writes now
                    os.write(2, f"rank {self.rank}: {text}\n".encode())
        self.process.wait()
        self._died(self)

    @property
    def fate(self) -> str:
        """How it has ended, and what it printed last."""
        code = self.process.returncode
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with {code}"
        said = " | ".join([line for line in self._tail if line][-3:])
        return f"rank {self.rank} {how}" + (f"; it printed last: {said}" if said else "")
