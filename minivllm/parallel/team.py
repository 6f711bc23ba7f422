"""The other ranks of an engine as rank 0 has them: their start, the calls that they repeat, and
their end, foreseen or not.

Rank 0 decides everything, and tells the others which calls to repeat: a step, a move of blocks. The
calls go over a socket of their own, since a rank may wait for the next one for hours, and a
collective would time out. Ranks of one machine are started from here, with their sockets in a
private folder. `torchrun` starts those of several machines, which find one another as it says.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, Listener
from typing import Any, ParamSpec, TypeVar

import torch
from torch.distributed import FileStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import Store

from minivllm.errors import BadInput, Crashed
from minivllm.parallel.place import CALLS, JOIN, STORE, STUCK_S, launched, prepare
from minivllm.parallel.ranks import LOOPBACK, GroupRanks
from minivllm.parallel.watch import RankWatch
from minivllm.platform.folders import TemporaryFolder
from minivllm.platform.processes.children import ChildProcess, module_path


class Member(ChildProcess):
    """The process of a rank, started from here; its output is copied to this one's.

    Args:
        rank: its number.
        command: program and arguments.
        died: called once it has ended, in a thread of its own.
    """

    def __init__(self, rank: int, command: Sequence[str], died: Callable[[Member], None]) -> None:
        self.rank, self._died = rank, died
        self._why_ended: str | None = None
        environment = {**os.environ, "PYTHONPATH": module_path(), "PYTHONUNBUFFERED": "1"}
        super().__init__(command, f"rank {rank}: ", env=environment)

    def reading(self) -> Callable[[], None]:
        copy = super().reading()

        def watch() -> None:
            copy()
            self.process.wait()
            self._died(self)

        return watch

    def end(self, why: str) -> None:
        """Kill it.

        Args:
            why: what it did, for messages.
        """
        self._why_ended = f"{why}, and was ended"
        self.kill()

    @property
    def fate(self) -> str:
        """How it has ended, and what it printed last."""
        code = self.process.returncode
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with {code}"
        how = self._why_ended or how
        printed = self._output.last
        return f"rank {self.rank} {how}" + (f"; it printed last: {printed}" if printed else "")


MODULE = "minivllm.processes.rank"  # the program of a rank that is started from here
LATE_S = 2.0  # between the error of a collective and the end of the process that has caused it
AFTER_SILENCE_S = 1.0  # of a collective that has waited for a silent rank already
END_S = 5.0  # for a rank to end by itself

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")
Tell = weakref.WeakMethod[Any]  # called when a member has ended, or a rank is lost
NAME_S = 10.0  # for a rank that has connected to say its number


class Team:
    """The other ranks, as rank 0 has them.

    Args:
        size: the number of ranks, this one included.

    Attributes:
        ranks: this rank among them, once `join` has returned.
        facts: what each other rank has reported of its part of the engine, in their order.
    """

    ranks: GroupRanks
    facts: Sequence[Mapping[str, int]] = ()

    def __init__(self, size: int) -> None:
        self.size, self._closing = size, threading.Event()
        self._members: list[Member] = []
        self._channels: list[Connection] = []  # of ranks 1, 2, ...
        self._watch: RankWatch | None = None
        self._fates: list[str] = []  # of members that have died
        self._out_of_step = False
        self._launched = launched()
        self._folder: TemporaryFolder | None = None  # of ranks that are started from here
        self._store: Store
        if self._launched is None:
            self._folder = TemporaryFolder("minivllm-ranks-")
            self._start(self._folder.path)
        elif self._launched.size == size:
            self._store = self._launched.store
        else:
            raise BadInput(
                f"parallel.tensor={size}: torchrun has started {self._launched.size} processes; "
                "start one for each rank"
            )
        self._end = weakref.finalize(self, _end, self._members, self._channels, self._folder)

    def _start(self, folder: str) -> None:
        self._store = FileStore(f"{folder}/{STORE}", self.size)
        self._store.set_timeout(JOIN)
        program = (sys.executable, "-m", MODULE, str(os.getpid()), folder, str(self.size))
        tell: Tell = weakref.WeakMethod(self._note_death)
        for rank in range(1, self.size):
            died = partial(_tell, tell)
            self._members.append(Member(rank, (*program, str(rank)), died))

    @property
    def processes(self) -> tuple[int, ...]:
        """The ids of the processes that were started from here."""
        return tuple(member.pid for member in self._members)

    def begin(self, config: Mapping[str, Any]) -> None:
        """Let every other rank build its part of an engine, as this one does next.

        Args:
            config: the resolved configuration.

        Raises:
            Crashed: a rank has died before it was ready for that.
        """
        if not self._channels:
            self._listen()
        self.send("build", dict(config))

    def join(self, device: torch.device) -> GroupRanks:
        """Rank 0 among all, with its device."""
        if not hasattr(self, "ranks"):
            here, address = self.size, LOOPBACK
            if self._launched is not None:
                here, address = self._launched.local_size, self._launched.address
            self.ranks = GroupRanks(self._store, 0, self.size, here, device, address)
        return self.ranks

    def _listen(self) -> None:
        key = secrets.token_bytes(32)
        if self._launched is not None:
            listener = Listener((self._launched.address, 0), "AF_INET", authkey=key)
            address: Any = list(listener.address)
        else:
            assert self._folder is not None
            listener = Listener(f"{self._folder.path}/calls", "AF_UNIX", authkey=key)
            address = listener.address
        with listener:
            self._store.set(CALLS, json.dumps([address, key.hex()]))
            # The listener itself cannot wait for so long and no longer.
            waiting: socket.socket = listener._listener._socket  # type: ignore[attr-defined]
            waiting.settimeout(0.2)
            end = time.monotonic() + JOIN.total_seconds()
            joined: dict[int, Connection] = {}
            while missing := [str(n) for n in range(1, self.size) if n not in joined]:
                if self._fates or time.monotonic() > end:
                    late = f"has not joined within {JOIN.total_seconds():.0f} s"
                    raise Crashed("; ".join(self._fates) or f"rank {', '.join(missing)} {late}")
                with suppress(TimeoutError, AuthenticationError, EOFError, ConnectionError):
                    channel = listener.accept()
                    prepare(channel)
                    if channel.poll(NAME_S):
                        joined[channel.recv()] = channel
        self._channels += [channel for _, channel in sorted(joined.items())]
        tell: Tell = weakref.WeakMethod(self._note_loss)
        self._watch = RankWatch(dict(enumerate(self._channels, 1)), partial(_tell, tell))

    def require_all(self) -> None:
        """Raise Crashed where another rank is dead or silent."""
        if self._fates:
            raise Crashed("; ".join(self._fates))

    def send(self, kind: str, *arguments: Any) -> None:
        """Tell every other rank what comes next.

        Raises:
            Crashed: one has died, or an earlier call has failed in the middle.
        """
        self.require_all()
        if self._out_of_step:
            raise Crashed(
                "a step was cut off in its middle, so that the ranks of parallel.tensor no longer "
                "fit together: build the engine again"
            )
        for channel in self._channels:
            channel.send((kind, arguments))

    def await_parts(self) -> None:
        """Wait until every other rank has built its part."""
        watch = self._watch
        assert watch is not None
        self.facts = [watch.answer(rank) for rank in range(1, self.size)]

    def repeated(
        self, number: int, call: Callable[Arguments, Result]
    ) -> Callable[Arguments, Result]:
        """A call of this rank that every other rank repeats with the same arguments.

        Args:
            number: of the call in the list that the others have, see `follow`.
            call: this rank's own.
        """

        def together(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
            with self.together():
                self.send("call", number, args)
                return call(*args, **kwargs)

        return together

    @contextmanager
    def together(self) -> Iterator[None]:
        """While it is open this rank computes with the others. An error leaves them out of step.

        Raises:
            Crashed: in place of an error that the death of another rank has caused.
        """
        try:
            yield
        except BaseException as error:
            self._out_of_step = True
            own = isinstance(error, BadInput | Crashed) or not isinstance(error, Exception)
            if not own and (fates := self._await_death()):
                raise Crashed("; ".join(fates)) from error
            raise

    def _await_death(self) -> list[str]:
        """How other ranks have died, if one does within a moment."""
        end = time.monotonic() + LATE_S
        while not self._fates and time.monotonic() < end:
            time.sleep(0.01)
        return self._fates

    def _note_death(self, member: Member) -> None:
        """A process that was started from here has ended."""
        self._note_end(member.fate)

    def _note_loss(self, rank: int, what: str, is_silent: bool) -> None:
        """A rank is silent, or its connection has ended, of which the end of a process that was
        started from here says more."""
        for member in self._members:
            if member.rank == rank:
                if is_silent:
                    member.end(what)
                return
        self._note_end(f"rank {rank} {what}", AFTER_SILENCE_S if is_silent else STUCK_S)

    def _note_end(self, fate: str, patience_s: float = STUCK_S) -> None:
        """A rank has ended. This process ends, too, where a collective waits for it all the same
        after some seconds."""
        if self._closing.is_set():
            return
        self._fates.append(fate)
        if (ranks := getattr(self, "ranks", None)) is None:
            return
        ranks.abort()
        since = ranks.waiting_since
        if (
            not self._closing.wait(patience_s)
            and since is not None
            and since == ranks.waiting_since
        ):
            os.write(2, f"{fate}, and a collective waits for it\n".encode())
            os._exit(1)

    def close(self, patience_s: float = END_S) -> None:
        """End the other ranks, and free what they shared.

        Args:
            patience_s: for ranks that wait for a call, and end where there will be none.
        """
        self._closing.set()
        if self._watch is not None:
            self._watch.close()
        if hasattr(self, "ranks"):
            self.ranks.close()
        for channel in self._channels:
            channel.close()
        end = time.monotonic() + patience_s
        for member in self._members:
            member.exit_code(max(0.0, end - time.monotonic()))
        self._end()


def _tell(method: Tell, *arguments: Any) -> None:
    if (call := method()) is not None:
        call(*arguments)


def _end(
    members: Sequence[Member],
    channels: Sequence[Connection],
    folder: TemporaryFolder | None,
) -> None:
    """End ranks, however busy they are."""
    for channel in channels:
        channel.close()
    for member in members:
        member.kill()
        member.process.wait()
        member.reader.join(1.0)
    if folder is not None:
        folder.close()
