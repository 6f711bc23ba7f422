"""One engine's process as the process of HTTP sees it: written to, listened to, ended, and started
again."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import Any

from minivllm.errors import BadInput, Crashed
from minivllm.platform.processes.channel import Frames, frame
from minivllm.platform.processes.heartbeat import SILENT_BUILDING_S, SILENT_S, Beat, Silence
from minivllm.serving.processes.messages import EngineState, Failed, Ready, Step
from minivllm.serving.processes.started import StartedEngine


class _Connection(asyncio.Protocol):
    """Bytes from the engine's process, as messages."""

    def __init__(self, got: Callable[[Any], None], lost: Callable[[], None]) -> None:
        self._frames, self._got, self._lost = Frames(), got, lost

    def data_received(self, data: bytes) -> None:
        for message in self._frames.push(data):
            self._got(message)

    def connection_lost(self, error: Exception | None) -> None:
        self._lost()


class EngineLink:
    """The process of one engine and the connection to it.

    Args:
        number: of the engine among its replicas.
        got: told each message that is not the link's own matter.
        lost: told when the process is gone without having been ended. Of one that is started
            again, only after it has served.
        step_limit_s: how long one step may take, after which the process is ended.

    Attributes:
        is_alive: whether its engine is built and serves.
        is_wanted: whether it is to serve; False: it is taken away, and may still have requests.
        ready: what its engine has said of itself; None: none was built yet.
        counters: of all its processes so far.
        failure: why it stopped by itself.
        pid: process id of the engine on this machine; None: it is on another one.
    """

    def __init__(
        self,
        number: int,
        got: Callable[[EngineLink, Any], None],
        lost: Callable[[EngineLink], None],
        step_limit_s: float = math.inf,
    ) -> None:
        self.number, self._step_limit_s = number, step_limit_s
        self.state = EngineState(0, 0, 0, None)
        self.failure: str | None = None
        self.pid: int | None = None
        self.is_alive, self.is_wanted = False, True
        self.ready: Ready | None = None
        self._got, self._on_lost = got, lost
        self._ended = self._restarts = False
        self._built: asyncio.Future[Ready] = asyncio.get_running_loop().create_future()
        self._started: StartedEngine | None = None
        self._transport: asyncio.Transport | None = None
        self._counters: dict[str, float] = {}  # the last that have come
        self._past: dict[str, float] = {}  # of processes before this one
        self._silence = self._new_silence()

    def _new_silence(self) -> Silence:
        return Silence(SILENT_BUILDING_S, step_limit_s=self._step_limit_s)

    async def start(self, started: StartedEngine, config: dict[str, Any]) -> Ready:
        """Wait until the engine is built.

        Args:
            started: its process.
            config: of the engine.

        Raises:
            BadInput: the engine cannot be built with this configuration.
            Crashed: its process failed.
        """
        self._started = started
        self.pid = None if started.is_elsewhere else started.pid
        loop = asyncio.get_running_loop()
        transport, _ = await loop.create_connection(
            lambda: _Connection(self.receive, self.lose), sock=started.connection
        )
        self._transport = transport
        self.send(config)
        return await self._built

    async def restart(self, started: StartedEngine, config: dict[str, Any]) -> Ready:
        """Have a process in the place of one that is gone, or never was; see `start`."""
        await self.discard()
        self._past, self._counters = self.counters, {}
        self.failure, self._ended, self._restarts = None, False, True
        self.state, self._silence = EngineState(0, 0, 0, None), self._new_silence()
        self._built = asyncio.get_running_loop().create_future()
        return await self.start(started, config)

    @property
    def counters(self) -> dict[str, float]:
        names = dict.fromkeys((*self._past, *self._counters))
        return {name: self._past.get(name, 0) + self._counters.get(name, 0) for name in names}

    def end_if_silent(self) -> None:
        """End the process if it is silent or at one step for too long: it is gone from then on. To
        be called every BEAT_S."""
        if self._transport is None or not self._silence.is_over_limit():
            return
        self.failure = self.failure or f"it {self._silence}"
        self._silence = self._new_silence()
        self._transport.abort()
        if self._started is not None:
            asyncio.get_running_loop().run_in_executor(None, self._started.kill)

    def send(self, message: Any) -> None:
        """Send the engine a message."""
        if self._transport is not None:
            self._transport.write(frame(message))

    def receive(self, message: Any) -> None:
        """Take a message of the engine."""
        self._silence.heard(message)
        match message:
            case Beat():
                pass
            case Ready():
                self.is_alive, self.ready, self._silence.limit_s = True, message, SILENT_S
                self._built.set_result(message)
            case Failed(text, bad_input):
                self.failure = text
                if not self._built.done():
                    self._built.set_exception(BadInput(text) if bad_input else Crashed(text))
                elif self._transport is not None:
                    self._transport.abort()  # it is lost now, and not when its process has ended
            case _:
                if isinstance(message, Step):
                    message = self._dated(message)
                    self.state = message.state
                    self._counters = message.state.counters or self._counters
                self._got(self, message)

    def _dated(self, message: Step) -> Step:
        """A step whose times are this machine's."""
        ahead_s = 0.0 if self._started is None else self._started.ahead_s
        if not ahead_s:
            return message
        begun = [(request_id, time_s + ahead_s) for request_id, time_s in message.begun]
        return message._replace(time_s=message.time_s + ahead_s, begun=begun)

    def lose(self) -> None:
        """Note that the engine's process is gone."""
        served, self.is_alive, self._transport = self.is_alive, False, None
        if not self._built.done():
            why = self.failure or "the engine's process ended while it started"
            self._built.set_exception(Crashed(why))
        if not self._ended and (served or not self._restarts):
            self._on_lost(self)

    async def last_words(self) -> str:
        """Why the engine has stopped."""
        if self.failure is not None or self._started is None:
            return self.failure or "its log says why"
        return await asyncio.to_thread(self._started.last_words)

    async def stop(self) -> None:
        """End the engine's process."""
        self.cut()
        await self.discard()

    def cut(self) -> None:
        """Hear nothing more of the engine, which ends by itself."""
        self._ended, self.is_alive = True, False
        if self._transport is not None:
            self._transport.close()

    async def discard(self) -> None:
        """Free what is left of a process, which ends if it runs."""
        if self._transport is not None:
            self._transport.close()
        started, self._started = self._started, None
        if started is not None:
            await asyncio.to_thread(started.stop)
