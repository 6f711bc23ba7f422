"""Asking a server: where to, with which key, and with which limits."""

from __future__ import annotations

import asyncio
import base64
import http.server
import socket
import threading
from collections.abc import Iterator
from typing import Any, cast

import pytest

pytest.importorskip("aiohttp")

from minivllm import BadInput
from minivllm.engines.openai import client as client_module
from minivllm.engines.openai.client import Client
from minivllm.engines.openai.stream_event import ServerError
from minivllm.platform.processes.channel import LOST_S, prepare_tcp
from tests.engines.fake_server import POLL_S


class Handler(http.server.BaseHTTPRequestHandler):
    asked: list[tuple[str, str | None]] = []
    missing = staticmethod(lambda path: False)

    def log_message(self, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        self.asked.append((self.path, self.headers["Authorization"]))
        body = {"/v1/deep": b"[" * 100_000, "/v1/long": b"1" * 5000}.get(
            self.path.partition("?")[0], b'{"a": 1}'
        )
        self.send_response(
            302 if "elsewhere" in self.path else 404 if self.missing(self.path) else 200
        )
        self.send_header("Location", "http://localhost:1/stolen")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@pytest.fixture
def server() -> Iterator[tuple[str, list[tuple[str, str | None]]]]:
    """Host and port, and what is asked there."""
    handler = type("Own", (Handler,), {"asked": []})
    running = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=running.serve_forever, args=(POLL_S,), daemon=True).start()
    yield f"127.0.0.1:{running.server_port}", handler.asked
    running.shutdown()
    running.server_close()


def ask(url: str, key: str | None, path: str = "models") -> Any:
    client = Client(url, key, 4)
    try:
        return client.wait(client.ask_json(path))
    finally:
        client.close()


def test_keys_users_and_queries_go_along_and_are_no_part_of_the_address(
    server: tuple[str, list[tuple[str, str | None]]],
) -> None:
    host, asked = server
    assert ask(f"http://{host}/v1/", " key\n") == {"a": 1}
    assert ask(f"http://us%40er:pass@{host}/v1?api_key=abc", "key") == {"a": 1}
    basic = base64.b64encode(b"us@er:pass").decode()
    assert asked == [("/v1/models", "Bearer key"), ("/v1/models?api_key=abc", f"Basic {basic}")]
    client = Client(f"http://user:pass@{host}/v1?api_key=abc", None, 4)
    assert (
        client.address("x") == f"http://{host}/v1/x" and client.beside("/x") == f"http://{host}/x"
    )
    client.close()


def test_a_connection_notices_that_the_server_s_host_is_gone(
    server: tuple[str, list[tuple[str, str | None]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = list[int]()

    def prepare(made: socket.socket) -> None:
        prepare_tcp(made)
        limits.append(made.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT))

    monkeypatch.setattr(client_module, "prepare_tcp", prepare)
    client = Client(f"http://{server[0]}/v1", None, 4)
    assert client.wait(client.ask_json("models")) == {"a": 1}
    assert limits == [1e3 * LOST_S]
    client.close()


@pytest.mark.parametrize(
    ("given", "root", "asked_for", "found"),
    [
        ("", "/v1", ["/v1/models"], "/v1"),
        ("/", "/v1", ["/v1/models"], "/v1"),
        ("", "", ["/v1/models", "/models"], ""),
        ("/own", "/v1", ["/own/models"], None),
        ("", "/own", ["/v1/models", "/models"], None),
    ],
)
def test_an_address_without_a_path_is_that_of_a_server_with_v1(
    server: tuple[str, list[tuple[str, str | None]]],
    monkeypatch: pytest.MonkeyPatch,
    given: str,
    root: str,
    asked_for: list[str],
    found: str | None,
) -> None:
    host, asked = server
    monkeypatch.setattr(Handler, "missing", staticmethod(lambda path: path != f"{root}/models"))
    client = Client(f"http://{host}{given}", None, 4)
    try:
        if found is None:
            with pytest.raises(ServerError, match="HTTP 404"):
                client.wait(client.models())
        else:
            assert client.wait(client.models()) == {"a": 1}
        assert [path for path, _ in asked] == asked_for
        path = asked_for[0].removesuffix("/models") if found is None else found
        assert client.address("x") == f"http://{host}{path}/x"
    finally:
        client.close()


def test_a_redirect_is_told_and_not_followed(
    server: tuple[str, list[tuple[str, str | None]]],
) -> None:
    host, asked = server
    with pytest.raises(
        ServerError, match="HTTP 302: it redirects to http://localhost:1/stolen, which is not"
    ):
        ask(f"http://{host}/v1", "key", "elsewhere")
    assert len(asked) == 1


def test_an_answer_has_limits(
    server: tuple[str, list[tuple[str, str | None]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ServerError, match="nested too deeply"):
        ask(f"http://{server[0]}/v1", None, "deep")
    monkeypatch.setattr(client_module, "MOST_ANSWER", 4096)
    with pytest.raises(ServerError, match="longer than 4 KiB"):
        ask(f"http://{server[0]}/v1", None, "long")


class LongLine:
    """An answer whose line is too long, in the words of older releases of aiohttp."""

    content: Any

    def __init__(self) -> None:
        self.content = self

    async def readline(self) -> bytes:
        raise ValueError("Chunk too big")


def test_a_line_that_is_too_long_is_told_with_every_release() -> None:
    with pytest.raises(ServerError, match="a line of the stream is longer than 8 MiB"):
        asyncio.run(client_module._line(cast(Any, LongLine())))


@pytest.mark.parametrize("url", ["http://host:port/v1", "http://[::1/v1", "http://host:99999/v1"])
def test_an_address_that_is_none(url: str) -> None:
    with pytest.raises(BadInput, match=r"engine\.url is no address"):
        Client(url, None, 1)
