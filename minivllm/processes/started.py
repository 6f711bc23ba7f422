"""A started process, wherever it runs, and one of this machine at both of its ends."""

from __future__ import annotations

import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, NoReturn, Protocol

from minivllm.errors import BadInput, Crashed
from minivllm.platform.processes.channel import Channel
from minivllm.platform.processes.children import (
    EXIT_REASON_S,
    STOP_S,
    ChildProcess,
    die_with,
    module_path,
)
from minivllm.platform.processes.heartbeat import Progress, beat_over, beating
from minivllm.platform.threads import THREAD_VARIABLES
from minivllm.processes.messages import failed


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

    def exit_reason(self) -> str:
        """How it ended, once its connection has, without a subject: "ended with exit code 1"."""

    def kill(self) -> None:
        """End it at once."""

    def stop(self) -> None:
        """Free what is left of it, once its connection is closed; it ends if it runs."""


class LocalProcess(ChildProcess):
    """A process of this machine: the program of a module, which ends with this process; see
    `run_child`.

    Args:
        module: its name.
        inherited: sockets that it gets, too; their descriptors are further arguments.
        threads: None: a process beside this one, which prints where this one does. Else a part of
            this one, as of a measurement, with so many threads: in its group, so that a signal to
            the group ends it, and with its output in this process's log.
    """

    host: str | None = None
    ahead_s = 0.0

    def __init__(
        self, module: str, inherited: Sequence[socket.socket] = (), threads: int | None = None
    ) -> None:
        self.connection, theirs = socket.socketpair()
        self._is_part = threads is not None
        variables = {} if threads is None else dict.fromkeys(THREAD_VARIABLES, str(threads))
        own: dict[str, Any] = {} if self._is_part else {"stdout": None, "stderr": None}
        self.by_itself_s = 0.0 if self._is_part else STOP_S
        with theirs:
            others = [one.fileno() for one in inherited]
            numbers = [theirs.fileno(), os.getpid(), *others]
            super().__init__(
                [sys.executable, "-m", module, *map(str, numbers)],
                pass_fds=[theirs.fileno(), *others],
                env={**os.environ, "PYTHONPATH": module_path(), **variables},
                # Ctrl-C in the terminal is for this process.
                start_new_session=not self._is_part,
                **own,
            )

    def exit_reason(self) -> str:
        if self._is_part:
            return super().exit_reason()
        code = self.exit_code(EXIT_REASON_S)
        return "has closed its connection" if code is None else f"ended with exit code {code}"


def run_child(serve: Callable[..., int]) -> None:
    """Be a LocalProcess: serve the connection to the parent, and end with an exit code, or with the
    parent.

    Args:
        serve: gets a channel, and the descriptors of the sockets that are inherited.
    """
    descriptor, parent, *inherited = map(int, sys.argv[1:])
    die_with(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which decides
    end_process(serve(Channel(socket.socket(fileno=descriptor)), *inherited))


def serve_engine(
    channel: Channel, run: Callable[[dict[str, Any], Channel, Progress, ExitStack], None]
) -> int:
    """Serve a channel with an engine; returns the exit code. Beats go over it meanwhile, and what
    has failed.

    Args:
        channel: to the parent, which sends a configuration first.
        run: builds the engine of the configuration, and serves until the other end is gone, with
            the progress of its steps. Exits of the stack come after the parent knows what has
            failed, since to close an engine may take a while, or fail itself.
    """
    (config,) = channel.receive(None)
    progress = Progress()
    with beating(beat_over(channel, progress)), ExitStack() as exits:
        try:
            run(config, channel, progress, exits)
        except Exception as error:
            if not isinstance(error, (BadInput, Crashed)):
                traceback.print_exc()
            channel.send(failed(error))
            return 2 if isinstance(error, BadInput) else 1
    return 0


def end_process(code: int) -> NoReturn:
    """End this process without a wait for threads of libraries."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
