"""Viewers of a real server, by the websockets package."""

from __future__ import annotations

import contextlib
import json
import re
import socket
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import urlsplit

from websockets.sync.client import ClientConnection, connect

from minivllm.report.view.state import ViewState
from tests.serving.raw import ask
from tests.serving.running import RunningServer

MOST_MESSAGES = 1200  # a minute of an engine that works


class Follower:
    """A viewer that keeps what it is told.

    Args:
        connection: to /ws/events.
    """

    def __init__(self, connection: ClientConnection) -> None:
        self.connection, self.view = connection, ViewState()
        self.bundles: list[dict[str, Any]] = []
        self.gauges: list[dict[str, Any]] = []
        self.items: list[dict[str, Any]] = []  # all of them
        self.http: list[list[Any]] = []  # times of requests of HTTP
        self.num_messages = 0

    def read(self) -> None:
        """Take one message."""
        self.num_messages += 1
        for item in json.loads(self.connection.recv(60)):
            self.items.append(item)
            if "gauges" in item:
                self.gauges.append(item["gauges"])
            elif "http" in item:
                self.http.append(item["http"])
            else:
                self.bundles.append(item)
                self.view.apply(item)

    def until(self, is_so: Callable[[Follower], object]) -> Follower:
        """Take messages until something is so."""
        for _ in range(MOST_MESSAGES):
            if is_so(self):
                return self
            self.read()
        raise AssertionError(f"it never is, with {list(self.view.requests.values())}")

    def state(self, until_s: float = float("inf")) -> tuple[Any, ...]:
        """What the bundles that ended by then say of requests and blocks."""
        view = ViewState()
        for bundle in self.bundles:
            if bundle["end_s"] <= until_s:
                view.apply(bundle)  # type: ignore[arg-type]
        return view.engine, view.requests, view.cached, view.num_waiting, view.num_used_blocks


@contextlib.contextmanager
def watching(
    server: RunningServer, receive_buffer: int | None = None, **headers: str
) -> Iterator[Follower]:
    """A viewer.

    Args:
        server: is watched.
        receive_buffer: bytes that wait in its kernel, about.
        headers: further ones.
    """
    parts = urlsplit(server.url)
    own = socket.socket()
    if receive_buffer is not None:
        own.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    own.connect((parts.hostname, parts.port))
    url = server.url.replace("http", "ws") + "/ws/events"
    settings = {"compression": None, "max_queue": 1, "max_size": None, "close_timeout": 1}
    with connect(url, sock=own, additional_headers=headers, **settings) as made:
        yield Follower(made)


def metric(server: RunningServer, name: str, key: str = "none", **labels: str) -> float:
    """A figure of /metrics."""
    headers = {"authorization": f"Bearer {key}"}
    text = ask(server.url, "/metrics", headers=headers, method="GET").body.decode()
    wanted = [f'{label}="{value}"' for label, value in labels.items()]
    for line in text.splitlines():
        if (found := re.match(rf"minivllm:{name}{{(.*)}} (\S+)$", line)) and all(
            one in found[1] for one in wanted
        ):
            return float(found[2])
    raise AssertionError(f"there is no {name}")
