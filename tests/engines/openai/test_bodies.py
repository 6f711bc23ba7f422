"""Bodies of requests, and what a server of the chat or the responses API answers to them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from minivllm import BadInput, SamplingParams
from minivllm.bench.making import WorkloadMaker
from minivllm.bench.metrics.metrics import compute, request_rows
from minivllm.bench.metrics.validity import Evidence, check
from minivllm.config.compose import build, compose
from minivllm.engines.openai.bodies import chat_body, completions_body, responses_body
from minivllm.engines.openai.engine import OpenAIEngine
from tests.engines import fake_server
from tests.engines.driving import requests, run

PIXEL = "data:image/png;base64,iVBORw0KGgo="
CHAT: dict[str, Any] = {
    "messages": [
        {"role": "system", "content": "Be brief."},
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "Look"},
                {"type": "image_url", "image_url": {"url": PIXEL, "detail": "low"}},
            ],
        },
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
            ],
        },
        {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "sunny"}]},
        {"role": "assistant", "content": [{"type": "text", "text": "Sun"}]},
        {"role": "user", "content": "And?"},
    ],
    "tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}],
    "tool_choice": {"type": "function", "function": {"name": "f"}},
}


def test_the_chat_api_is_sent_what_the_file_has() -> None:
    body = chat_body(CHAT, 9, SamplingParams(max_tokens=9, temperature=0.5, seed=3, stop=("x",)))
    assert body == {
        **CHAT,
        **{"max_tokens": 9, "stream": True, "stream_options": {"include_usage": True}},
        **{"temperature": 0.5, "top_p": 1.0, "seed": 3, "stop": ["x"]},
    }


def test_the_responses_api_is_sent_the_same_as_items() -> None:
    body = responses_body(CHAT, 9, SamplingParams(max_tokens=9, ignore_eos=True))
    assert body["input"] == [
        {"type": "message", "role": "system", "content": "Be brief."},
        {
            "type": "message",
            "role": "user",
            "content": [
                {"type": "input_text", "text": "Look"},
                {"type": "input_image", "image_url": PIXEL, "detail": "low"},
            ],
        },
        {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "sunny"},
        {
            "type": "message",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "Sun"}],
        },
        {"type": "message", "role": "user", "content": "And?"},
    ]
    assert body["tools"] == [{"type": "function", "name": "f", "parameters": {}}]
    assert body["tool_choice"] == {"type": "function", "name": "f"}
    assert body["max_output_tokens"] == 9 and body["ignore_eos"] and "max_tokens" not in body
    assert completions_body([1, 2], 9, SamplingParams())["prompt"] == [1, 2]


Make = Callable[..., tuple[OpenAIEngine, Path]]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    """An engine in front of a server that thinks, and the file of what was asked."""
    closing: list[Any] = []

    def build_one(api: str, **settings: Any) -> tuple[OpenAIEngine, Path]:
        asked = tmp_path / "asked"
        server, url = fake_server.in_thread(path=str(asked), **settings)
        closing.append(server.shutdown)
        config = compose(["engine=openai", f"engine.api={api}"])
        config["engine"]["url"] = url
        engine = build(config["engine"], config=config)
        closing.append(engine.close)
        return engine, asked

    yield build_one
    for close in reversed(closing):
        close()


@pytest.mark.parametrize("api", ["chat", "responses"])
def test_thoughts_are_timed_and_counted_apart(make: Make, api: str) -> None:
    """The server sends 4 tokens of thoughts and then those of the answer, one in a chunk."""
    engine, asked = make(api, thinks=4, step_s=0.01)
    work = requests([(70, 71, 72)] * 2, [10, 10])
    traces = run(engine, work)
    metrics = compute(traces, {}, 2)
    assert [len(trace.token_ids) for trace in traces] == [10, 10]
    assert {trace.finish_reason for trace in traces} == {"length"}
    assert metrics.reasoning_tokens == 8 and metrics.output_tokens == 20
    assert metrics.ttfo_ms is not None and metrics.ttfo_ms.n == 2
    for trace in traces:
        assert trace.answer_s == trace.token_times[4] > trace.token_times[0]
    assert [row["reasoning_tokens"] for row in request_rows(traces)] == [4, 4]
    verdict = check(Evidence(traces, work, metrics, liveness=engine.liveness()))
    assert verdict.reasons == []
    assert any("chat template" in note for note in verdict.notes)  # it counts other prompt tokens
    assert engine.liveness()["engine"]["prompts"] == "messages"
    last = json.loads(asked.read_text().splitlines()[-1])
    words = last["messages"] if api == "chat" else last["input"]
    assert engine.tokenizer is not None
    assert words[0]["role"] == "user"
    assert words[0]["content"] == engine.tokenizer.decode([70, 71, 72])


@pytest.mark.parametrize("api", ["chat", "responses"])
def test_chunks_of_several_tokens_are_settled_by_the_total(make: Make, api: str) -> None:
    engine, _ = make(api, thinks=4, per_chunk=2, ids=False, details=False)
    (trace,) = run(engine, requests([(70, 71)], [8]))
    assert len(trace.token_ids) == 8 and trace.reasoning_tokens == 4
    assert trace.answer_s == trace.token_times[4]
    assert engine.liveness()["engine"]["tokens_counted_late"] == 4


def test_a_request_that_only_thinks_has_no_answer(make: Make) -> None:
    engine, _ = make("chat", thinks=99)
    traces = run(engine, requests([(70, 71)], [5]))
    metrics = compute(traces, {}, 1)
    assert metrics.ttfo_ms is None and metrics.reasoning_tokens == 5


@pytest.mark.parametrize("api", ["chat", "responses"])
def test_messages_of_a_file_reach_the_server(make: Make, api: str, tmp_path: Path) -> None:
    engine, asked = make(api, thinks=0)
    path = tmp_path / "chats.jsonl"
    path.write_text(json.dumps({**CHAT, "max_tokens": 3, "temperature": 0.25}))
    node = {**compose(["workload=file", f"workload.path={path}"])["workload"]}
    work = WorkloadMaker().make(engine, node, 0)
    (trace,) = run(engine, work)
    assert trace.status == "ok" and trace.answer_s is None
    last = json.loads(asked.read_text().splitlines()[-1])
    expected = chat_body if api == "chat" else responses_body
    params = SamplingParams(max_tokens=3, temperature=0.25, seed=last.get("seed"))
    body = expected(CHAT, 3, params)
    assert {name: last[name] for name in body} == body


def test_a_call_of_a_tool_is_an_answer_that_ends(make: Make) -> None:
    engine, _ = make("chat", thinks=2, calls=True, ids=False)
    (trace,) = run(engine, requests([(70, 71)], [6], ignore_eos=False))
    assert trace.finish_reason == "stop" and len(trace.token_ids) == 6
    assert trace.answer_s == trace.token_times[2]


def test_an_error_in_the_stream_of_responses_ends_the_request(make: Make) -> None:
    engine, _ = make("responses", thinks=0, fault="error")
    (trace,) = run(engine, requests([(70, 71)], [6]))
    assert trace.status == "aborted" and "the GPU fell off" in str(trace.error)


@pytest.mark.parametrize("api", ["completions", "chat", "responses"])
def test_a_strict_server_is_not_sent_what_it_does_not_know(make: Make, api: str) -> None:
    engine, asked = make(api, thinks=0, strict=["return_token_ids", "ignore_eos"], ids=False)
    (trace,) = run(engine, requests([(70, 71)], [6], ignore_eos=False))
    assert trace.status == "ok" and len(trace.token_ids) == 6
    last = json.loads(asked.read_text().splitlines()[-1])
    assert not last.keys() & {"return_token_ids", "ignore_eos"}
    (rejected,) = run(engine, requests([(70, 71)], [6]))
    assert rejected.status == "refused"
    assert "set workload.ignore_eos=false" in str(rejected.error)


def test_a_strict_server_of_ids_is_still_sent_ids(make: Make) -> None:
    engine, asked = make("completions", strict=["return_token_ids"])
    (trace,) = run(engine, requests([(70, 71)], [6]))
    last = json.loads(asked.read_text().splitlines()[-1])
    assert trace.status == "ok" and last["prompt"] == [70, 71] and last["ignore_eos"]


def test_ids_are_of_the_completions_api() -> None:
    with pytest.raises(BadInput, match=r"engine\.prompt='ids' is of engine\.api=completions"):
        compose(["engine=openai", "engine.api=chat", "engine.prompt=ids"])
