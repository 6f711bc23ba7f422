"""The process of a rank that rank 0 has started, with its output and its end."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Callable, Sequence

from minivllm.platform.processes.children import module_path
from minivllm.platform.processes.output import CopiedOutput


class Member:
    """The process of a rank, started from here; its output is copied to this one's.

    Args:
        rank: its number.
        command: program and arguments.
        died: told once it has ended, in a thread of its own.
    """

    def __init__(self, rank: int, command: Sequence[str], died: Callable[[Member], None]) -> None:
        self.rank, self._died = rank, died
        self._why_ended: str | None = None
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONPATH": module_path(), "PYTHONUNBUFFERED": "1"},
        )
        self._output = CopiedOutput(f"rank {rank}: ")
        self.watch = threading.Thread(target=self._watch, name=f"rank {rank}", daemon=True)
        self.watch.start()

    def _watch(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as lines:
            self._output.copy(lines)
        self.process.wait()
        self._died(self)

    def end(self, why: str) -> None:
        """Kill it.

        Args:
            why: what it did, for messages.
        """
        self._why_ended = f"{why}, and was ended"
        self.process.kill()

    @property
    def fate(self) -> str:
        """How it has ended, and what it printed last."""
        code = self.process.returncode
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with {code}"
        how = self._why_ended or how
        said = self._output.last
        return f"rank {self.rank} {how}" + (f"; it printed last: {said}" if said else "")
