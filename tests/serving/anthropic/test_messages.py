"""/v1/messages, asked by the anthropic package over a real socket."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import pytest

from minivllm.serving.answers.chat_model import ChatModel
from minivllm.serving.anthropic.messages import template_variables
from minivllm.serving.anthropic.schemas import CountBody
from tests.later import Later
from tests.serving.chat_checkpoint import (
    CALL,
    CONCLUSION,
    GREETING,
    SECOND_CALL,
    THOUGHT,
)
from tests.serving.plain import call
from tests.serving.running import RunningServer

anthropic = Later("anthropic")

USER: list[Any] = [{"role": "user", "content": "naïve 値?"}]
SCHEMA = {"type": "object", "properties": {"location": {"type": "string"}}}
WEATHER = {"name": "get_weather", "description": "of a place", "input_schema": SCHEMA}
TIME = {"name": "get_time", "input_schema": {"type": "object"}}
STRICT = {
    "name": "say",
    "input_schema": {
        "type": "object",
        "properties": {"word": {"enum": ["no"]}},
        "required": ["word"],
        "additionalProperties": False,
    },
}
NO = {"word": "no"}
THINKING = {"type": "enabled", "budget_tokens": 1024}


def ask(client: anthropic.Anthropic, messages: Any = USER, /, **fields: Any) -> Any:
    """An answer, or an iterator of its events."""
    return client.messages.create(
        **{"model": "talker", "max_tokens": 2048, "messages": messages, **fields}
    )


def streamed(client: anthropic.Anthropic, messages: Any = USER, /, **fields: Any) -> Any:
    """The message that the anthropic package makes of a stream."""
    known = {"model": "talker", "max_tokens": 2048, "messages": messages, **fields}
    with client.messages.stream(**known) as stream:
        return stream.get_final_message()


def content(message: Any) -> list[dict[str, Any]]:
    """The blocks of a message, without ids and signatures."""
    blocks = [block.to_dict() for block in message.content]
    return [
        {key: value for key, value in block.items() if key not in ("id", "signature")}
        for block in blocks
    ]


def text_block(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def call_block(call: tuple[str, dict[str, str]]) -> dict[str, Any]:
    known = {"type": "tool_use", "caller": {"type": "direct"}}
    return {**known, "name": call[0], "input": call[1]}


THOUGHT_BLOCK = {"type": "thinking", "thinking": THOUGHT.strip()}
# Fields of a request, the blocks of the answer, why it ends.
ANSWERS: list[tuple[dict[str, Any], list[dict[str, Any]], str]] = [
    ({}, [text_block(GREETING)], "end_turn"),
    (
        {"system": "So.", "extra_body": {"temperature": 0.0, "top_p": 0.9}},
        [text_block(GREETING)],
        "end_turn",
    ),
    ({"thinking": THINKING}, [THOUGHT_BLOCK, text_block(CONCLUSION)], "end_turn"),
    ({"tools": [WEATHER]}, [call_block(CALL)], "tool_use"),
    (
        {"tools": [WEATHER, TIME]},
        [text_block("Let me see."), call_block(CALL), call_block(SECOND_CALL)],
        "tool_use",
    ),
    (
        {
            "tools": [WEATHER, TIME],
            "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
        },
        [text_block("Let me see."), call_block(CALL)],
        "tool_use",
    ),
    (
        {"tools": [WEATHER], "thinking": THINKING},
        [{"type": "thinking", "thinking": "I need the weather."}, call_block(CALL)],
        "tool_use",
    ),
    ({"tools": [WEATHER], "tool_choice": {"type": "none"}}, [text_block(GREETING)], "end_turn"),
    ({"tools": [TIME], "tool_choice": {"type": "any"}}, [call_block(("get_time", {}))], "tool_use"),
    (
        {"tools": [STRICT], "tool_choice": {"type": "tool", "name": "say"}},
        [call_block(("say", NO))],
        "tool_use",
    ),
    (
        {"tools": [STRICT], "tool_choice": {"type": "any"}, "thinking": THINKING},
        [call_block(("say", NO))],
        "tool_use",
    ),
    ({"tools": [{**STRICT, "strict": True}]}, [call_block(("say", NO))], "tool_use"),
    (
        {"output_config": {"format": {"type": "json_schema", "schema": {"enum": [{"a": 1}]}}}},
        [text_block('{"a":1}')],
        "end_turn",
    ),
    ({"max_tokens": 2}, [text_block("Hello there")], "max_tokens"),
    ({"stop_sequences": ["caf", "naïve"]}, [text_block("Hello there: a ")], "stop_sequence"),
]


@pytest.mark.parametrize(("fields", "blocks", "reason"), ANSWERS)
def test_an_answer_is_the_same_streamed_or_not(
    client: anthropic.Anthropic, fields: dict[str, Any], blocks: list[Any], reason: str
) -> None:
    for answer in (ask(client, **fields), streamed(client, **fields)):
        assert content(answer) == blocks and answer.stop_reason == reason
        assert answer.stop_sequence == ("caf" if reason == "stop_sequence" else None)
        assert answer.model == "talker" and answer.role == "assistant"
        assert answer.id.startswith("msg_") and answer.usage.output_tokens > 0
    used = answer.usage.output_tokens_details
    thinks = blocks[0]["type"] == "thinking"
    assert used is not None and bool(used.thinking_tokens) == thinks


def test_the_events_of_a_stream_are_in_anthropics_order(chat_server: RunningServer) -> None:
    body = {"model": "talker", "max_tokens": 2048, "messages": USER, "stream": True}
    body |= {"tools": [WEATHER], "thinking": THINKING}
    status, text = call(f"{chat_server.url}/v1/messages", body)
    pairs = [frame.split("\n") for frame in text.split("\n\n") if frame]
    assert status == 200
    events = [json.loads(data.removeprefix("data: ")) for _, data in pairs]
    assert [name for name, _ in pairs] == [f"event: {one['type']}" for one in events]
    kinds = [(one["type"], one.get("index"), one.get("delta", {}).get("type")) for one in events]
    assert list(dict.fromkeys(kinds)) == [
        ("message_start", None, None),
        ("content_block_start", 0, None),
        ("ping", None, None),
        ("content_block_delta", 0, "thinking_delta"),
        ("content_block_delta", 0, "signature_delta"),
        ("content_block_stop", 0, None),
        ("content_block_start", 1, None),
        ("content_block_delta", 1, "input_json_delta"),
        ("content_block_stop", 1, None),
        ("message_delta", None, None),
        ("message_stop", None, None),
    ]
    assert kinds.count(("content_block_delta", 1, "input_json_delta")) > 1


def test_thoughts_may_be_left_out(client: anthropic.Anthropic) -> None:
    fields = {"thinking": {**THINKING, "display": "omitted"}}
    for answer in (ask(client, **fields), streamed(client, **fields)):
        first, second = answer.content
        assert first.thinking == "" and first.signature and second.text == CONCLUSION


def test_a_conversation_with_tools_goes_on(client: anthropic.Anthropic) -> None:
    """The answer's own blocks are sent back as they came."""
    fields = {"tools": [WEATHER, TIME], "thinking": THINKING}
    turn = streamed(client, **fields)
    calls = [block for block in turn.content if block.type == "tool_use"]
    results = [
        {"type": "tool_result", "tool_use_id": call.id, "content": f"{number} °C"}
        for number, call in enumerate(calls)
    ]
    messages = [*USER, {"role": "assistant", "content": turn.content}]
    messages.append({"role": "user", "content": [*results, {"type": "text", "text": "So?"}]})
    counted = client.messages.count_tokens(model="talker", messages=messages, tools=[WEATHER])
    answer = ask(client, messages, tools=[WEATHER])
    assert counted.input_tokens == answer.usage.input_tokens + (
        answer.usage.cache_read_input_tokens or 0
    )
    assert counted.input_tokens > turn.usage.input_tokens


