"""Connections of clients that do not send, do not read, or send too much: uvicorn's protocols with
limits.

uvicorn waits for ever for the rest of a head and for a client to take what was written to it, and
keeps a head of any size.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import struct
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

from minivllm.serving.options import ServeOptions

if TYPE_CHECKING:
    from minivllm.serving.http.calls import Connection

MOST_HEAD_BYTES = 65_536  # of a request's line and headers
CHECK_S = 0.5
_RESET = struct.pack("ii", 1, 0)  # SO_LINGER: what the kernel has not sent is dropped


class _Watched(asyncio.Protocol):
    """What both protocols share: a client that takes nothing is cut off, and its calls end when it
    leaves.

    Args:
        options: the limits.
        count: counts what clients did, by name.
        others: as of uvicorn's protocol.
    """

    transport: asyncio.Transport
    full_since: float | None = None  # since when something waits to be written

    def __init__(self, options: ServeOptions, count: Callable[[str], None], **others: Any) -> None:
        super().__init__(**others)
        self.options, self.count = options, count
        self.on_lost: set[Callable[[], None]] = set()

    def connection_lost(self, exc: Exception | None) -> None:
        """End the calls of a client that has left."""
        super().connection_lost(exc)
        for leave in list(self.on_lost):
            leave()

    def resume_writing(self) -> None:
        """Note that the client has taken most of what waited."""
        self.full_since = None
        super().resume_writing()

    def cut_off(self) -> None:
        """Close the connection at once, with what waits to be written."""
        if (connection := self.transport.get_extra_info("socket")) is not None:
            with contextlib.suppress(OSError):
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        self.transport.abort()

    def check(self, now: float) -> None:
        """Cut off a client that has not taken what waits for it.

        Args:
            now: on the clock of `time.monotonic`.
        """
        if not self.transport.get_write_buffer_size():
            self.full_since = None
        elif self.full_since is None:
            self.full_since = now
        elif now - self.full_since > self.options.client_timeout_s:
            self.count("slow_readers")
            self.cut_off()


class HttpConnection(_Watched, HttpToolsProtocol):
    """One connection of HTTP.

    Args:
        options, count, others: as of every protocol.
        most: connections at a time; more are refused and closed.
    """

    def __init__(
        self, options: ServeOptions, count: Callable[[str], None], most: int, **others: Any
    ) -> None:
        super().__init__(options, count, **others)
        self._most = most
        self._head_bytes, self._in_head = 0, False
        self._head_since: float | None = None  # the first byte of a head that is not complete
        self._idle_since = time.monotonic()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Take a connection, or refuse it where there are too many."""
        super().connection_made(transport)
        self.app_state = {**self.app_state, "connection": self}
        if len(self.connections) > self._most:
            self.count("connections_refused")
            self._refuse(503, "too many connections")

    def data_received(self, data: bytes) -> None:
        """Take bytes, of a head only so many."""
        if self.transport.is_closing():
            return
        was_in_head = self._in_head
        if self._head_since is None and self._is_idle:
            self._head_since = time.monotonic()
        super().data_received(data)
        if was_in_head and self._in_head:
            self._head_bytes += len(data)
            if self._head_bytes > MOST_HEAD_BYTES:
                self._refuse(431, "the headers are too large")

    def on_message_begin(self) -> None:
        """Begin a head."""
        super().on_message_begin()
        self._in_head, self._head_bytes = True, 0

    def on_headers_complete(self) -> None:
        """End a head."""
        self._in_head, self._head_since = False, None
        super().on_headers_complete()

    def on_response_complete(self) -> None:
        """Begin to wait for the next request."""
        self._idle_since = time.monotonic()
        super().on_response_complete()

    @property
    def _is_idle(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def check(self, now: float) -> None:
        """Close the connection of a client that sends nothing, or takes too long for a head."""
        super().check(now)
        if self.transport.is_closing() or not self._is_idle:
            return
        if self._head_since is None:
            if now - self._idle_since > self.options.keep_alive_s:
                self.transport.close()
        elif now - max(self._head_since, self._idle_since) > self.options.client_timeout_s:
            self.count("slow_senders")
            self._refuse(408, "the request did not arrive in time")

    def send_400_response(self, msg: str) -> None:
        """Answer what is no HTTP."""
        self._refuse(400, msg)

    def _refuse(self, status: int, message: str) -> None:
        """Answer without a request, and close."""
        error = {"message": message, "type": "invalid_request_error", "param": None, "code": None}
        body = json.dumps({"error": error}).encode()
        head = (
            f"HTTP/1.1 {status} \r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        self.transport.close()


class SocketConnection(_Watched, WebSocketsSansIOProtocol):
    """One WebSocket."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Take a connection."""
        super().connection_made(transport)
        self.app_state = {**self.app_state, "connection": self}


if TYPE_CHECKING:
    _http: type[Connection] = HttpConnection
    _socket: type[Connection] = SocketConnection


async def watch(connections: Iterable[Any]) -> None:
    """Check connections until cancelled.

    Args:
        connections: uvicorn's, which come and go.
    """
    while True:
        await asyncio.sleep(CHECK_S)
        now = time.monotonic()
        for connection in list(connections):
            connection.check(now)
