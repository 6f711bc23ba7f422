"""Another process of the server as its own process sees it: written to, listened to, ended, and
started again."""

from __future__ import annotations

import asyncio
import math
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, ClassVar

from minivllm.errors import BadInput, Crashed
from minivllm.platform.processes.channel import Frames, frame
from minivllm.platform.processes.heartbeat import BEAT_S, SILENT_BUILDING_S, SILENT_S, Beat, Silence
from minivllm.processes.messages import Failed
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
        ready: what it said when it served; None: it never has.
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
        """`start` with the server, whose failure names the process and has its last words."""
        try:
            await self.start(started, first)
        except Crashed:
            raise Crashed(f"{name} does not start: {await self.last_words()}") from None

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

    async def last_words(self) -> str:
        """Why it has stopped."""
        if self.failure is not None or self.started is None:
            return self.failure or "its log says why"
        return f"its process {await asyncio.to_thread(self.started.last_words)}"

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
