"""An API server: a process that answers clients, and sends their requests to the server's own
process, which has the engines."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import traceback
from collections import Counter
from functools import partial
from typing import Any

from minivllm.config.typed import Config
from minivllm.errors import BadInput, first_line
from minivllm.extras.vision.fit import fitting_processor
from minivllm.extras.vision.pictures import Pictures
from minivllm.models.load.source import resolve
from minivllm.models.load.tokenizer import Tokenizer
from minivllm.platform.processes.channel import frame
from minivllm.platform.processes.children import die_with
from minivllm.platform.processes.heartbeat import BEAT_S, Beat
from minivllm.serving.api_servers.messages import (
    Answered,
    Begin,
    ClientsCounted,
    Drain,
    End,
    Ended,
    Sent,
    Serving,
    Share,
)
from minivllm.serving.api_servers.relay import OpenCalls, Relay
from minivllm.serving.api_servers.relayed_engine import RelayedEngine
from minivllm.serving.app import build_api_app
from minivllm.serving.http.http_server import HttpServer
from minivllm.serving.http.logs import json_lines
from minivllm.serving.processes.messages import Failed
from minivllm.serving.processes.process_link import ProcessConnection
from minivllm.serving.service import Service

COUNTED_S = 0.1  # between two messages about what clients did


class ApiServer:
    """Answers clients, as the first message says.

    Args:
        listener: the socket on which all API servers listen.
    """

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self._begun: asyncio.Future[Begin | None] = asyncio.get_running_loop().create_future()
        self._transport: asyncio.Transport | None = None
        self._calls = OpenCalls()
        self._engine: RelayedEngine | None = None
        self._service: Service | None = None
        self._server: HttpServer | None = None
        self._told: tuple[Counter[str], Counter[int]] = Counter(), Counter()

    async def run(self, connection: socket.socket) -> int:
        """Serve until the server's own process says so, or is gone; returns the exit code.

        Args:
            connection: to that process.
        """
        loop = asyncio.get_running_loop()
        self._transport, _ = await loop.create_connection(
            lambda: ProcessConnection(self._receive, self._lose), sock=connection
        )
        begin = await self._begun
        server = None if begin is None else self._built(begin)
        if server is None:
            return 1
        self._server = server
        telling = asyncio.ensure_future(self._tell())
        self._post(Serving())
        with json_lines():
            await server.serve(self._listener)
        telling.cancel()
        self._count()
        self._transport.close()
        return 0

    def _built(self, begin: Begin) -> HttpServer | None:
        """What answers clients; None: it cannot be built, which is told."""
        try:
            view = Config.of(begin.config)
            source = resolve(begin.config["model"], allow_random=False)[1]
            tokenizer = Tokenizer.load(source.folder)
            processor = fitting_processor(view.vision, source)
            pictures = None if processor is None else Pictures(processor, tokenizer, view.vision)
            options = view.task
            self._engine = RelayedEngine(begin.number, options.slow_reader_pieces, self._post)
            facts = (begin.info, tokenizer, begin.model, pictures, begin.created)
            self._service = Service(options, self._engine, *facts)
            relay = partial(Relay, paths=begin.paths, post=self._relayed, calls=self._calls)
            return HttpServer(build_api_app(self._service, relay, begin.paths), self._service)
        except Exception as error:
            if not isinstance(error, BadInput):
                traceback.print_exc()
            self._post(Failed(first_line(error), isinstance(error, BadInput)))
            return None

    def _post(self, message: Any) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(frame(message))

    def _relayed(self, message: Any) -> None:
        """Send a message of a relayed call, which finds all that is counted here."""
        self._count()
        self._post(message)

    def _receive(self, message: Any) -> None:
        match message:
            case Begin():
                self._begun.set_result(message)
            case Share() if self._engine is not None:
                self._engine.take(message)
            case Ended() if self._engine is not None:
                self._engine.end(message)
            case Sent() | Answered():
                self._calls.take(message)
            case Drain() if self._service is not None:
                self._service.is_draining = True
            case End(at_once) if self._server is not None:
                self._server.end(at_once)

    def _lose(self) -> None:
        """The server's own process is gone, and all engines with it."""
        if self._server is not None:
            self._server.end(at_once=True)
        elif not self._begun.done():
            self._begun.set_result(None)

    async def _tell(self) -> None:
        """Say that this process runs, and what it has counted, until this is cancelled."""
        loop = asyncio.get_running_loop()
        beat_s = loop.time()
        while True:
            self._count()
            if loop.time() >= beat_s:
                self._post(Beat())
                beat_s = loop.time() + BEAT_S
            await asyncio.sleep(COUNTED_S)

    def _count(self) -> None:
        """Tell what was counted since the last time."""
        if self._service is None:
            return
        counts, statuses = self._service.counts.copy(), self._service.statuses.copy()
        counted = ClientsCounted(dict(counts - self._told[0]), dict(statuses - self._told[1]))
        self._told = counts, statuses
        if any(counted):
            self._post(counted)


def main(descriptor: int, parent: int, listener: int) -> int:
    """Answer clients until the parent says so, in a process of its own; returns the exit code.

    Args:
        descriptor: of a socket that is connected to the parent.
        parent: process id of the server's own process.
        listener: the descriptor of a socket that has the server's address.
    """
    die_with(parent)
    for number in (signal.SIGINT, signal.SIGTERM):  # these are for the parent, which drains first
        signal.signal(number, signal.SIG_IGN)

    async def run() -> int:
        return await ApiServer(socket.socket(fileno=listener)).run(socket.socket(fileno=descriptor))

    return asyncio.run(run())


if __name__ == "__main__":
    code = main(*map(int, sys.argv[1:]))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # without a wait for threads of libraries