def test_tokens_found_in_the_prefix_cache_are_no_input_tokens(client: anthropic.Anthropic) -> None:
    messages = [{"role": "user", "content": "a long text " * 40}]
    first, second = (ask(client, messages).usage for _ in range(2))
    assert first.cache_read_input_tokens == 0 < second.cache_read_input_tokens
    assert second.input_tokens + second.cache_read_input_tokens == first.input_tokens


def test_many_clients_at_once(chat_server: RunningServer) -> None:
    async def run() -> list[Any]:
        async with anthropic.AsyncAnthropic(base_url=chat_server.url, api_key="none") as client:

            async def one(number: int) -> Any:
                fields: dict[str, Any] = {"tools": [WEATHER]} if number % 2 else {}
                stream = client.messages.stream(
                    model="talker", max_tokens=99, messages=USER, **fields
                )
                async with stream as events:
                    return await events.get_final_message()

            return await asyncio.gather(*(one(number) for number in range(12)))

    for number, answer in enumerate(asyncio.run(run())):
        assert content(answer) == ([call_block(CALL)] if number % 2 else [text_block(GREETING)])


def test_a_client_that_leaves_ends_its_request(
    client: anthropic.Anthropic, chat_server: RunningServer
) -> None:
    """The prefix cache can be emptied only while nothing runs."""
    fields: dict[str, Any] = {"max_tokens": 14_000, "extra_body": {"ignore_eos": True}}
    with client.messages.stream(model="talker", messages=USER, **fields) as stream:
        next(iter(stream))
        assert call(f"{chat_server.url}/reset_prefix_cache", method="POST")[0] == 409
    for _ in range(100):
        status, _ = call(f"{chat_server.url}/reset_prefix_cache", method="POST")
        if status == 200:
            return
    raise AssertionError("it runs on")


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"temprature": 1}, "unknown field 'temprature'"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"temperature": 2}, "temperature"),
    ({"top_p": 7}, "top_p"),
    ({"stop_sequences": [""]}, "stop_sequences"),
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0.role"),
    ({"messages": [{"role": "user", "content": "x", "name": "y"}]}, "messages.0.name"),
    ({"thinking": {"type": "enabled", "budget_tokens": 5}}, "thinking.budget_tokens"),
    ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens"),
    ({"thinking": {"type": "adaptive", "budget_tokens": 1024}}, "thinking.budget_tokens"),
    ({"thinking": THINKING, "max_tokens": 1024}, "less than max_tokens"),
    ({"tools": [{"name": "a b", "input_schema": {}}]}, "tools.0.name"),
    ({"tools": [{"name": "ab"}]}, "tools.0.input_schema"),
    ({"tools": [WEATHER, WEATHER]}, "each must have a name of its own"),
    (
        {
            "tools": [{"type": "bash_20250124", "name": "bash"}],
            "tool_choice": {"type": "tool", "name": "bash"},
        },
        "'bash_20250124'",
    ),
    ({"tools": [{**WEATHER, "strict": "maybe"}]}, "tools.0.strict"),
    ({"tool_choice": {"type": "any"}}, "tool_choice: there are no tools"),
    ({"tools": [WEATHER], "tool_choice": {"type": "tool", "name": "f"}}, "tool_choice.name"),
    (
        {"output_config": {"format": {"type": "json_schema", "schema": {"type": "nothing"}}}},
        "schema",
    ),
    ({"output_config": {"effort": "most"}}, "output_config.effort"),
    ({"chat_template_kwargs": {"nothing": 1}}, "'nothing'"),
    ({"system": [{"type": "image"}]}, "system.0"),
    ({"stop_sequences": ["x"] * 1025}, "stop_sequences"),
]


