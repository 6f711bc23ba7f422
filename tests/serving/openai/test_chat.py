"""/v1/chat/completions, asked by the openai package over a real socket."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any, Literal

import pytest
from pydantic import BaseModel, ConfigDict, Field

from minivllm import LLM, SamplingParams
from tests.later import Later
from tests.serving.chat_checkpoint import (
    CALL,
    CONCLUSION,
    GREETING,
    SECOND_CALL,
    THOUGHT,
)
from tests.serving.plain import call
from tests.serving.running import RunningServer, until_idle

openai = Later("openai")

IDS = {"return_token_ids": True}
USER = [{"role": "user", "content": "naïve 値?"}]


def function(name: str) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {"location": {"type": "string"}}}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def wrong_function() -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "parameters": {"properties": 3}}}


WEATHER, TIME = function("get_weather"), function("get_time")


def ask(client: openai.OpenAI, messages: Any = USER, /, **fields: Any) -> Any:
    """An answer, or an iterator of its chunks."""
    return client.chat.completions.create(model="talker", messages=messages, **fields)


def streamed(client: openai.OpenAI, messages: Any = USER, /, **fields: Any) -> Any:
    """The answer that the openai package makes of a stream."""
    with client.chat.completions.stream(model="talker", messages=messages, **fields) as stream:
        return stream.get_final_completion()


def allowed(*names: str, mode: str = "required") -> dict[str, Any]:
    """A choice among some of the tools."""
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_text_is_that_of_generate_and_of_completions_streamed_or_not(
    talking: LLM, talker: openai.OpenAI, temperature: float
) -> None:
    params = SamplingParams(max_tokens=40, temperature=temperature, seed=11, n=3, logprobs=2)
    expected = talking.chat(USER, params)[0]
    texts = [output.text for output in expected.outputs]
    assert all(output.finish_reason == "stop" for output in expected.outputs)
    assert texts[0] == GREETING if temperature == 0 else len(set(texts)) == 3
    ids: dict[str, Any] = {"extra_body": {"return_token_ids": True}}
    fields: dict[str, Any] = {"temperature": temperature, "seed": 11, "n": 3, "max_tokens": 40}
    whole = ask(talker, **fields, **ids)
    assert [choice.message.content for choice in whole.choices] == texts
    assert [c.token_ids for c in whole.choices] == [o.token_ids for o in expected.outputs]
    assert [choice.finish_reason for choice in whole.choices] == ["stop"] * 3
    assert whole.prompt_token_ids == expected.prompt_token_ids
    pieces: dict[int, str] = {0: "", 1: "", 2: ""}
    tokens: dict[int, list[int]] = {0: [], 1: [], 2: []}
    for chunk in ask(talker, stream=True, **fields, **ids):
        for choice in chunk.choices:
            pieces[choice.index] += choice.delta.content or ""
            tokens[choice.index] += getattr(choice, "token_ids", [])
            assert "\ufffd" not in (choice.delta.content or "")
    assert list(pieces.values()) == texts
    assert list(tokens.values()) == [output.token_ids for output in expected.outputs]
    prompt = expected.prompt_token_ids
    completion = talker.completions.create(model="talker", prompt=prompt, **fields)
    assert [choice.text for choice in completion.choices] == texts


def test_thoughts_are_apart_whether_the_model_or_the_template_opens_the_block(
    talking: LLM, talker: openai.OpenAI
) -> None:
    for variable in ("enable_thinking", "thinking"):
        fields = {"extra_body": {"chat_template_kwargs": {variable: True}}}
        text = talking.chat(
            USER, SamplingParams(max_tokens=30), chat_template_kwargs={variable: True}
        )
        assert text[0].outputs[0].text.endswith(f"{THOUGHT}</think>\n\n{CONCLUSION}")
        message = ask(talker, **fields).choices[0].message
        assert message.content == CONCLUSION
        assert message.reasoning_content == message.reasoning == THOUGHT.strip()
        deltas = [c.choices[0].delta for c in ask(talker, stream=True, **fields) if c.choices]
        thoughts = [delta.reasoning_content for delta in deltas if hasattr(delta, "reasoning")]
        assert len(thoughts) > 1 and "".join(thoughts) == THOUGHT.strip()
        assert "".join(delta.content or "" for delta in deltas) == CONCLUSION


def test_reasoning_effort_sets_the_template_s_switch(talker: openai.OpenAI) -> None:
    usage = ask(talker, reasoning_effort="low").usage
    assert usage.completion_tokens_details.reasoning_tokens == 4
    answer = ask(talker, reasoning_effort="none")
    assert answer.choices[0].message.content == GREETING
    assert answer.usage.completion_tokens_details.reasoning_tokens == 0


@pytest.mark.parametrize("answer", [ask, streamed])
def test_tools_are_called_and_their_results_answered(talker: openai.OpenAI, answer: Any) -> None:
    choice = answer(talker, tools=[WEATHER, TIME]).choices[0]
    assert choice.finish_reason == "tool_calls" and choice.message.content == "Let me see."
    calls = choice.message.tool_calls
    assert [(c.function.name, json.loads(c.function.arguments)) for c in calls] == [
        CALL,
        SECOND_CALL,
    ]
    assert len({call.id for call in calls}) == 2
    results = [{"role": "tool", "tool_call_id": c.id, "content": "sunny"} for c in calls]
    said = {"role": "assistant", "tool_calls": [call.model_dump() for call in calls]}
    choice = answer(talker, [*USER, said, *results], tools=[WEATHER, TIME]).choices[0]
    assert choice.message.content == GREETING and not choice.message.tool_calls


def test_thoughts_before_a_call(talker: openai.OpenAI) -> None:
    kwargs = {"chat_template_kwargs": {"enable_thinking": True}}
    message = ask(talker, tools=[WEATHER], extra_body=kwargs).choices[0].message
    assert message.reasoning == "I need the weather." and message.content is None
    assert [call.function.name for call in message.tool_calls] == ["get_weather"]


def test_calls_are_limited_to_one_or_none(talker: openai.OpenAI) -> None:
    tools = [WEATHER, TIME]
    message = ask(talker, tools=tools, parallel_tool_calls=False).choices[0].message
    assert [call.function.name for call in message.tool_calls] == ["get_weather"]
    message = ask(talker, tools=tools, tool_choice="none").choices[0].message
    assert message.content == GREETING and message.tool_calls is None


class Place(BaseModel):
    """What an answer is asked to be."""

    model_config = ConfigDict(extra="forbid")
    city: Literal["Paris", "Graz"]
    numbers: list[bool] = Field(min_length=2, max_length=3)
    name: str = Field(pattern="^[b-d]{2}$")


@pytest.mark.parametrize("kwargs", [{}, {"enable_thinking": True}, {"thinking": True}])
def test_an_answer_has_the_form_that_is_asked_also_behind_thoughts(
    talker: openai.OpenAI, kwargs: dict[str, bool]
) -> None:
    further: dict[str, Any] = {"chat_template_kwargs": kwargs}
    for stream in (False, True):
        if stream:
            choice = streamed(talker, response_format=Place, extra_body=further).choices[0]
        else:
            choice = talker.chat.completions.parse(
                model="talker", messages=USER, response_format=Place, extra_body=further
            ).choices[0]  # type: ignore[arg-type]
        assert choice.message.parsed == Place(city="Graz", numbers=[True, True], name="bb")
        assert choice.finish_reason == "stop"
    thoughts = getattr(ask(talker, extra_body=further).choices[0].message, "reasoning", None)
    assert thoughts == (THOUGHT.strip() if kwargs else None)


@pytest.mark.parametrize("answer", [ask, streamed])
def test_tools_are_called_where_they_must_be(talker: openai.OpenAI, answer: Any) -> None:
    say = {"name": "say", "parameters": {"properties": {"w": {"enum": ["no"]}}, "required": ["w"]}}
    tools = [WEATHER, {"type": "function", "function": say}]
    named = {"type": "function", "function": {"name": "say"}}
    for choice, kwargs in (("required", {}), (named, {}), (named, {"enable_thinking": True})):
        fields = {
            "tools": tools,
            "tool_choice": choice,
            "extra_body": {"chat_template_kwargs": kwargs},
        }
        answered = answer(talker, **fields).choices[0]
        (call,) = answered.message.tool_calls
        assert (call.function.name, call.function.arguments) == ("say", '{"w":"no"}')
        assert answered.finish_reason == "tool_calls" and not answered.message.content


def test_strict_tools_are_called_as_their_schemas_say(talker: openai.OpenAI) -> None:
    weather = {"name": "get_weather", "strict": True, "parameters": Place.model_json_schema()}
    for further in ({}, {"response_format": {"type": "json_object"}}):
        choice = ask(talker, tools=[{"type": "function", "function": weather}], **further).choices[
            0
        ]
        arguments = choice.message.tool_calls[0].function.arguments
        assert Place.model_validate_json(arguments).city == "Graz"


def test_a_strict_call_whose_tags_are_ordinary_tokens_is_a_call(talker: openai.OpenAI) -> None:
    tools = []
    for name, field in (("get_weather", "location"), ("get_time", "zone")):
        schema = {
            "type": "object",
            "properties": {field: {"type": "string"}},
            "required": [field],
            "additionalProperties": False,
        }
        function = {"name": name, "strict": True, "parameters": schema}
        tools.append({"type": "function", "function": function})
    message = ask(talker, tools=tools, max_tokens=200).choices[0].message
    assert message.content.strip() == "Let me see."  # and nothing of a tag
    fields = {"get_weather": ["location"], "get_time": ["zone"]}
    assert message.tool_calls
    for made in message.tool_calls:
        assert [*json.loads(made.function.arguments)] == fields[made.function.name]


def test_other_forms_of_answers(talker: openai.OpenAI) -> None:
    for asked, text in (
        ({"regex": "[b-d]{3}/e"}, "bbb/e"),
        ({"choice": ["yes", "Hello again"]}, "Hello again"),
        ({"grammar": 'start: "a" /b{2}/ "."'}, "abb."),
        ({"json": {"const": None}}, "null"),
    ):
        message = ask(talker, extra_body={"structured_outputs": asked}).choices[0].message
        assert message.content == text


def test_history_reaches_the_template(talking: LLM, talker: openai.OpenAI) -> None:
    call = {"name": "get_weather", "arguments": '{"location": "Paris"}'}
    messages = [
        {
            "role": "developer",
            "content": [{"type": "text", "text": "Be "}, {"type": "text", "text": "brief."}],
        },
        *USER,
        {"role": "assistant", "reasoning_content": "hm", "content": "yes"},
        *USER,
        {"role": "assistant", "tool_calls": [{"id": "c", "type": "function", "function": call}]},
        {"role": "tool", "tool_call_id": "c", "content": "sunny"},
    ]
    answer = ask(talker, messages, max_tokens=1, extra_body=IDS)
    assert talking.tokenizer is not None
    assert talking.tokenizer.decode(answer.prompt_token_ids, False) == (
        "<|system|>Be brief.<|end|><|user|>naïve 値?<|end|><|assistant|><think>hm</think>yes<|end|>"
        "<|user|>naïve 値?<|end|><|assistant|><tool_call>\n"
        '{"name": "get_weather", "arguments": {"location": "Paris"}}\n</tool_call><|end|>'
        "<|tool|>sunny<|end|><|answer|>"
    )


def test_logprobs_are_those_of_generate_and_their_bytes_the_text(
    talking: LLM, talker: openai.OpenAI
) -> None:
    params = SamplingParams(max_tokens=40, temperature=1.0, seed=2, logprobs=3)
    expected = talking.chat(USER, params)[0].outputs[0]
    fields: dict[str, Any] = {"temperature": 1.0, "seed": 2, "logprobs": True, "top_logprobs": 3}
    whole = ask(talker, **fields).choices[0].logprobs.content
    chunks = [chunk.choices[0].logprobs for chunk in ask(talker, stream=True, **fields)]
    assert [entry for one in chunks if one for entry in one.content] == whole
    assert expected.logprobs is not None
    for entry, token_id, logprobs in zip(whole, expected.token_ids, expected.logprobs, strict=True):
        assert entry.logprob == pytest.approx(logprobs[token_id], abs=1e-4)
        best = sorted(logprobs.values(), reverse=True)[:3]
        assert [top.logprob for top in entry.top_logprobs] == pytest.approx(best, abs=1e-4)
    data = bytes(byte for entry in whole[:-1] for byte in entry.bytes)
    assert data.decode() == expected.text and whole[-1].token == "<|end|>"
    assert any("\ufffd" in entry.token for entry in whole)


def test_usage_counts_the_prefix_that_was_cached(talker: openai.OpenAI) -> None:
    messages = [{"role": "user", "content": "the same again " * 40}]
    options = {"stream_options": {"include_usage": True}}
    for is_cached in (False, True):
        *chunks, last = ask(talker, messages, stream=True, **options)
        assert not any(chunk.usage for chunk in chunks) and not last.choices
        usage = last.usage
        assert usage.prompt_tokens == 15 * 40 + 3 and usage.completion_tokens == 15
        assert usage.total_tokens == usage.prompt_tokens + 15
        assert bool(usage.prompt_tokens_details.cached_tokens) == is_cached


def test_sampling_fields_reach_the_engine(talking: LLM, talker: openai.OpenAI) -> None:
    choice = ask(talker, stop=[" 値"]).choices[0]
    assert (choice.message.content, choice.finish_reason) == ("Hello there: a café", "stop")
    assert choice.stop_reason == " 値"
    choice = ask(talker, max_completion_tokens=2).choices[0]
    assert (choice.message.content, choice.finish_reason) == ("Hello there", "length")
    there = talking.chat(USER, SamplingParams(max_tokens=2))[0].outputs[0].token_ids[1]
    choice = ask(talker, logit_bias={str(there): -100}, max_tokens=2).choices[0]
    assert choice.message.content == "Hello friend"
    twice = {"ignore_eos": True, "repetition_penalty": 1.5}
    choice = ask(talker, max_tokens=18, extra_body=twice).choices[0]
    assert choice.message.content == f"{GREETING}Hello friend: a"


def test_many_at_once_by_the_asynchronous_client(chat_server: RunningServer) -> None:
    async def all_of_them() -> list[str]:
        client = openai.AsyncOpenAI(base_url=f"{chat_server.url}/v1", api_key="none")

        async def one(number: int) -> str:
            said: Any = [{"role": "user", "content": f"number {number}"}]
            if number % 2:
                answer = await client.chat.completions.create(model="talker", messages=said)
                return answer.choices[0].message.content or ""
            stream = await client.chat.completions.create(
                model="talker", messages=said, stream=True
            )
            return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

        return await asyncio.gather(*map(one, range(24)))

    assert asyncio.run(all_of_them()) == [GREETING] * 24


def test_a_stream_that_is_left_ends_in_the_engine(
    chat_server: RunningServer, talker: openai.OpenAI
) -> None:
    def generated() -> float:
        text = call(f"{chat_server.url}/metrics")[1]
        found = re.search(r"^minivllm:generation_tokens_total\{.*\} (\S+)$", text, re.MULTILINE)
        assert found is not None
        return float(found[1])

    before = generated()
    for _ in range(3):
        chunks = ask(talker, stream=True, extra_body={"ignore_eos": True})
        assert [next(chunks).choices[0].delta.content for _ in range(3)][1:] == ["Hello", " there"]
        chunks.close()
    until_idle(chat_server)
    assert generated() - before < 16_000  # each by itself would go on for 16,380 tokens
    assert ask(talker).choices[0].message.content == GREETING


def test_an_answer_that_takes_too_long_is_an_error_streamed_or_not(talker: openai.OpenAI) -> None:
    endless: dict[str, Any] = {"extra_body": {"ignore_eos": True, "deadline_ms": 1500}}
    text = ""
    with pytest.raises(openai.APIError, match=r"the request did not end within 1\.5 s"):
        for chunk in ask(talker, stream=True, **endless):
            text += chunk.choices[0].delta.content or ""
    assert text.startswith(f"{GREETING}{GREETING}")
    with pytest.raises(openai.APIStatusError) as error:
        ask(talker, **endless)
    assert error.value.status_code == 408


def test_usage_may_come_with_every_chunk(talker: openai.OpenAI) -> None:
    options: Any = {"include_usage": True, "continuous_usage_stats": True}
    chunks = list(ask(talker, stream=True, stream_options=options))
    counts = [chunk.usage.completion_tokens for chunk in chunks]
    assert counts == sorted(counts) and counts[0] >= 1 and counts[-1] == 15


IMAGE = {"type": "image_url", "image_url": {"url": "http://127.0.0.1:9/x.png"}}


@pytest.mark.parametrize(
    ("wrong", "param", "words"),
    [
        ({"messages": []}, "messages", "messages must be a non-empty list"),
        ({"messages": [{"content": "x"}]}, "messages[0].role", "messages[0].role must be"),
        ({"messages": [{"role": "robot"}]}, "messages", "there is no role robot"),
        (
            {"messages": [{"role": "user", "content": [IMAGE]}]},
            "messages[0].content",
            "messages[0].content has parts that are not text ('image_url'): images, audio and "
            "files are not supported, and no URL is fetched",
        ),
        ({"messages": [{"role": "user", "content": "x" * 17_000}]}, "messages", "no room"),
        ({"bad_words": [" "]}, "bad_words", "bad_words=(' ',) must be words"),
        ({"max_completion_tokens": -1}, "max_completion_tokens", "max_completion_tokens=-1 must"),
        ({"reasoning": {"style": "x"}}, "reasoning.style", "unknown field 'reasoning.style'"),
        ({"functions": []}, "functions", "unknown field 'functions'"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens", "mean the same"),
        ({"top_logprobs": 3}, "top_logprobs", "needs logprobs=true"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "less than or equal to 20"),
        ({"store": True}, "store", "nothing is stored"),
        ({"modalities": ["text", "audio"]}, "modalities", "the model writes text"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "needs stream=true"),
        ({"tool_choice": "required"}, "tool_choice", "needs tools"),
        ({"tools": [{"type": 3}]}, "tools[0].type", 'tools[0].type must be "function"'),
        (
            {"tools": [{"type": "code"}], "tool_choice": "required"},
            "tool_choice",
            "tool_choice needs tools",
        ),
        ({"tools": [function("a b")]}, "tools[0].function.name", "tools[0]: the name must be"),
        ({"tools": [WEATHER, WEATHER]}, "tools", "names of their own"),
        (
            {"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "f"}}},
            "tool_choice",
            "names 'f', which is no tool",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "x"}}}},
            "response_format",
            "response_format: ",
        ),
        (
            {"tools": [wrong_function()], "tool_choice": "required"},
            "tools[0].function.parameters",
            "the schema of tool 'f': properties must be",
        ),
        (
            {
                "tools": [{"type": "web_search"}, WEATHER, wrong_function()],
                "tool_choice": {"type": "function", "function": {"name": "f"}},
            },
            "tools[2].function.parameters",
            "the schema of tool 'f': properties must be",
        ),
        (
            {"structured_outputs": {"regex": {"a": 1}}},
            "structured_outputs.regex",
            "structured_outputs.regex={'a': 1} must be one text",
        ),
        (
            {"structured_outputs": {"json": {"type": "x"}}},
            "structured_outputs",
            "structured_outputs: ",
        ),
        ({"response_format": {"type": "xml"}}, "response_format.type", "must be text, json_object"),
        (
            {"structured_outputs": {"grammar": "start: x"}, "tools": [WEATHER]},
            "structured_outputs.grammar",
            "without tools",
        ),
        ({"tools": [WEATHER], "tool_choice": "some"}, "tool_choice", "must be none, auto"),
        (
            {"chat_template_kwargs": {"budget": 1}},
            "chat_template_kwargs.budget",
            "no variable 'budget'",
        ),
        ({"chat_template_kwargs": {"tools": 1}}, "chat_template_kwargs.tools", "no variable"),
        *(
            ({"chat_template_kwargs": {name: "x"}}, f"chat_template_kwargs.{name}", "no variable")
            for name in ("raise_exception", "tojson", "range", "message", "continue_final_message")
        ),
        ({"continue_final_message": True}, "continue_final_message", "need each other"),
        ({"messages": [{"role": "user", "content": [3]}]}, "messages[0].content", "messages"),
        ({"stop": [1]}, "stop", "string"),
        ({"stop_token_ids": [1, "x"]}, "stop_token_ids[1]", "integer"),
        (
            {"tools": [WEATHER], "tool_choice": allowed("f")},
            "tool_choice.allowed_tools.tools[0]",
            "is none of the tools",
        ),
        (
            {"tools": [WEATHER], "tool_choice": {"type": "allowed_tools", "allowed_tools": {}}},
            "tool_choice.allowed_tools.mode",
            "must be auto or required",
        ),
    ],
)
def test_a_wrong_field_is_a_clear_400(
    talker: openai.OpenAI, wrong: dict[str, Any], param: str, words: str
) -> None:
    body = {"messages": USER, **wrong}
    with pytest.raises(openai.BadRequestError) as error:
        ask(talker, body.pop("messages"), extra_body=body)
    assert words in error.value.message and error.value.param == param


def test_a_body_without_a_model_or_of_another_one(talker: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="model") as error:
        talker.post("/chat/completions", body={"messages": USER}, cast_to=object)
    assert error.value.code == "missing_required_parameter"
    with pytest.raises(openai.NotFoundError):
        talker.chat.completions.create(model="gpt-4", messages=USER)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"messages": [{"role": "user", "content": "x" * 17_000}]}, "context_length_exceeded"),
        ({"model": "gpt-4"}, "model_not_found"),
        ({"temprature": 1}, "unknown_parameter"),
        ({"messages": 3}, None),
    ],
)
def test_errors_have_the_codes_that_clients_read(
    talker: openai.OpenAI, fields: dict[str, Any], code: str | None
) -> None:
    body = {"model": "talker", "messages": USER, **fields}
    with pytest.raises(openai.APIStatusError) as error:
        talker.post("/chat/completions", body=body, cast_to=object)
    assert error.value.code == code


def test_fields_that_a_server_may_leave_out_are_ignored(talker: openai.OpenAI) -> None:
    fields: dict[str, Any] = {
        "verbosity": "low",
        "prediction": {"type": "content", "content": "Hello"},
        "client_metadata": {"a": "b"},
        "web_search_options": {},
        "tools": [{"type": "custom", "custom": {"name": "patch"}}],
        "reasoning_effort": "xhigh",
    }
    assert ask(talker, extra_body=fields).choices[0].message.content


def test_the_embedded_model_continues_the_text(server: RunningServer) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    system, user = {"role": "system", "content": "import os"}, {"role": "user", "content": "def f("}
    chat: Any = client.chat.completions
    answer = chat.create(model="tiny", messages=[system, user], max_tokens=8)
    text = client.completions.create(model="tiny", prompt="import os\ndef f(", max_tokens=8)
    other = client.responses.create(
        model="tiny", instructions="import os", input="def f(", max_output_tokens=8, store=False
    )
    assert answer.choices[0].message.content == text.choices[0].text == other.output_text


def test_allowed_tools_are_the_only_ones(talker: openai.OpenAI) -> None:
    for name in ("get_weather", "get_time"):
        choice = allowed(name)
        answer = ask(talker, tools=[WEATHER, TIME], tool_choice=choice, max_tokens=200)
        (made,) = answer.choices[0].message.tool_calls
        assert made.function.name == name
        alone = ask(talker, tools=[function(name)], max_tokens=5, extra_body=IDS)
        both = ask(
            talker,
            tools=[WEATHER, TIME],
            tool_choice=allowed(name, mode="auto"),
            max_tokens=5,
            extra_body=IDS,
        )
        assert both.prompt_token_ids == alone.prompt_token_ids


def test_an_answer_that_is_begun_is_continued(talking: LLM, talker: openai.OpenAI) -> None:
    begun = [*USER, {"role": "assistant", "content": "It is"}]
    more = {"add_generation_prompt": False, "continue_final_message": True}
    fields = {"max_tokens": 4, "extra_body": {**more, **IDS}}
    answer = ask(talker, begun, **fields)
    assert talking.tokenizer is not None
    assert talking.tokenizer.decode(answer.prompt_token_ids, False).endswith("It is")
    with pytest.raises(openai.BadRequestError, match="none to continue"):
        ask(talker, [*USER, {"role": "assistant", "content": ""}], **fields)


def test_a_salt_keeps_prefixes_apart(talker: openai.OpenAI) -> None:
    def reused(salt: str | None) -> int:
        asked = [{"role": "user", "content": "salted " * 40}]
        answer = ask(talker, asked, max_tokens=1, extra_body={"cache_salt": salt})
        return answer.usage.prompt_tokens_details.cached_tokens

    assert [reused(salt) for salt in ("a", "b", None)] == [0, 0, 0]
    assert all(reused(salt) for salt in ("a", "b", None))
    with pytest.raises(openai.BadRequestError, match="cache_salt=''"):
        reused("")
