"""Damaged bodies and frames of every API: an error of the client's, never one of the server's."""

from __future__ import annotations

import contextlib
import http.client
import json
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import pytest
from hypothesis import given
from hypothesis import strategies as st
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import ClientConnection, connect

from minivllm import LLM, SamplingParams
from minivllm.errors import BadInput
from tests.damage import changed, damaged
from tests.extras.masks.test_chains import GRAPHS, grammar_of, schema_of
from tests.serving.plain import call
from tests.serving.running import RunningServer, until_idle

MESSAGES = [{"role": "user", "content": "hello"}]
SAMPLING = {
    "model": "talker", "max_tokens": 3, "temperature": 0.5, "top_p": 0.9, "n": 2, "seed": 1,
    "stop": ["a"], "logit_bias": {"5": 1.0}, "presence_penalty": 0.1, "ignore_eos": False,
}  # fmt: skip
TOOL = {
    "type": "function",
    "function": {"name": "f", "parameters": {"type": "object", "properties": {}}},
}
# Turns that have called a tool, as each API has them.
CALLED = {"name": "f", "arguments": '{"x": [1]}'}
HISTORY: list[Any] = [
    *MESSAGES,
    {"role": "assistant", "tool_calls": [{"id": "a", "type": "function", "function": CALLED}]},
    {"role": "tool", "tool_call_id": "a", "content": [{"type": "text", "text": "r"}]},
    {"role": "assistant", "function_call": CALLED},
]
ITEMS: list[Any] = [
    *MESSAGES,
    {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "t"}]},
    {"type": "function_call", "call_id": "a", **CALLED},
    {"type": "function_call_output", "call_id": "a", "output": [{"type": "text", "text": "r"}]},
]
BLOCKS: list[Any] = [
    *MESSAGES,
    {"role": "assistant", "content": [
        {"type": "thinking", "thinking": "t"},
        {"type": "tool_use", "id": "a", "name": "f", "input": {"x": [1]}},
    ]},
    {"role": "user", "content": [
        {"type": "tool_result", "tool_use_id": "a", "content": [{"type": "text", "text": "r"}]},
        {"type": "text", "text": "hello"},
    ]},
]  # fmt: skip
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {**SAMPLING, "prompt": "x", "stream": False, "logprobs": 1, "echo": True},
    "/v1/chat/completions": {
        **SAMPLING, "messages": HISTORY, "logprobs": True, "top_logprobs": 2, "tools": [TOOL],
        "tool_choice": "auto", "response_format": {"type": "text"},
    },
    "/v1/responses": {
        "model": "talker", "input": ITEMS, "max_output_tokens": 16, "store": False,
        "instructions": "be short", "temperature": 0.5, "stream": False,
    },
    "/v1/messages": {
        "model": "talker", "max_tokens": 3, "messages": BLOCKS, "system": "be short",
        "stop_sequences": ["a"], "temperature": 0.5,
    },
    "/v1/messages/count_tokens": {"model": "talker", "messages": BLOCKS},
    "/tokenize": {"model": "talker", "prompt": "hello", "add_special_tokens": True},
    "/detokenize": {"model": "talker", "tokens": [5, 6, 7]},
}  # fmt: skip
FRAMES = (
    {**SAMPLING, "type": "generate", "id": "1", "prompt": "x"},
    {**SAMPLING, "type": "generate", "id": "1", "messages": HISTORY},
    {"type": "generate", "id": "1", "prompt_token_ids": [5, 6], "max_tokens": 2, "logprobs": 1},
    {"type": "cancel", "id": "1"},
    {"type": "auth", "api_key": "none"},
)


