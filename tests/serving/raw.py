"""Requests by the byte, as no client library sends them."""

from __future__ import annotations

import json
import socket
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

WAIT_S = 60.0


def connect(url: str, receive_buffer: int | None = None) -> socket.socket:
    """A connection to a server."""
    parts = urlsplit(url)
    one = socket.socket()
    if receive_buffer is not None:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    one.settimeout(WAIT_S)
    one.connect((parts.hostname, parts.port))
    return one


def request(
    path: str, body: Any = None, headers: dict[str, str] | None = None, method: str = "POST"
) -> bytes:
    """A request; a body that is no bytes is sent as JSON."""
    data = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
    lines = {
        "host": "localhost",
        "content-type": "application/json",
        "content-length": str(len(data)),
    }
    lines |= headers or {}
    head = "".join(f"{name}: {value}\r\n" for name, value in lines.items() if value)
    return f"{method} {path} HTTP/1.1\r\n{head}\r\n".encode() + data


@dataclass
class Answer:
    """An answer of a server."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def error(self) -> dict[str, Any]:
        """The error that it is."""
        found: dict[str, Any] = json.loads(self.body)["error"]
        return found


def read_all(one: socket.socket) -> bytes:
    """What comes until the server closes the connection."""
    parts = []
    try:
        while data := one.recv(1 << 16):
            parts.append(data)
    except ConnectionError:
        pass
    return b"".join(parts)


def ask(
    url: str, path: str, body: Any = None, headers: dict[str, str] | None = None, **others: Any
) -> Answer:
    """Send a request and read its answer."""
    with connect(url) as one:
        one.sendall(request(path, body, {"connection": "close"} | (headers or {}), **others))
        return parsed(read_all(one))


def parsed(data: bytes) -> Answer:
    """An answer, not chunked."""
    head, _, body = data.partition(b"\r\n\r\n")
    first, *lines = head.decode("latin-1").split("\r\n")
    pairs = (line.partition(": ") for line in lines)
    return Answer(int(first.split()[1]), {name: value for name, _, value in pairs}, body)