@pytest.mark.parametrize(("wrong", "words"), WRONG)
def test_a_wrong_field_is_a_clear_400(
    client: anthropic.Anthropic, wrong: dict[str, Any], words: str
) -> None:
    with pytest.raises(anthropic.BadRequestError) as error:
        ask(client, extra_body=wrong)
    body = error.value.body
    assert isinstance(body, dict) and body["error"]["type"] == "invalid_request_error"
    assert words in body["error"]["message"]


BLOCKS: list[tuple[str, dict[str, Any], str]] = [
    (
        "user",
        {"type": "image", "source": {"type": "url", "url": "http://127.0.0.1:1/"}},
        "messages has",
    ),
    ("user", {"type": "document", "source": {}}, "'document'"),
    ("user", {"type": "tool_use", "id": "a", "name": "f", "input": {}}, "'tool_use'"),
    ("user", {"type": "tool_result", "tool_use_id": "a"}, "no call before it has the id 'a'"),
    ("user", {"type": "text"}, "messages.0.content.0.text"),
    ("user", {"text": "a"}, "None"),
    ("user", {"type": "redacted_thinking", "data": "x"}, "'redacted_thinking'"),
    ("assistant", {"type": "container_upload", "file_id": "x"}, "'container_upload'"),
    ("assistant", {"type": "tool_use", "id": "a", "name": "f", "input": []}, "0.input"),
]


@pytest.mark.parametrize(("role", "block", "words"), BLOCKS)
def test_a_block_that_is_not_supported_is_a_clear_400(
    client: anthropic.Anthropic, role: str, block: dict[str, Any], words: str
) -> None:
    with pytest.raises(anthropic.BadRequestError) as error:
        ask(client, [{"role": role, "content": [block]}, *USER])
    assert words in str(error.value)


