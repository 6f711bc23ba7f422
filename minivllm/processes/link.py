"""The process of an engine, or another of the server, as its parent sees it: written to, listened
to, and where the parent goes on without it, ended and started again."""

from __future__ import annotations

import asyncio
import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Iterator
from typing import Any, ClassVar

from minivllm.errors import BadInput, Crashed
from minivllm.platform.processes.channel import Channel, Frames, frame
from minivllm.platform.processes.heartbeat import BEAT_S, SILENT_BUILDING_S, SILENT_S, Beat, Silence
from minivllm.processes.messages import EngineState, Failed, Ready, Step
from minivllm.processes.started import ConnectedProcess


class ProcessConnection(asyncio.Protocol):
    """Bytes from another process, as messages.

    Args:
        got: called with each message.
        lost: called when the other end is gone.
    """

    def __init__(self, got: Callable[[Any], None], lost: Callable[[], None]) -> None:
        self._frames, self._got, self._lost = Frames(), got, lost

    def data_received(self, data: bytes) -> None:
        """Take bytes."""
        for message in self._frames.push(data):
            self._got(message)

    def connection_lost(self, error: Exception | None) -> None:
        """Note the end of the connection."""
        self._lost()


class ProcessLink(ABC):
    """A process and the connection to it.

    Args:
        step_limit_s: how long one step of its work may take, after which the process is ended.

    Attributes:
        ready_kind: of the message by which the process says that it serves.
        is_alive: whether it serves.
        ready: what it reported when it served; None: it never has.
        failure: why it stopped by itself.
        pid: its id on this machine; None: it is on another one.
    """

    ready_kind: ClassVar[type]

    def __init__(self, step_limit_s: float = math.inf) -> None:
        self._step_limit_s = step_limit_s
        self.ready: Any = None
        self.failure: str | None = None
        self.pid: int | None = None
        self.is_alive = False
        self.started: ConnectedProcess | None = None
        self._ended = self._restarts = False
        self._built: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._transport: asyncio.Transport | None = None
        self._silence = self._new_silence()

    @abstractmethod
    def take(self, message: Any) -> None:
        """Take a message that is not the link's own matter."""

    @abstractmethod
    def gone(self) -> None:
        """Note that the process is gone without having been ended. Of one that is started again,
        only after it has served."""

    def _new_silence(self) -> Silence:
        return Silence(SILENT_BUILDING_S, step_limit_s=self._step_limit_s)

    async def start(self, started: ConnectedProcess, first: Any) -> None:
        """Wait until the process serves; what it says of itself is `ready` then.

        Args:
            started: the process.
            first: the message that it waits for.

        Raises:
            BadInput: it cannot serve with this configuration.
            Crashed: it failed.
        """
        self.started = started
        self.pid = started.pid if started.host is None else None
        loop = asyncio.get_running_loop()
        transport, _ = await loop.create_connection(
            lambda: ProcessConnection(self.receive, self.lose), sock=started.connection
        )
        self._transport = transport
        self.send(first)
        await self._built

    async def start_first(self, name: str, started: ConnectedProcess, first: Any) -> None:
        """`start` with the server, whose failure names the process and says why it ended."""
        try:
            await self.start(started, first)
        except Crashed:
            raise Crashed(f"{name} does not start: {await self.exit_reason()}") from None

    async def restart(self, started: ConnectedProcess, first: Any) -> None:
        """Have a process in the place of one that is gone, or never was; see `start`."""
        before, self.started = self.started, started  # which `stop` knows from here on
        await self._free(before)
        self.failure, self._ended, self._restarts = None, False, True
        self._silence = self._new_silence()
        self._built = asyncio.get_running_loop().create_future()
        await self.start(started, first)

    def end_if_silent(self) -> None:
        """End the process if it is silent or at one step for too long: it is gone from then on. To
        be called every BEAT_S."""
        if self._transport is None or not self._silence.is_over_limit():
            return
        self.failure = self.failure or f"it {self._silence}"
        self._silence = self._new_silence()
        self._transport.abort()
        if self.started is not None:
            asyncio.get_running_loop().run_in_executor(None, self.started.kill)

    def send(self, message: Any) -> None:
        """Send the process a message."""
        if self._transport is not None:
            self._transport.write(frame(message))

    def receive(self, message: Any) -> None:
        """Take a message of the process."""
        self._silence.heard(message)
        match message:
            case Beat():
                pass
            case Failed(text, status):
                self.failure = text
                if not self._built.done():
                    invalid = status == "invalid"
                    self._built.set_exception(BadInput(text) if invalid else Crashed(text))
                elif self._transport is not None:
                    self._transport.abort()  # it is lost now, and not when its process has ended
            case _ if isinstance(message, self.ready_kind):
                if not self._built.done():  # else nobody waits for it any more
                    self.is_alive, self.ready, self._silence.limit_s = True, message, SILENT_S
                    self._built.set_result(None)
            case _:
                self.take(message)

    def lose(self) -> None:
        """Note that the process is gone."""
        served, self.is_alive, self._transport = self.is_alive, False, None
        if not self._built.done():
            self._built.set_exception(Crashed(self.failure or "its process ended while it started"))
        if not self._ended and (served or not self._restarts):
            self.gone()

    async def exit_reason(self) -> str:
        """Why it has stopped."""
        if self.failure is not None or self.started is None:
            return self.failure or "its log says why"
        return f"its process {await asyncio.to_thread(self.started.exit_reason)}"

    async def stop(self) -> None:
        """End the process."""
        self.cut()
        await self.discard()

    def cut(self) -> None:
        """Hear nothing more of the process, which ends by itself."""
        self._ended, self.is_alive = True, False
        if self._transport is not None:
            self._transport.close()

    async def discard(self) -> None:
        """Free what is left of a process, which ends if it runs."""
        started, self.started = self.started, None
        await self._free(started)

    async def _free(self, started: ConnectedProcess | None) -> None:
        if self._transport is not None:
            self._transport.close()
        if started is not None:
            await asyncio.to_thread(started.stop)


