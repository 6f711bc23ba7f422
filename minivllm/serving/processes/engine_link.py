"""One engine's process as the process of HTTP sees it: started, written to, listened to."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from typing import Any

from minivllm.errors import BadInput
from minivllm.platform.channel import Frames, frame
from minivllm.platform.children import module_path
from minivllm.serving.processes.messages import EngineState, Failed, Ready, Step

STOP_S = 5.0  # for the engine's process to end by itself


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
        lost: told once when the process is gone.
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
        self._gone = False
        self._ready: asyncio.Future[Ready] = asyncio.get_running_loop().create_future()
        self._process: subprocess.Popen[bytes] | None = None
        self._transport: asyncio.Transport | None = None

    async def start(self, config: dict[str, Any]) -> Ready:
        """Start the process and wait until the engine is built.

        Raises:
            BadInput: the engine cannot be built with this configuration.
            RuntimeError: its process failed.
        """
        ours, theirs = socket.socketpair()
        with theirs:
            words = [sys.executable, "-m", "minivllm.serving.processes.engine_process"]
            self._process = subprocess.Popen(
                [*words, str(theirs.fileno()), str(os.getpid())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": module_path()},
                start_new_session=True,  # Ctrl-C in the terminal is for this process
            )
        loop = asyncio.get_running_loop()
        transport, _ = await loop.create_connection(
            lambda: _Connection(self.receive, self.lose), sock=ours
        )
        self._transport = transport
        self.send(config)
        return await self._ready

    @property
    def is_alive(self) -> bool:
        """Whether its engine is built and serves."""
        return self._ready.done() and not self._gone

    @property
    def pid(self) -> int:
        """Process id of the engine."""
        assert self._process is not None
        return self._process.pid

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
                    self.state = message.state
                    self.counters = message.state.counters or self.counters
                self._got(self, message)

    def lose(self) -> None:
        """Note that the engine's process is gone."""
        self._gone = True
        if not self._ready.done():
            self._ready.set_exception(RuntimeError("the engine's process ended while it started"))
        self._on_lost(self)

    async def stop(self) -> None:
        """End the engine's process."""
        if self._transport is not None:
            self._transport.close()
        if self._process is None:
            return
        for end in (lambda: None, self._process.terminate, self._process.kill):
            end()
            with contextlib.suppress(subprocess.TimeoutExpired):
                await asyncio.to_thread(self._process.wait, STOP_S)
                return