class Client:
    """Sends whatever it is given to a server, over connections that it keeps."""

    def __init__(self, server: RunningServer) -> None:
        self.server = server
        parts = urlsplit(server.url)
        self._http = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=60)
        self._socket: ClientConnection | None = None
        self._stack = contextlib.ExitStack()

    def post(self, path: str, body: bytes) -> tuple[int, bytes]:
        """Status and body of an answer."""
        try:
            self._http.request("POST", path, body, {"content-type": "application/json"})
            answer = self._http.getresponse()
            return answer.status, answer.read()
        except (ConnectionError, http.client.HTTPException):
            self._http.close()  # an idle connection that the server closed; it lives on
            raise

    def frame(self, frame: str | bytes) -> list[dict[str, Any]]:
        """What comes back on a WebSocket, with the end of a request that is sent after it."""
        if self._socket is None:
            url = self.server.url.replace("http", "ws") + "/ws/generate"
            self._socket = self._stack.enter_context(connect(url, compression=None))
        found: list[dict[str, Any]] = []
        probe = {"type": "generate", "id": "probe", "prompt": "x", "max_tokens": 1}
        try:
            self._socket.send(frame)
            self._socket.send(json.dumps(probe))
            while not found or found[-1]["id"] != "probe" or found[-1]["type"] == "token":
                found.append(json.loads(self._socket.recv(60)))
        except ConnectionClosed as closed:
            assert closed.rcvd is not None and closed.rcvd.code in (1003, 1007, 1008), closed
            self._socket = None
        return found

    def close(self) -> None:
        """Leave."""
        self._http.close()
        self._stack.close()


@pytest.fixture(scope="module")
def client(chat_server: RunningServer) -> Iterator[Client]:
    one = Client(chat_server)
    yield one
    one.close()
    until_idle(chat_server)


def documents(document: Any) -> st.SearchStrategy[bytes]:
    """A document with other values, or its bytes damaged."""
    text = json.dumps(document).encode()
    return changed(document).map(lambda value: json.dumps(value).encode()) | damaged(text)


@pytest.mark.fuzz("bodies of requests")
@given(
    st.sampled_from(sorted(BODIES)).flatmap(lambda p: st.tuples(st.just(p), documents(BODIES[p])))
)
def test_a_damaged_body_is_the_clients_error(client: Client, case: tuple[str, bytes]) -> None:
    path, body = case
    status, answer = client.post(path, body)
    assert status < 500, answer[:2000]
    assert b"Traceback" not in answer
    if status != 200:
        assert json.loads(answer)["error"]["message"]


@pytest.mark.fuzz("frames of a WebSocket")
@given(st.sampled_from(FRAMES).flatmap(documents), st.booleans())
def test_a_damaged_frame_is_the_clients_error(client: Client, frame: bytes, binary: bool) -> None:
    for message in client.frame(frame if binary else frame.decode("utf-8", "replace")):
        assert message["type"] in ("token", "done", "error", "cancelled")
        if message["type"] == "error":
            assert message["error"]["status"] < 500, message


@pytest.mark.parametrize("path", BODIES)
def test_a_body_that_is_no_json_object_is_told_so(chat_server: RunningServer, path: str) -> None:
    client = Client(chat_server)
    for body, said in {
        b'{"model": "talker",}': "the body is not valid JSON: at character 19: ",
        b"{'model': 'talker'}": "the body is not valid JSON: at character 1: ",
        b"": "the body must be a JSON object",
        b"[1]": "the body must be a JSON object",
    }.items():
        status, answer = client.post(path, body)
        error = json.loads(answer)["error"]
        assert status == 400 and error["message"].startswith(said), (body, error)
        assert error.get("param") is None


# ---- graphs of references and rules, in every place that takes some

GRAPHS_OF_MANY = st.tuples(GRAPHS, st.sampled_from([0, 0, 0, 40, 400]))
CHAIN = 3500  # of references, which overflows the stack of a library that follows them


def with_chain(edges: list[list[int]], length: int) -> list[list[int]]:
    """A graph behind a chain of so many nodes."""
    moved = [[node + length for node in found] for found in edges]
    return [[node + 1] for node in range(length)] + moved


