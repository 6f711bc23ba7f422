"""uvicorn on a socket that listens already, with limits of connections and without its signals."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import socket
from functools import partial
from typing import Any, cast

import uvicorn
from fastapi import FastAPI

from minivllm.serving.app import guard
from minivllm.serving.http.connections import HttpConnection, SocketConnection, watch
from minivllm.serving.http.limits import BYTES_PER_MB
from minivllm.serving.service import Service

SPARE_FILES = 64  # file descriptors that are no connections
SHUTDOWN_S = 3  # for answers that are complete to be read, once no request runs


class _Server(uvicorn.Server):
    """uvicorn's server without its handling of signals, which drain here."""

    def capture_signals(self) -> Any:
        """Capture none."""
        return contextlib.nullcontext()


class HttpServer:
    """Answers clients over HTTP, within the limits of the service.

    Args:
        app: the application, which gets them here.
        service: whose limits these are.
        listener: a socket with an address.
    """

    def __init__(self, app: FastAPI, service: Service, listener: socket.socket) -> None:
        guard(app, service)
        self._listener = listener
        options, count = service.options, service.count
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[0] - SPARE_FILES
        self._server = _Server(
            uvicorn.Config(
                app,
                http=cast(Any, partial(HttpConnection, options, count, most)),
                ws=cast(Any, partial(SocketConnection, options, count)),
                ws_max_size=int(options.max_body_mb * BYTES_PER_MB),
                ws_per_message_deflate=False,  # a token is too short for it
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,  # a client could give itself any address
                timeout_keep_alive=max(1, round(options.keep_alive_s)),
                timeout_graceful_shutdown=SHUTDOWN_S,
                lifespan="off",
            )
        )

    async def serve(self) -> None:
        """Serve until `end`."""
        watching = asyncio.ensure_future(watch(self._server.server_state.connections))
        try:
            await self._server.serve([self._listener])
        finally:
            watching.cancel()

    def end(self, at_once: bool = False) -> None:
        """Take no new connections, and end once those that are open have their answers.

        Args:
            at_once: do not wait for these.
        """
        self._server.force_exit |= at_once
        self._server.should_exit = True
