"""One engine's process as the process of HTTP sees it: written to, listened to, ended."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from minivllm.errors import BadInput
from minivllm.platform.processes.channel import Frames, frame
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
        lost: told once when the process is gone without having been ended.
    """

    def __init__(
        self,
        number: int,
        got: Callable[[EngineLink, Any], None],
        lost: Callable[[EngineLink], None],
    ) -> None:
        self.number = number
        self.state = EngineState(0, 0, 0, None)
        self.counters: dict[str, float] = {}  # the last that have come
        self.failure: str | None = None  # why it stopped by itself
        self._got, self._on_lost = got, lost
        self._gone = self._ended = False
        self._ready: asyncio.Future[Ready] = asyncio.get_running_loop().create_future()
        self._started: StartedEngine | None = None
        self._transport: asyncio.Transport | None = None

    async def start(self, started: StartedEngine, config: dict[str, Any]) -> Ready:
        """Wait until the engine is built.

        Args:
            started: its process.
            config: of the engine.

        Raises:
            BadInput: the engine cannot be built with this configuration.
            RuntimeError: its process failed.
        """
        self._started = started
        loop = asyncio.get_running_loop()
        transport, _ = await loop.create_connection(
            lambda: _Connection(self.receive, self.lose), sock=started.connection
        )
        self._transport = transport
        self.send(config)
        return await self._ready

    @property
    def is_alive(self) -> bool:
        """Whether its engine is built and serves."""
        return self._ready.done() and not self._gone

    @property
    def pid(self) -> int | None:
        """Process id of the engine on this machine; None: it is on another one."""
        assert self._started is not None
        return None if self._started.is_elsewhere else self._started.pid

    def send(self, message: Any) -> None:
        """Send the engine a message."""
        if self._transport is not None:
            self._transport.write(frame(message))

    def receive(self, message: Any) -> None:
        """Take a message of the engine."""
        match message:
            case Ready():
                self._ready.set_result(message)
            case Failed(text, bad_input):
                self.failure = text
                if not self._ready.done():
                    self._ready.set_exception(BadInput(text) if bad_input else RuntimeError(text))
            case _:
                if isinstance(message, Step):
                    message = self._dated(message)
                    self.state = message.state
                    self.counters = message.state.counters or self.counters
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
        self._gone = True
        if not self._ready.done():
            self._ready.set_exception(RuntimeError("the engine's process ended while it started"))
        if not self._ended:
            self._on_lost(self)

    async def last_words(self) -> str:
        """Why the engine has stopped."""
        if self.failure is not None or self._started is None:
            return self.failure or "its log says why"
        return await asyncio.to_thread(self._started.last_words)

    async def stop(self) -> None:
        """End the engine's process."""
        self._ended = True
        if self._transport is not None:
            self._transport.close()
        if self._started is not None:
            await asyncio.to_thread(self._started.stop)
