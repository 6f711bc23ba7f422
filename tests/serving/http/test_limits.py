"""Requests that are refused before an API sees them, each with a clear answer."""

from __future__ import annotations

import json
import socket
from typing import Any

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minivllm.serving.http.limits import depth, outline
from tests.serving.raw import ask, connect, parsed, read_all, request
from tests.serving.running import KEY, RunningServer

COMPLETIONS = "/v1/completions"
WITH_KEY = {"authorization": f"Bearer {KEY}"}
JSON = st.recursive(
    st.none() | st.integers() | st.text(alphabet='a"\\[]{}\n', max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=12,
)


def levels(value: Any) -> int:
    if isinstance(value, dict):
        return 1 + max(map(levels, value.values()), default=0)
    return 1 + max(map(levels, value), default=0) if isinstance(value, list) else 0


@given(JSON, st.booleans())
def test_the_depth_of_json_is_that_of_its_value(value: Any, ascii_only: bool) -> None:
    text = json.dumps(value, ensure_ascii=ascii_only).encode()
    assert depth(outline(text)) == levels(value)


@given(st.text(alphabet='"\\[]{},a', max_size=30) | st.binary(max_size=30))
def test_the_depth_of_anything_else_is_some_number(text: str | bytes) -> None:
    assert depth(outline(text.encode() if isinstance(text, str) else text)) >= 0


def test_a_body_that_is_too_large_is_a_413_that_the_client_can_read(
    guarded: RunningServer,
) -> None:
    body = {"prompt": "x" * 3_000_000}
    answer = ask(guarded.url, COMPLETIONS, body, WITH_KEY)
    assert answer.status == 413 and "task.max_body_mb=0.1" in answer.error["message"]


def test_a_chunked_body_that_is_too_large_is_a_413(guarded: RunningServer) -> None:
    with connect(guarded.url) as one:
        headers = {**WITH_KEY, "content-length": "", "transfer-encoding": "chunked"}
        one.sendall(request(COMPLETIONS, None, headers))
        for _ in range(40):
            one.sendall(b"2000\r\n" + b"x" * 0x2000 + b"\r\n")
        one.sendall(b"0\r\n\r\n")
        assert parsed(read_all(one)).status == 413


@pytest.mark.parametrize(
    ("body", "headers", "status", "words"),
    [
        (b"[" * 20_000, {}, 400, "task.max_depth=8"),
        (b'{"prompt":' * 9 + b"1" + b"}" * 9, {}, 400, "task.max_depth=8"),
        (b'{"prompt": "x"}', {"content-type": "text/plain"}, 415, "application/json"),
        (b'{"prompt": "x"}', {"content-type": ""}, 415, "application/json"),
        (b'{"prompt": "x"', {}, 400, "JSON"),
        (b"\xff\xfe", {}, 400, ""),
        (b"1" * 9000, {}, 400, ""),
        (b'{"prompt": "\\ud800"}', {}, 400, ""),
        (b'{"prompt": [NaN]}', {}, 400, ""),
        (b"null", {}, 400, ""),
    ],
)
def test_a_body_of_the_wrong_form(
    guarded: RunningServer, body: bytes, headers: dict[str, str], status: int, words: str
) -> None:
    answer = ask(guarded.url, COMPLETIONS, body, WITH_KEY | headers)
    assert answer.status == status and words in answer.error["message"]
    assert b"Traceback" not in answer.body


@pytest.mark.parametrize(
    ("items", "words"),
    [
        ("[]," * 200_000 + "1", "lists, objects"),
        ("true," * 400_000 + "{}", "prompt"),
        ("1," * 10**6 + "1", "tokens"),
    ],
)
def test_a_body_of_many_wrong_items_has_one_error(
    server: RunningServer, items: str, words: str
) -> None:
    """All errors of its items would take a minute and gigabytes."""
    answer = ask(server.url, COMPLETIONS, f'{{"prompt": [{items}]}}'.encode())
    assert answer.status == 400 and words in answer.error["message"]
    assert len(answer.body) < 1000


def test_brackets_within_texts_are_no_levels(guarded: RunningServer) -> None:
    body = {"prompt": "[[[[[[[[[[{{{{{{{{", "max_tokens": 1}
    assert ask(guarded.url, COMPLETIONS, body, WITH_KEY).status == 200


def test_headers_that_are_too_large(guarded: RunningServer) -> None:
    many = {f"x-{number}": "v" * 1000 for number in range(70)}
    assert ask(guarded.url, "/v1/models", None, many, method="GET").status == 431
    with connect(guarded.url) as one:
        one.sendall(b"GET /v1/models HTTP/1.1\r\nx-endless: ")
        try:
            for _ in range(200):
                one.sendall(b"v" * 10_000)
        except ConnectionError:
            pass
        assert read_all(one)[:12] in (b"HTTP/1.1 431", b"")


def test_a_body_that_comes_byte_by_byte_is_a_408(guarded: RunningServer) -> None:
    with connect(guarded.url) as one:
        one.sendall(request(COMPLETIONS, {"prompt": "x"}, WITH_KEY)[:-5])
        answer = parsed(read_all(one))
    assert answer.status == 408 and "task.client_timeout_s" in answer.error["message"]


def test_many_slow_bodies_hold_no_more_than_the_limit(guarded: RunningServer) -> None:
    """Seventeen bodies of nearly the largest size: the last is told to come again."""
    sockets: list[socket.socket] = []
    try:
        for _ in range(18):
            one = connect(guarded.url)
            sockets.append(one)
            one.sendall(request(COMPLETIONS, b" " * 99_000, WITH_KEY)[:-1])
        statuses = [parsed(read_all(one)).status for one in sockets]
    finally:
        for one in sockets:
            one.close()
    assert statuses.count(429) >= 1 and set(statuses) <= {408, 429}


def test_a_head_is_answered_without_a_body(server: RunningServer) -> None:
    for path in ("/", "/health", "/ready"):
        with connect(server.url) as one:
            one.sendall(f"HEAD {path} HTTP/1.1\r\nhost: localhost\r\n\r\n".encode())
            one.sendall(b"GET /version HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
            head, _, rest = read_all(one).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200") and rest.startswith(b"HTTP/1.1 200")


def test_memory_of_large_bodies_is_returned(server: RunningServer) -> None:
    """The values of such a body take ten times its size."""
    process = psutil.Process(server.process.pid)
    body = {"prompt": [[1] * 1000] * 800}
    assert ask(server.url, COMPLETIONS, body).status == 400
    before = process.memory_info().rss
    for _ in range(3):
        assert ask(server.url, COMPLETIONS, body).status == 400
    assert process.memory_info().rss - before < 30e6
