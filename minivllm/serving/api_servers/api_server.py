"""An API server: a process that answers clients, and sends their requests to the server's own
process, which has the engines."""

from __future__ import annotations

import asyncio
import signal
import socket
import sys
import traceback
from collections import Counter
from functools import partial
from typing import Any

from minivllm.config.groups import Config
from minivllm.errors import BadInput
from minivllm.platform.processes.channel import frame
from minivllm.platform.processes.children import die_with
from minivllm.platform.processes.heartbeat import BEAT_S, Beat
from minivllm.processes.link import ProcessConnection
from minivllm.processes.messages import Step, failed
from minivllm.processes.started import end_process
from minivllm.serving.api_servers.messages import (
    AnswerComplete,
    ApiServerReady,
    ApiServerStart,
    ClientCounts,
    Drain,
    End,
    MessageWanted,
    RequestFailed,
    ToClient,
)
from minivllm.serving.api_servers.relay import OpenCalls, Relay
from minivllm.serving.api_servers.relayed_engine import RelayedEngine
from minivllm.serving.app import build_api_app
from minivllm.serving.http.http_server import HttpServer
from minivllm.serving.http.logs import json_lines
from minivllm.serving.model_files import read_model_files
from minivllm.serving.processes.token_stream import Queued
from minivllm.serving.service import Service

COUNTS_S = 0.1  # between two messages about what clients did


class ApiServer:
    """Answers clients, as the first message says.

    Args:
        listener: the socket on which all API servers listen.
    """

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self._first: asyncio.Future[ApiServerStart | None]
        self._first = asyncio.get_running_loop().create_future()
        self._transport: asyncio.Transport | None = None
        self._calls = OpenCalls()
        self._engine: RelayedEngine | None = None
        self._service: Service | None = None
        self._server: HttpServer | None = None
        self._reported: tuple[Counter[str], Counter[int]] = Counter(), Counter()

    async def run(self, connection: socket.socket) -> int:
        """Serve until the server's own process says so, or is gone; returns the exit code.

        Args:
            connection: to that process.
        """
        loop = asyncio.get_running_loop()
        self._transport, _ = await loop.create_connection(
            lambda: ProcessConnection(self._receive, self._lose), sock=connection
        )
        start = await self._first
        server = None if start is None else self._built(start)
        if server is None:
            return 1
        self._server = server
        reporting = asyncio.ensure_future(self._report())
        self._post(ApiServerReady())
        with json_lines():
            await server.serve()
        reporting.cancel()
        self._report_counts()
        self._transport.close()
        return 0

    def _built(self, start: ApiServerStart) -> HttpServer | None:
        """What answers clients; None: it cannot be built, which is reported."""
        try:
            options = Config.of(start.config).task
            _, tokenizer, pictures = read_model_files(start.config)
            self._engine = RelayedEngine(start.number, options.slow_reader_pieces, self._post)
            facts = (start.info, tokenizer, start.model, pictures, start.created)
            self._service = Service(options, self._engine, *facts)
            paths = {path for _, path in start.relayed}
            relay = partial(Relay, paths=paths, post=self._post_of_call, calls=self._calls)
            app = build_api_app(self._service, relay, start.relayed)
            return HttpServer(app, self._service, self._listener)
        except Exception as error:
            if not isinstance(error, BadInput):
                traceback.print_exc()
            self._post(failed(error))
            return None

    def _post(self, message: Any) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(frame(message))

    def _post_of_call(self, message: Any) -> None:
        """Send a message of a relayed call, for which all that is counted here is known before."""
        self._report_counts()
        self._post(message)

    def _receive(self, message: Any) -> None:
        match message:
            case ApiServerStart():
                self._first.set_result(message)
            case Step() | Queued() | RequestFailed() if self._engine is not None:
                self._engine.take(message)
            case ToClient() | AnswerComplete() | MessageWanted():
                self._calls.take(message)
            case Drain() if self._service is not None:
                self._service.is_draining = True
            case End(at_once) if self._server is not None:
                self._server.end(at_once)

    def _lose(self) -> None:
        """The server's own process is gone, and all engines with it."""
        if self._server is not None:
            self._server.end(at_once=True)
        elif not self._first.done():
            self._first.set_result(None)

    async def _report(self) -> None:
        """Send beats and what was counted, until this is cancelled."""
        loop = asyncio.get_running_loop()
        beat_s = loop.time()
        while True:
            self._report_counts()
            if loop.time() >= beat_s:
                self._post(Beat())
                beat_s = loop.time() + BEAT_S
            await asyncio.sleep(COUNTS_S)

    def _report_counts(self) -> None:
        """Send what was counted since the last time."""
        if self._service is None:
            return
        counts, statuses = self._service.counts.copy(), self._service.statuses.copy()
        more = ClientCounts(dict(counts - self._reported[0]), dict(statuses - self._reported[1]))
        self._reported = counts, statuses
        if any(more):
            self._post(more)


def main(descriptor: int, parent: int, listener: int) -> None:
    """Answer clients until the parent says so, in a process of its own, which ends here.

    Args:
        descriptor: of a socket that is connected to the parent.
        parent: process id of the server's own process.
        listener: the descriptor of a socket that has the server's address.
    """
    die_with(parent)
    for number in (signal.SIGINT, signal.SIGTERM):  # these are for the parent, which drains first
        signal.signal(number, signal.SIG_IGN)

    async def run() -> None:
        connection = socket.socket(fileno=descriptor)
        end_process(await ApiServer(socket.socket(fileno=listener)).run(connection))

    asyncio.run(run())


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
