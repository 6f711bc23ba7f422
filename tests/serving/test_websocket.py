"""/ws/generate, asked by the websockets package."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from typing import Any

import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import ClientConnection, connect

from tests.serving.raw import ask
from tests.serving.running import KEY, RunningServer, line_of, until_idle

LONG = {"type": "generate", "prompt": "x", "max_tokens": 1500, "ignore_eos": True}
SHORT = LONG | {"max_tokens": 6}
WITH_KEY = {"authorization": f"Bearer {KEY}"}


@contextlib.contextmanager
def opened(server: RunningServer, **headers: str) -> Iterator[ClientConnection]:
    url = server.url.replace("http", "ws") + "/ws/generate"
    with connect(url, additional_headers=headers, compression=None) as socket:
        yield socket


def send(socket: ClientConnection, **message: Any) -> None:
    socket.send(json.dumps(message))


def receive(socket: ClientConnection) -> dict[str, Any]:
    message: dict[str, Any] = json.loads(socket.recv(60))
    return message


def until(socket: ClientConnection, *numbers: str) -> dict[str, list[dict[str, Any]]]:
    """The messages of requests until the last of each has come."""
    found: dict[str, list[dict[str, Any]]] = {number: [] for number in numbers}
    left = set(numbers)
    while left:
        message = receive(socket)
        found[message["id"]].append(message)
        if message["type"] != "token":
            left.discard(message["id"])
    return found


def test_several_requests_share_a_socket_and_have_their_own_text(server: RunningServer) -> None:
    prompts = {"a": "def add(a, b):\n", "b": "# naïve façade – 値\nx = '", "c": "import os\n"}
    with opened(server) as socket:
        for number, prompt in prompts.items():
            send(socket, type="generate", id=number, prompt=prompt, max_tokens=24, seed=5)
        found = until(socket, *prompts)
    for number, prompt in prompts.items():
        body = {"prompt": prompt, "max_tokens": 24, "seed": 5, "return_token_ids": True}
        whole = json.loads(ask(server.url, "/v1/completions", body).body)
        *tokens, done = found[number]
        assert done == {"type": "done", "id": number, "usage": done["usage"]}
        assert "".join(token["text"] for token in tokens) == whole["choices"][0]["text"]
        assert [t["token_id"] for t in tokens] == whole["choices"][0]["token_ids"]
        assert [t["finish_reason"] for t in tokens[:-1]] == [None] * (len(tokens) - 1)
        assert done["usage"]["completion_tokens"] == 24


def test_samples_and_log_probabilities(server: RunningServer) -> None:
    with opened(server) as socket:
        ids = {"prompt_token_ids": [5, 6, 7], "n": 2, "logprobs": 1, "max_tokens": 3}
        send(socket, type="generate", id="n", ignore_eos=True, **ids)
        *tokens, done = until(socket, "n")["n"]
    assert sorted(token["index"] for token in tokens) == [0, 0, 0, 1, 1, 1]
    assert all(str(token["token_id"]) in token["logprobs"] for token in tokens)
    assert done["usage"]["prompt_tokens"] == 3


def test_a_conversation_is_a_prompt(chat_server: RunningServer, server: RunningServer) -> None:
    messages = [{"role": "user", "content": "hello"}]
    with opened(chat_server) as socket:
        send(socket, type="generate", id="chat", messages=messages, max_tokens=8)
        *tokens, done = until(socket, "chat")["chat"]
        assert tokens and done["type"] == "done"
    with opened(server) as socket:
        send(socket, type="generate", id="chat", messages=messages, max_tokens=4)
        send(socket, type="generate", id="text", prompt="hello", max_tokens=4)
        answers = until(socket, "chat", "text")
        ids = [[one["token_id"] for one in answers[name][:-1]] for name in ("chat", "text")]
        assert ids[0] == ids[1] and len(ids[0]) == 4


def test_a_cancelled_request_ends_and_others_go_on(server: RunningServer) -> None:
    with opened(server) as socket:
        send(socket, **LONG, id="long")
        receive(socket)
        send(socket, type="cancel", id="long")
        send(socket, type="cancel", id="unknown")
        send(socket, **SHORT, id="short")
        found = until(socket, "long", "short")
    assert found["long"][-1]["type"] == "cancelled"
    assert found["long"][-1]["usage"]["completion_tokens"] < 1500
    assert len(found["short"]) == 7 and found["short"][-1]["type"] == "done"
    until_idle(server)


def test_a_request_and_its_cancellation_may_come_at_once(server: RunningServer) -> None:
    with opened(server) as socket:
        with socket.protocol_mutex:
            for message in ({**LONG, "id": "a"}, {"type": "cancel", "id": "a"}):
                socket.protocol.send_text(json.dumps(message).encode())
            socket.send_data()
        assert until(socket, "a")["a"][-1]["type"] == "cancelled"
        send(socket, **SHORT, id="a")
        assert until(socket, "a")["a"][-1]["type"] == "done"
    until_idle(server)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"temprature": 1}, "unknown field"),
        ({"model": "gpt-4"}, "does not exist"),
        ({"prompt_token_ids": [1]}, "give one of"),
        ({"prompt": ""}, "the prompt is empty"),
        ({"prompt": "\ud800"}, "is no character"),
        ({"stream": False}, "always streams"),
        ({"stream": True, "stream_options": {"continuous_usage_stats": True}}, "stream_options"),
        ({"max_tokens": 0}, "max_tokens"),
    ],
)
def test_a_wrong_request_is_an_error_with_its_id(
    server: RunningServer, wrong: dict[str, Any], words: str
) -> None:
    with opened(server) as socket:
        send(socket, **SHORT | wrong, id="wrong")
        error = receive(socket)
        assert error["type"] == "error" and error["id"] == "wrong"
        assert words in error["error"]["message"] and 400 <= error["error"]["status"] < 500
        send(socket, **SHORT, id="right")
        assert until(socket, "right")["right"][-1]["type"] == "done"


def test_an_id_that_runs_and_too_many_requests_are_refused(server: RunningServer) -> None:
    with opened(server) as socket:
        for number in range(65):
            send(socket, **LONG, id=str(number % 64))
        errors = []
        while not errors:
            message = receive(socket)
            errors += [message["error"]["message"]] if message["type"] == "error" else []
        assert errors == ["a request with this id is running"]
        send(socket, **LONG, id="65th")
        while (message := receive(socket))["type"] != "error":
            pass
        assert message["id"] == "65th" and message["error"]["status"] == 429
    until_idle(server)


@pytest.mark.parametrize(
    "frame",
    [
        "",
        "{",
        "null",
        "[]",
        "1" * 5000,
        "[" * 10_000,
        b"\x00\xff",
        '{"type": "generate"}',
        '{"type": "nonsense", "id": "1"}',
        '{"type": "generate", "id": 1}',
        '{"type": "generate", "id": "1", "prompt": {}}',
        '{"type": "generate", "id": "' + "x" * 200 + '", "prompt": "x"}',
    ],
)
def test_malformed_messages_are_answered_and_close_the_socket_in_the_end(
    server: RunningServer, frame: str | bytes
) -> None:
    with opened(server) as socket:
        for _ in range(8):
            socket.send(frame)
        for _ in range(8):
            answer = receive(socket)
            assert answer["type"] == "error" and answer["error"]["status"] == 400
        with pytest.raises(ConnectionClosed) as closed:
            while True:
                receive(socket)
    assert closed.value.rcvd is not None and closed.value.rcvd.code == 1008


def test_the_key_comes_by_header_or_by_the_first_message(guarded: RunningServer) -> None:
    with opened(guarded, **WITH_KEY) as socket:
        send(socket, **SHORT, id="1")
        assert until(socket, "1")["1"][-1]["type"] == "done"
    with opened(guarded) as socket:
        send(socket, type="auth", api_key=KEY)
        send(socket, **SHORT, id="1")
        assert until(socket, "1")["1"][-1]["type"] == "done"
    for first in ({"type": "auth", "api_key": "wrong"}, {**SHORT, "id": "1"}, None):
        with opened(guarded) as socket, pytest.raises(ConnectionClosed) as closed:
            if first is not None:
                send(socket, **first)
            assert receive(socket)["error"]["status"] == 401
            receive(socket)
        assert closed.value.rcvd is not None and closed.value.rcvd.code == 1008
    with pytest.raises(InvalidStatus) as refused, opened(guarded, authorization="Bearer no"):
        pass
    assert refused.value.response.status_code == 401


def test_a_page_of_another_origin_cannot_open_one(
    server: RunningServer, guarded: RunningServer
) -> None:
    with pytest.raises(InvalidStatus) as refused, opened(server, origin="http://evil.example"):
        pass
    assert refused.value.response.status_code == 403
    with opened(server, origin=server.url), opened(guarded, **WITH_KEY, origin="http://a.example"):
        pass


def test_a_frame_that_is_too_large_closes_the_socket(guarded: RunningServer) -> None:
    with opened(guarded, **WITH_KEY) as socket, pytest.raises(ConnectionClosed) as closed:
        socket.send("x" * 200_000)
        receive(socket)
    assert closed.value.rcvd is not None and closed.value.rcvd.code == 1009


def test_a_client_that_leaves_or_does_not_read_frees_its_blocks(guarded: RunningServer) -> None:
    with opened(guarded, **WITH_KEY, **{"x-request-id": "ws"}) as socket:
        for number in range(3):
            send(socket, **LONG, id=f"leaves-{number}")
        receive(socket)
        socket.socket.close()
    lines = [line_of(guarded, f"ws/leaves-{number}") for number in range(3)]
    assert all(line["output_tokens"] < 1500 for line in lines)
    until_idle(guarded, KEY)
    with opened(guarded, **WITH_KEY, **{"x-request-id": "slow-ws"}) as socket:
        for number in range(8):
            send(socket, **LONG | {"n": 8, "logprobs": 20}, id=str(number))
        assert line_of(guarded, "slow-ws/0")["output_tokens"] < 8 * 1500
        with pytest.raises(ConnectionClosed):
            while True:
                receive(socket)
    until_idle(guarded, KEY)