@pytest.mark.parametrize(
    ("template", "fields", "variables"),
    [
        ("enable_thinking", {}, {"enable_thinking": False}),
        ("enable_thinking thinking", {"thinking": THINKING}, {"enable_thinking": True}),
        ("thinking", {"thinking": {"type": "adaptive"}}, {"thinking": True}),
        ("<think>", {"thinking": THINKING}, {}),
        ("", {}, {}),
        ("", {"thinking": THINKING}, {}),
        ("reasoning_effort", {"output_config": {"effort": "low"}}, {"reasoning_effort": "low"}),
        ("reasoning_effort", {"output_config": {"effort": "max"}}, {"reasoning_effort": "high"}),
        ("reasoning_effort max", {"output_config": {"effort": "max"}}, {"reasoning_effort": "max"}),
        ("enable_thinking", {"output_config": {"effort": "low"}}, {"enable_thinking": False}),
        ("", {"output_config": {"effort": "low"}}, {}),
    ],
)
def test_what_a_chat_template_is_told(
    template: str, fields: dict[str, Any], variables: dict[str, Any]
) -> None:
    service: Any = SimpleNamespace(tokenizer=None)
    model = ChatModel(service)
    model.template = template
    body = CountBody(model="m", messages=USER, **fields)
    assert template_variables(model, body) == variables


# What Claude Code 2.1 sends beside a conversation, and what others do.
SENT_BY_AGENTS: list[dict[str, Any]] = [
    {
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "thinking": {"type": "adaptive"},
        "output_config": {"effort": "xhigh", "task_budget": {"type": "tokens", "total": 20_000}},
        "metadata": {"user_id": "x"},
    },
    {"tools": [{**TIME, "defer_loading": True, "input_examples": [{}]}], "speed": "fast"},
    {"tools": [{"type": "web_search_20250305", "name": "web_search", "max_uses": 5}]},
    {"mcp_servers": [{"type": "url", "url": "http://127.0.0.1:1", "name": "m"}], "betas": ["x"]},
]


@pytest.mark.parametrize("fields", SENT_BY_AGENTS)
def test_fields_that_a_server_may_leave_out_are_ignored(
    client: anthropic.Anthropic, fields: dict[str, Any]
) -> None:
    assert ask(client, extra_body=fields).content


def test_an_unsupported_tool_is_left_out_beside_others(client: anthropic.Anthropic) -> None:
    search = {"type": "web_search_20250305", "name": "web_search"}
    answer = ask(client, tools=[search, WEATHER], tool_choice={"type": "any"})
    assert content(answer) == [call_block(("get_weather", {}))]


def nulls(value: Any) -> set[str]:
    """The names whose value is null, anywhere in a value of JSON."""
    if isinstance(value, list):
        return set().union(*map(nulls, value))
    if not isinstance(value, dict):
        return set()
    return {name for name in value if value[name] is None}.union(*map(nulls, value.values()))


@pytest.mark.parametrize("fields", [{}, {"thinking": THINKING}, {"tools": [WEATHER]}])
def test_no_field_is_null_that_the_real_api_leaves_out(
    chat_server: RunningServer, fields: dict[str, Any]
) -> None:
    body = {"model": "talker", "max_tokens": 2048, "messages": USER, **fields}
    whole = json.loads(call(f"{chat_server.url}/v1/messages", body)[1])
    assert nulls(whole) <= {"stop_sequence"}
    text = call(f"{chat_server.url}/v1/messages", {**body, "stream": True})[1]
    events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: ")]
    assert len(events) > 5 and nulls(events) <= {"stop_sequence", "stop_reason"}


def test_a_prompt_that_is_too_long_is_refused_in_words_that_agents_know(
    client: anthropic.Anthropic,
) -> None:
    with pytest.raises(anthropic.BadRequestError, match=r"prompt is too long: \d+ tokens > 16383 "):
        ask(client, [{"role": "user", "content": "x" * 17_000}])


def test_another_model_is_not_found(client: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError) as error:
        ask(client, model="claude-opus-4")
    body = error.value.body
    assert isinstance(body, dict) and body["error"]["type"] == "not_found_error"
    assert body["request_id"] == error.value.request_id and len(body["request_id"]) == 32
    assert len(str(ask(client, max_tokens=1)._request_id)) == 32


def test_the_embedded_model_continues_the_text(server: RunningServer) -> None:
    client = anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0)
    answer = ask(client, model="tiny", system="import os", max_tokens=8)
    assert answer.usage.output_tokens == 8 and answer.stop_reason == "max_tokens"
    with_tool = {"tools": [STRICT], "tool_choice": {"type": "any"}}
    for given in (ask, streamed):
        assert content(given(client, model="tiny", **with_tool)) == [call_block(("say", NO))]


def test_an_answer_that_is_begun_is_continued(client: anthropic.Anthropic) -> None:
    begun = [*USER, {"role": "assistant", "content": "It is"}]
    answer, usual = (ask(client, messages=one, max_tokens=4) for one in (begun, USER))
    assert answer.usage.input_tokens + answer.usage.cache_read_input_tokens > (
        usual.usage.input_tokens + usual.usage.cache_read_input_tokens
    )
    assert answer.role == "assistant"
