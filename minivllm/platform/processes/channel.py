"""Messages between two processes of this program over a socket pair, without blocking the sender.

A frame is its length and a pickle: both ends are processes of this program.
"""

from __future__ import annotations

import pickle
import select
import socket
import threading
from collections.abc import Iterator, Sequence
from typing import Any

LOST_S = 10.0  # without an acknowledgement, after which a connection between hosts is given up
HEADER = 8  # bytes of a frame's length
CHUNK = 1 << 20


def prepare_tcp(connection: socket.socket) -> None:
    """Let a connection over TCP send at once, and end within LOST_S where the other host, or the
    link to it, is gone. A connection of another kind is left alone."""
    if connection.family not in (socket.AF_INET, socket.AF_INET6):
        return
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    # Where the system has them: an idle connection is probed after 2 s, then every 2 s.
    for name, value in (
        *(("TCP_KEEPIDLE", 2), ("TCP_KEEPINTVL", 2), ("TCP_KEEPCNT", int(LOST_S) // 2 - 1)),
        ("TCP_USER_TIMEOUT", int(1e3 * LOST_S)),
    ):
        if (option := getattr(socket, name, None)) is not None:
            connection.setsockopt(socket.IPPROTO_TCP, option, value)


def frame(message: Any) -> bytes:
    """A message as bytes."""
    body = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    return len(body).to_bytes(HEADER, "little") + body


class Frames:
    """Cuts a stream of bytes into messages."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def push(self, data: bytes) -> Iterator[Any]:
        """The messages that these bytes complete."""
        self._buffer += data
        while len(self._buffer) >= HEADER:
            end = HEADER + int.from_bytes(self._buffer[:HEADER], "little")
            if len(self._buffer) < end:
                return
            message = pickle.loads(self._buffer[HEADER:end])
            del self._buffer[:end]
            yield message


class Channel:
    """One end of a connection. `send` never waits: what the socket does not take is kept and sent
    with later calls. Several threads may send.

    Args:
        connection: a connected stream socket.
    """

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self.closed = False  # the other end is gone
        self._connection, self._frames, self._backlog = connection, Frames(), bytearray()
        self._lock = threading.Lock()  # of the backlog

    @property
    def backlog(self) -> int:
        """Bytes that the socket has not taken yet."""
        return len(self._backlog)

    def fileno(self) -> int:
        """The descriptor of the socket."""
        return self._connection.fileno()

    def close(self) -> None:
        """Close this end, which the other end sees."""
        self._connection.close()
        self.closed = True

    def send(self, message: Any) -> None:
        """Send a message, as far as the socket takes it."""
        data = frame(message)
        with self._lock:
            self._backlog += data
            self._flush()

    def flush(self) -> None:
        """Send what earlier calls left."""
        with self._lock:
            self._flush()

    def _flush(self) -> None:
        try:
            while self._backlog:
                del self._backlog[: self._connection.send(self._backlog[:CHUNK])]
        except BlockingIOError:
            pass
        except OSError:
            self.closed = True

    def receive(self, timeout_s: float | None = 0.0) -> list[Any]:
        """The messages that have come; waits for the first one up to `timeout_s`, None for ever."""
        if not wait([self], timeout_s):
            return []
        self.flush()
        messages: list[Any] = []
        try:
            while data := self._connection.recv(CHUNK):
                messages.extend(self._frames.push(data))
            self.closed = True
        except BlockingIOError:
            pass
        except OSError:
            self.closed = True
        return messages


def wait(channels: Sequence[Channel], timeout_s: float | None = None) -> list[Channel]:
    """Those of several channels that have something to receive, or take what waits to be sent.

    Args:
        channels: none of them closed by this process.
        timeout_s: longest wait for the first one; None waits for ever.
    """
    poll = select.poll()
    by_descriptor = {channel.fileno(): channel for channel in channels}
    for descriptor, channel in by_descriptor.items():
        poll.register(descriptor, select.POLLIN | (select.POLLOUT if channel.backlog else 0))
    ready = poll.poll(None if timeout_s is None else 1e3 * timeout_s)
    return [by_descriptor[descriptor] for descriptor, _ in ready]
