"""/v1/responses, asked by the openai package over a real socket."""

from __future__ import annotations

import asyncio
import json
import urllib.request
from itertools import groupby
from pathlib import Path
from typing import Any, Literal

import pytest
from pydantic import BaseModel

from minivllm import LLM, SamplingParams
from minivllm.bench.driver import drive
from minivllm.bench.hardware.clock import Clock
from minivllm.bench.making import WorkloadMaker
from minivllm.bench.workloads.arrivals import Offline
from minivllm.config.compose import build, compose
from tests.later import Later
from tests.serving.chat_checkpoint import CALL, CONCLUSION, GREETING, SECOND_CALL, THOUGHT
from tests.serving.running import RunningServer, until_idle

openai = Later("openai")

THINK: dict[str, Any] = {"reasoning": {"effort": "low", "summary": "auto"}}


def function(name: str) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {"location": {"type": "string"}}}
    return {"type": "function", "name": name, "parameters": parameters}


TOOLS: Any = [function("get_weather"), function("get_time")]


def ask(client: openai.OpenAI, given: Any = "naïve 値?", /, **fields: Any) -> Any:
    """A response, or an iterator of its events."""
    return client.responses.create(model="talker", input=given, **fields)


def types(events: list[Any]) -> list[str]:
    """The types of events, without their common beginning; several of one type are one."""
    assert [event.sequence_number for event in events] == list(range(len(events)))
    return [name.removeprefix("response.") for name, _ in groupby(event.type for event in events)]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_text_is_that_of_generate_streamed_or_not(
    talking: LLM, talker: openai.OpenAI, temperature: float
) -> None:
    params = SamplingParams(max_tokens=40, temperature=temperature, seed=3)
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "naïve 値?"},
    ]
    expected = talking.chat(messages, params)[0]
    fields: dict[str, Any] = {"instructions": "Be brief.", "temperature": temperature}
    fields["extra_body"] = {"seed": 3}
    whole = ask(talker, **fields)
    assert whole.output_text == expected.outputs[0].text and whole.status == "completed"
    assert whole.usage.input_tokens == len(expected.prompt_token_ids)
    assert whole.usage.output_tokens == len(expected.outputs[0].token_ids)
    assert (whole.temperature, whole.instructions, whole.store) == (temperature, "Be brief.", False)
    events = list(ask(talker, stream=True, **fields))
    assert types(events) == [
        *("created", "in_progress", "output_item.added", "content_part.added"),
        *("output_text.delta", "output_text.done", "content_part.done", "output_item.done"),
        "completed",
    ]
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert len(deltas) > 5 and "".join(deltas) == whole.output_text
    assert "\ufffd" not in "".join(deltas)
    last = events[-1].response
    assert last.output_text == whole.output_text and last.usage.total_tokens == (
        whole.usage.total_tokens
    )
    assert events[0].response.status == "in_progress" and not events[0].response.output


def test_thoughts_are_an_item_of_their_own(talker: openai.OpenAI) -> None:
    whole = ask(talker, **THINK)
    thoughts, message = whole.output
    assert thoughts.content[0].text == THOUGHT.strip() and not thoughts.summary
    assert message.content[0].text == whole.output_text == CONCLUSION
    assert whole.usage.output_tokens_details.reasoning_tokens == 4
    events = list(ask(talker, stream=True, **THINK))
    assert types(events) == [
        *("created", "in_progress", "output_item.added", "content_part.added"),
        *("reasoning_text.delta", "reasoning_text.done", "content_part.done", "output_item.done"),
        *("output_item.added", "content_part.added"),
        *("output_text.delta", "output_text.done", "content_part.done", "output_item.done"),
        "completed",
    ]
    done = [event for event in events if event.type == "response.output_item.done"]
    assert [event.output_index for event in done] == [0, 1]
    assert [event.item.status for event in done] == ["completed"] * 2
    again = ask(talker, [{"role": "user", "content": "x"}, thoughts, message], **THINK)
    assert again.output_text == CONCLUSION and again.usage.input_tokens == (
        len(f".x..<{THOUGHT.strip()}>{CONCLUSION}..".encode())
    )