def places(edges: list[list[int]]) -> dict[str, tuple[str, dict[str, Any]]]:
    """Bodies with a graph as a schema or a grammar, with their paths, by the field that has it."""
    schema, grammar = schema_of(edges), {"grammar": grammar_of(edges)}
    field = {"properties": {"a": {"$ref": schema["$ref"]}}, "required": ["a"]}
    parameters = {"type": "object", "$defs": schema["$defs"], **field}
    named = {"name": "f", "schema": schema}
    function = {"name": "f", "parameters": parameters}
    few, chat = {"model": "talker", "max_tokens": 2}, {"messages": MESSAGES}
    completions, responses = "/v1/completions", "/v1/responses"
    asked = {"model": "talker", "input": "x", "max_output_tokens": 2}
    form = {"type": "json_schema", "json_schema": named}
    return {
        "grammar": (completions, {**few, "prompt": "x", "structured_outputs": grammar}),
        "json": (completions, {**few, "prompt": "x", "structured_outputs": {"json": schema}}),
        "response_format": ("/v1/chat/completions", {**few, **chat, "response_format": form}),
        "tools": (
            "/v1/chat/completions",
            {
                **{**few, **chat, "tool_choice": "required"},
                "tools": [{"type": "function", "function": function}],
            },
        ),
        "text.format": (responses, {**asked, "text": {"format": {"type": "json_schema", **named}}}),
        "flat tools": (
            responses,
            {**asked, "tool_choice": "required", "tools": [{"type": "function", **function}]},
        ),
        "output_config": (
            "/v1/messages",
            {
                **{**few, **chat},
                "output_config": {"format": {"type": "json_schema", "schema": schema}},
            },
        ),
        "input_schema": (
            "/v1/messages",
            {
                **{**few, **chat, "tool_choice": {"type": "any"}},
                "tools": [{"name": "f", "input_schema": parameters}],
            },
        ),
        "WebSocket": (
            "",
            {**few, "type": "generate", "id": "1", "prompt": "x", "structured_outputs": grammar},
        ),
    }


PLACES = sorted(places([[]]))


def status_of(client: Client, path: str, body: dict[str, Any]) -> int:
    """The status of an answer; of a frame, where there is no path."""
    if path:
        return client.post(path, json.dumps(body).encode())[0]
    with connect(client.server.url.replace("http", "ws") + "/ws/generate") as socket:
        socket.send(json.dumps(body))
        while (told := json.loads(socket.recv(60)))["type"] == "token":
            pass
    return 200 if told["type"] == "done" else int(told["error"]["status"])


@pytest.mark.fuzz("graphs of schemas and grammars")
@given(st.sampled_from(PLACES), GRAPHS_OF_MANY)
def test_a_graph_is_followed_or_the_clients_error(
    client: Client, place: str, graph: tuple[list[list[int]], int]
) -> None:
    edges, length = graph
    assert status_of(client, *places(with_chain(edges, length))[place]) in (200, 400)


def test_a_long_chain_is_the_clients_error_everywhere(client: Client) -> None:
    long = places(with_chain([[]], CHAIN))
    assert {place: status_of(client, *long[place]) for place in PLACES} == dict.fromkeys(
        PLACES, 400
    )
    assert call(f"{client.server.url}/health")[0] == 200  # the engine lives


@pytest.fixture(scope="module")
def own() -> Iterator[LLM]:
    overrides = ["runtime.threads=1", "cache.num_blocks=64"]
    with LLM("tiny", device="cpu", overrides=overrides) as llm:
        yield llm


@pytest.mark.fuzz("graphs of schemas and grammars from Python")
@given(GRAPHS_OF_MANY, st.booleans())
def test_a_graph_from_python_is_followed_or_bad_input(
    own: LLM, graph: tuple[list[list[int]], int], is_schema: bool
) -> None:
    edges = with_chain(*graph)
    asked = {"json": schema_of(edges)} if is_schema else {"grammar": grammar_of(edges)}
    with contextlib.suppress(BadInput):
        own.generate(["x"], SamplingParams(max_tokens=2, structured_outputs=asked))
    assert own.generate(["x"], SamplingParams(max_tokens=1))[0].outputs[0].token_ids


def test_a_long_chain_from_python_is_bad_input(own: LLM) -> None:
    edges = with_chain([[]], CHAIN)
    for asked in ({"json": schema_of(edges)}, {"grammar": grammar_of(edges)}):
        with pytest.raises(BadInput, match="a chain of"):
            own.generate(["x"], SamplingParams(max_tokens=2, structured_outputs=asked))