class EngineLink(ProcessLink):
    """The process of one engine and the connection to it.

    Args:
        number: of the engine among its replicas.
        got: called with each message that is not the link's own matter.
        lost: see `ProcessLink.gone`.
        step_limit_s: see ProcessLink.

    Attributes:
        is_wanted: whether it is to serve; False: it is taken away, and may still have requests.
        ready: what its engine has reported; None: none was built yet.
        state: after its last step.
    """

    ready_kind = Ready
    ready: Ready | None

    def __init__(
        self,
        number: int,
        got: Callable[[EngineLink, Any], None],
        lost: Callable[[EngineLink], None],
        step_limit_s: float = math.inf,
    ) -> None:
        super().__init__(step_limit_s)
        self.number = number
        self.state = EngineState(0, 0, 0, None)
        self.is_wanted = True
        self._got, self._on_lost = got, lost
        self._counters: dict[str, float] = {}  # the last that have come
        self._past: dict[str, float] = {}  # of processes before this one

    async def restart(self, started: ConnectedProcess, first: Any) -> None:
        """See ProcessLink; what the processes before have counted stays."""
        self._past, self._counters = self.counters, {}
        self.state = EngineState(0, 0, 0, None)
        await super().restart(started, first)

    @property
    def counters(self) -> dict[str, float]:
        """Of all its processes so far."""
        names = dict.fromkeys((*self._past, *self._counters))
        return {name: self._past.get(name, 0) + self._counters.get(name, 0) for name in names}

    def take(self, message: Any) -> None:
        """Hand on a message; of a step its state is kept."""
        if isinstance(message, Step):
            message = self._dated(message)
            self.state = message.state
            self._counters = message.state.counters or self._counters
        self._got(self, message)

    def gone(self) -> None:
        self._on_lost(self)

    def _dated(self, message: Step) -> Step:
        """A step whose times are this machine's."""
        ahead_s = 0.0 if self.started is None else self.started.ahead_s
        if not ahead_s:
            return message
        begun = [(request_id, time_s + ahead_s) for request_id, time_s in message.begun]
        return message._replace(time_s=message.time_s + ahead_s, begun=begun)


async def end_silent(
    links: Iterable[ProcessLink], sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
) -> None:
    """End processes that are silent for too long, until this is cancelled.

    Args:
        links: of the processes, which may come and go.
        sleep: of seconds.
    """
    while True:
        await sleep(BEAT_S)
        for link in links:
            link.end_if_silent()


class PolledLink:
    """An engine's process and the connection to it, as a process sees it that does not go on
    without its answers: whatever it lacks is an error.

    Args:
        name: of the engine, for errors.
        started: its process.
        first: the message that it waits for.

    Attributes:
        answers: messages that somebody waits for.
    """

    def __init__(self, name: str, started: ConnectedProcess, first: Any) -> None:
        self.name, self.started = name, started
        self.channel, self.silence = Channel(started.connection), Silence(SILENT_BUILDING_S)
        self.answers: deque[Any] = deque()
        self.channel.send(first)

    def receive(self) -> Iterator[Any]:
        """What it has sent, but for beats.

        Raises:
            Crashed: it has ended, or a process of its own has.
            BadInput, MemoryError, RuntimeError: what it reports has failed.
        """
        for message in self.channel.receive():
            self.silence.heard()
            match message:
                case Beat():
                    pass
                case Failed():
                    raise message.error
                case _:
                    yield message
        if self.channel.closed:
            raise Crashed(f"{self.name} {self.started.exit_reason()}")

    def require_sign(self) -> None:
        """Raise Crashed where it is silent for too long. To be called every BEAT_S."""
        if self.silence.is_over_limit():
            raise Crashed(f"{self.name} {self.silence}; it {self.started.exit_reason()}")
