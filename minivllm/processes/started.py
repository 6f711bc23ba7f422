"""A started process, wherever it runs, and one of this machine."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Protocol

from minivllm.platform.processes.children import module_path

STOP_S = 5.0  # for a process to end by itself
FATE_S = 0.5  # for one whose connection has ended


class ConnectedProcess(Protocol):
    """A started process.

    Attributes:
        connection: to it.
        pid: its number on its machine.
        host: the machine, if that is another one; None: this one.
        ahead_s: what its monotonic clock has to be added to be this machine's.
    """

    connection: socket.socket
    pid: int
    host: str | None
    ahead_s: float

    def last_words(self) -> str:
        """How it ended, once its connection has, without a subject: "ended with exit code 1"."""

    def kill(self) -> None:
        """End it at once."""

    def stop(self) -> None:
        """Free what is left of it, once its connection is closed; it ends if it runs."""


class LocalProcess:
    """A process of this machine, which prints where this one does.

    Args:
        module: that it runs, with the descriptor of its connection, this process's id, and the
            descriptors that it inherits.
        inherited: these sockets.
    """

    host: str | None = None
    ahead_s = 0.0

    def __init__(self, module: str, inherited: Sequence[socket.socket] = ()) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            others = [one.fileno() for one in inherited]
            numbers = [theirs.fileno(), os.getpid(), *others]
            self._process = subprocess.Popen(
                [sys.executable, "-m", module, *map(str, numbers)],
                pass_fds=[theirs.fileno(), *others],
                stdin=subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": module_path()},
                start_new_session=True,  # Ctrl-C in the terminal is for this process
            )
        self.connection, self.pid = ours, self._process.pid

    def last_words(self) -> str:
        with suppress(subprocess.TimeoutExpired):
            return f"ended with exit code {self._process.wait(FATE_S)}"
        return "has closed its connection"

    def kill(self) -> None:
        self._process.kill()

    def stop(self) -> None:
        for end in (lambda: None, self._process.terminate, self._process.kill):
            end()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(STOP_S)
                return