def test_tools_are_called_and_their_results_answered(talker: openai.OpenAI) -> None:
    with talker.responses.stream(model="talker", input="x", tools=TOOLS) as stream:
        events = list(stream)
        final = stream.get_final_response()
    message, *calls = final.output
    assert message.content[0].text == "Let me see."
    assert [(c.name, json.loads(c.arguments)) for c in calls] == [CALL, SECOND_CALL]
    assert types(events) == [
        *("created", "in_progress", "output_item.added", "content_part.added"),
        *("output_text.delta", "output_text.done", "content_part.done", "output_item.done"),
        *("output_item.added", "function_call_arguments.delta", "function_call_arguments.done"),
        "output_item.done",
        *("output_item.added", "function_call_arguments.delta", "function_call_arguments.done"),
        "output_item.done",
        "completed",
    ]
    results = [
        {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
        for call in calls
    ]
    given = [{"role": "user", "content": "x"}, *final.output, *results]
    assert ask(talker, given, tools=TOOLS).output_text == GREETING
    for fields in ({"parallel_tool_calls": False}, {"max_tool_calls": 1}):
        kinds = [item.type for item in ask(talker, tools=TOOLS, **fields).output]
        assert kinds == ["message", "function_call"]


class Sum(BaseModel):
    """What an answer is asked to be."""

    total: Literal[555]


def test_an_answer_has_the_form_that_is_asked(talker: openai.OpenAI) -> None:
    for fields in ({}, THINK):
        parsed = talker.responses.parse(model="talker", input="x", text_format=Sum, **fields)
        assert parsed.output_parsed == Sum(total=555)
        assert [item.type for item in parsed.output] == ["reasoning", "message"][not fields :]
        with talker.responses.stream(model="talker", input="x", text_format=Sum, **fields) as one:
            assert one.get_final_response().output_parsed == Sum(total=555)


def test_a_tool_is_called_where_it_must_be(talker: openai.OpenAI) -> None:
    for choice, name in (
        ("required", "get_time"),
        ({"type": "function", "name": "get_time"}, "get_time"),
    ):
        tools = TOOLS[1:] if choice == "required" else TOOLS
        response = ask(talker, tools=tools, tool_choice=choice)
        (call,) = response.output
        assert (call.name, json.loads(call.arguments)) == (name, {})
        assert response.tool_choice == choice or response.tool_choice.name == name


def test_an_answer_that_is_cut_off_is_incomplete(talker: openai.OpenAI) -> None:
    whole = ask(talker, max_output_tokens=2)
    assert (whole.status, whole.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert whole.output_text == "Hello there" and whole.output[0].status == "incomplete"
    *_, done, last = ask(talker, max_output_tokens=2, stream=True)
    assert done.item.status == "incomplete" and last.type == "response.incomplete"
    assert last.response.incomplete_details.reason == "max_output_tokens"


def test_an_answer_that_takes_too_long_has_failed(talker: openai.OpenAI) -> None:
    endless = {"extra_body": {"ignore_eos": True, "deadline_ms": 1500}}
    *_, done, last = ask(talker, stream=True, **endless)
    assert (done.type, last.type) == ("response.output_item.done", "response.failed")
    assert last.response.error.message == "the request did not end within 1.5 s"
    with pytest.raises(openai.APIStatusError) as error:
        ask(talker, **endless)
    assert error.value.status_code == 408


def test_an_empty_answer_is_an_empty_message(talker: openai.OpenAI) -> None:
    bias = {str(i): -100 for i in range(256, 330) if i != 325}  # all but the end
    whole = ask(talker, extra_body={"logit_bias": {**bias, "325": 100}})
    assert [item.type for item in whole.output] == ["message"] and whole.output_text == ""
    assert whole.status == "completed"


def test_logprobs_come_where_they_are_included(talker: openai.OpenAI) -> None:
    fields: dict[str, Any] = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    part = ask(talker, **fields).output[0].content[0]
    assert b"".join(bytes(one.bytes) for one in part.logprobs).decode() == GREETING
    assert {len(one.top_logprobs) for one in part.logprobs} == {2}
    deltas = [
        event for event in ask(talker, stream=True, **fields) if event.type.endswith("text.delta")
    ]
    for event in deltas:
        assert "".join(one.token for one in event.logprobs).count("\ufffd") or event.delta == (
            "".join(one.token for one in event.logprobs)
        )
    assert sum(len(event.logprobs) for event in deltas) == len(part.logprobs)
    assert ask(talker).output[0].content[0].logprobs == []


def test_many_at_once_and_some_left(chat_server: RunningServer) -> None:
    async def one(client: openai.AsyncOpenAI, number: int) -> str:
        if number % 2:
            return (await client.responses.create(model="talker", input=f"{number}")).output_text
        endless = {"ignore_eos": True}
        stream = await client.responses.create(
            model="talker", input="x", stream=True, extra_body=endless
        )
        text = ""
        async for event in stream:
            text += event.delta if event.type == "response.output_text.delta" else ""
            if len(text) > len(GREETING):
                break
        await stream.close()
        return text[: len(GREETING)]

    async def all_of_them() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{chat_server.url}/v1", api_key="none") as client:
            return await asyncio.gather(*(one(client, number) for number in range(16)))

    assert asyncio.run(all_of_them()) == [GREETING] * 16
    until_idle(chat_server)


@pytest.mark.parametrize(
    ("wrong", "param", "words"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id", "send the whole conversation"),
        ({"background": True}, "background", "while its client waits"),
        ({"store": True}, "store", "nothing is stored here"),
        ({"truncation": "some"}, "truncation", "must be auto or disabled"),
        ({"prompt": {"id": "p"}}, "prompt", "no prompts are stored here"),
        ({"max_output_tokens": 0}, "max_output_tokens", "max_output_tokens=0 must be"),
        ({"n": 2}, "n", "one answer"),
        ({"conversation": "c"}, "conversation", "nothing is stored here: send the whole"),
        ({"text": {"style": "x"}}, "text.style", "unknown field 'text.style'"),
        ({"input": []}, "input", "input is empty"),
        ({"input": [{"type": "item_reference"}]}, "input[0].type", "input[0].type must be"),
        (
            {
                "input": [{"role": "user", "content": [{"type": "input_image"}]}],
                "instructions": "x",
            },
            "input",
            "input has parts that are not text ('input_image')",
        ),
        (
            {"tools": [{"type": "function", "name": "a b"}]},
            "tools[0].name",
            "tools[0]: the name must be",
        ),
        (
            {"tools": [function("f")], "tool_choice": {"type": "allowed_tools", "tools": []}},
            "tool_choice.mode",
            "tool_choice.mode must be auto or required",
        ),
        (
            {"tools": [{"type": "web_search"}], "tool_choice": {"type": "web_search"}},
            "tool_choice",
            "no tool of type 'web_search'",
        ),
        ({"top_logprobs": 2}, "top_logprobs", "needs include="),
        (
            {"text": {"format": {"type": "json_schema", "schema": {"type": "x"}}}, "stream": True},
            "text.format",
            "text.format: ",
        ),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type", "must be text, json_object"),
        ({"response_format": {"type": "json_object"}}, "response_format", "its place is text"),
        ({"return_token_ids": True}, "return_token_ids", "no place"),
    ],
)
def test_a_wrong_field_is_a_clear_400(
    talker: openai.OpenAI, wrong: dict[str, Any], param: str, words: str
) -> None:
    body = {"input": "x", **wrong}
    with pytest.raises(openai.BadRequestError) as error:
        ask(talker, body.pop("input"), extra_body=body)
    assert words in error.value.message and error.value.param == param


# What Codex 0.171 sends beside a conversation, and what others do.
SENT_BY_AGENTS: list[dict[str, Any]] = [
    {
        "include": ["reasoning.encrypted_content"],
        "client_metadata": {"session_id": "x"},
        "prompt_cache_key": "x",
        "reasoning": {"summary": "detailed", "context": "x"},
        "text": {"verbosity": "low"},
    },
    {"tools": [{"type": "web_search", "external_web_access": False}], "tool_choice": "auto"},
    {"tools": [{"type": "namespace", "name": "m", "tools": []}], "context_management": []},
]


@pytest.mark.parametrize("fields", SENT_BY_AGENTS)
def test_fields_that_a_server_may_leave_out_are_ignored(
    talker: openai.OpenAI, fields: dict[str, Any]
) -> None:
    assert ask(talker, extra_body={"store": False, **fields}).status == "completed"


def test_no_field_is_null_that_the_real_api_leaves_out(talker: openai.OpenAI) -> None:
    """Of a response some are; no item, part or event has one, nor a tool that is no function."""
    search = {"type": "web_search", "external_web_access": False}
    nullable = {"completed_at", "error", "incomplete_details", "usage", "instructions", "user"}
    nullable |= {"previous_response_id", "max_tool_calls", "max_output_tokens"}
    nullable |= {"safety_identifier", "prompt_cache_key"}
    for event in ask(talker, tools=[search, *TOOLS], stream=True, **THINK):
        data = event.to_dict()
        response = data.pop("response", {})
        assert {name for name, value in response.items() if value is None} <= nullable
        assert "null" not in json.dumps([data, response.get("output", [])])
        assert response.get("tools", [search])[0] == search


def test_an_unsupported_tool_is_left_out_beside_others(talker: openai.OpenAI) -> None:
    answer = ask(talker, tools=[{"type": "web_search"}, *TOOLS[:1]], tool_choice="required")
    assert [item.type for item in answer.output] == ["function_call"]


def test_a_prompt_that_is_too_long_fails_within_a_stream(talker: openai.OpenAI) -> None:
    long = "x" * 17_000
    with pytest.raises(openai.BadRequestError) as error:
        ask(talker, long)
    assert (error.value.code, error.value.param) == ("context_length_exceeded", "input")
    events = list(ask(talker, long, stream=True))
    assert types(events) == ["created", "in_progress", "failed"]
    failure = events[-1].response
    assert (failure.status, failure.output) == ("failed", [])
    assert failure.error.code == "context_length_exceeded"
    assert "maximum context length is 16384 tokens" in failure.error.message


def test_what_a_client_sent_is_repeated_whatever_it_is(talker: openai.OpenAI) -> None:
    body = '{"model": "talker", "input": "x", "metadata": {"a": "\\ud800", "b": NaN}}'
    headers = {"content-type": "application/json"}
    asked = urllib.request.Request(f"{talker.base_url}responses", body.encode(), headers)
    with urllib.request.urlopen(asked) as answer:
        assert b'"a":"\\ud800","b":NaN' in answer.read()


def test_a_body_without_a_model(talker: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="model"):
        talker.post("/responses", body={"input": "x"}, cast_to=object)


@pytest.mark.parametrize(
    ("api", "extra"),
    [("chat", {"reasoning_effort": "low"}), ("responses", {"reasoning": {"effort": "low"}})],
)
def test_a_benchmark_drives_it_with_messages_tools_and_thoughts(
    chat_server: RunningServer, chat_folder: Path, tmp_path: Path, api: str, extra: dict[str, Any]
) -> None:
    tools = [{"type": "function", "function": {"name": "get_weather"}}]
    path = tmp_path / "chats.jsonl"
    rows = [
        {"messages": [{"role": "user", "content": "naïve 値?"}], "max_tokens": 40},
        {"messages": [{"role": "user", "content": "x"}], "tools": tools, "max_tokens": 60},
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ("model=hf", f"model.path={chat_folder}", "workload=file", f"workload.path={path}")
    config = compose(["engine=openai", f"engine.api={api}", *words])
    config["engine"] |= {"url": f"{chat_server.url}/v1", "extra": extra}
    engine = build(config["engine"], config=config)
    try:
        work = WorkloadMaker().make(engine, config["workload"], 0)
        traces = drive(engine, work, Offline(), SamplingParams(), Clock())
        streams = engine.liveness()["stream"]
    finally:
        engine.close()
    assert [(trace.status, trace.finish_reason) for trace in traces] == [("ok", "stop")] * 2
    assert traces[0].reasoning_tokens == 4 and traces[0].answer_s in traces[0].token_times[1:]
    assert streams["requests_uncounted"] == 0 and streams["tokens"] == sum(
        len(trace.token_ids) for trace in traces
    )
