"""Clients that send nothing, read nothing or leave: their connections close and their blocks are
free again."""

from __future__ import annotations

import json
import socket
import time
from contextlib import suppress

import psutil
import pytest

from tests.engines.servers.waiting import wait_until
from tests.serving.raw import connect, read_all, request
from tests.serving.running import KEY, RunningServer, line_of, until_idle
from tests.serving.view.following import metric

WITH_KEY = {"authorization": f"Bearer {KEY}"}
LONG = {"prompt": "x", "max_tokens": 1500, "ignore_eos": True, "return_token_ids": True}


@pytest.mark.parametrize("sent", [b"", b"GET /v1/mod", b"\r\n\r\n\r\n"])
def test_a_head_that_does_not_come_closes_the_connection(
    guarded: RunningServer, sent: bytes
) -> None:
    with connect(guarded.url) as one:
        one.sendall(sent)
        answer = read_all(one)
    assert answer[:12] == (b"HTTP/1.1 408" if sent else b"")


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_ends_its_request(guarded: RunningServer, stream: bool) -> None:
    request_id = f"leaves-{stream}"
    headers = WITH_KEY | {"x-request-id": request_id}
    with connect(guarded.url) as one:
        one.sendall(request("/v1/completions", LONG | {"n": 8, "stream": stream}, headers))
        if stream:
            one.recv(100)
        else:
            assert wait_until(lambda: metric(guarded, "num_requests_running", KEY) == 8)
    line = line_of(guarded, request_id)
    assert line["status"] == 499 and line["output_tokens"] < 8 * 1500
    until_idle(guarded, KEY)


def test_a_client_that_leaves_while_its_request_waits(guarded: RunningServer) -> None:
    """Nobody sends anything to it, so only its connection tells."""
    many = [connect(guarded.url) for _ in range(20)]
    body = LONG | {"n": 8, "stream": True, "prompt": "x " * 100}
    for number, one in enumerate(many):
        one.sendall(request("/v1/completions", body, WITH_KEY | {"x-request-id": f"w-{number}"}))
    known = ("num_requests_running", "num_requests_waiting")
    assert wait_until(lambda: sum(metric(guarded, name, KEY) for name in known) >= len(many))
    for one in reversed(many):
        one.close()
    lines = [line_of(guarded, f"w-{number}") for number in range(20)]
    assert {line["status"] for line in lines} == {499}
    assert any("ttft_ms" not in line for line in lines)
    until_idle(guarded, KEY)


def test_a_slow_reader_is_cut_off(guarded: RunningServer) -> None:
    headers = WITH_KEY | {"x-request-id": "slow"}
    body = LONG | {"stream": True, "logprobs": 20}
    with connect(guarded.url, receive_buffer=4096) as one:
        one.sendall(request("/v1/completions", body, headers))
        line = line_of(guarded, "slow")
        rest = read_all(one)  # what the kernel has, and then the end
    assert line["output_tokens"] < 1500
    until_idle(guarded, KEY)
    assert len(rest) < 1_000_000 and not rest.endswith(b"0\r\n\r\n")


def until_closed(server: RunningServer, client: socket.socket) -> None:
    """Wait until the server has closed its end of a connection. Raises TimeoutError."""
    process, port = psutil.Process(server.process.pid), client.getsockname()[1]
    deadline = time.monotonic() + 60
    while any(c.raddr and c.raddr[1] == port for c in process.net_connections("tcp")):
        if time.monotonic() > deadline:
            raise TimeoutError("the connection stays open")
        time.sleep(0.1)


def test_an_answer_that_nobody_takes_is_dropped(guarded: RunningServer) -> None:
    """It is complete, so nothing but the connection waits."""
    body = LONG | {"logprobs": 20, "n": 2}
    with connect(guarded.url, receive_buffer=4096) as one:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        one.sendall(request("/v1/completions", body, WITH_KEY | {"x-request-id": "untaken"}))
        data = b""
        with suppress(ConnectionResetError):  # it came and was dropped before this process ran
            data = one.recv(1000)
        until_closed(guarded, one)
        data += read_all(one)
    if data:
        whole = int(data.partition(b"content-length: ")[2].partition(b"\r\n")[0])
        assert len(data) < whole and json.dumps("choices").encode() in data
