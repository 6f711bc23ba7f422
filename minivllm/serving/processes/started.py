"""How a process of the server is started and ended: from here, or as an actor of a Ray cluster."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Protocol

from minivllm.platform.processes.children import module_path
from minivllm.processes.actors import RayActor

STOP_S = 5.0  # for a process to end by itself
FATE_S = 0.5  # for one whose connection has ended


class ServerProcess(Protocol):
    """A started process.

    Attributes:
        connection: to it.
        pid: its number on its machine.
        is_elsewhere: whether that is another machine.
        ahead_s: what its monotonic clock has to be added to be this machine's.
    """

    connection: socket.socket
    pid: int
    is_elsewhere: bool
    ahead_s: float

    def last_words(self) -> str:
        """How it ended, once its connection has."""

    def kill(self) -> None:
        """End it at once."""

    def stop(self) -> None:
        """End it; its connection is closed."""


class LocalServerProcess:
    """A process of this machine, which prints where this one does.

    Args:
        module: that it runs, with the descriptor of its connection, this process's id, and the
            descriptors that it inherits.
        inherited: these sockets.
    """

    is_elsewhere, ahead_s = False, 0.0

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
            return f"its process ended with exit code {self._process.wait(FATE_S)}"
        return "its connection has ended"

    def kill(self) -> None:
        self._process.kill()

    def stop(self) -> None:
        for end in (lambda: None, self._process.terminate, self._process.kill):
            end()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(STOP_S)
                return


class ActorEngine:
    """An actor of a Ray cluster, whose output is copied to this process's.

    Args:
        actor: that is started.
    """

    def __init__(self, actor: RayActor) -> None:
        self._actor = actor
        self.connection, self.pid = actor.connection, actor.pid
        self.is_elsewhere, self.ahead_s = actor.is_elsewhere, actor.ahead_s

    def last_words(self) -> str:
        return f"it {self._actor.last_words()}"

    def kill(self) -> None:
        self._actor.kill()

    def stop(self) -> None:
        self._actor.stop(STOP_S)
