"""Tools of a model whose chat template takes none, by every API."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minivllm import LLM, SamplingParams
from minivllm.models.load.tool_texts import instructions
from minivllm.serving.answers.answer_grammar import answer_grammar
from minivllm.serving.openai.tools import Tools
from minivllm.serving.parsing.answers import AnswerParser, ParsedAnswer
from minivllm.serving.parsing.tool_forms import GENERIC
from tests.later import Later
from tests.serving.chat_checkpoint import CALL, GREETING, SECOND_CALL, make_chat_checkpoint
from tests.serving.plain import call_json
from tests.serving.running import RunningServer, serving

anthropic = Later("anthropic")
openai = Later("openai")

# Roles take turns, the system's may be rejected, and the last message decides the answer.
TEMPLATE = """\
{%- for m in messages -%}
{%- if m.role not in ('system', 'user', 'assistant') or m.tool_calls or m.tool_call_id -%}
{{ raise_exception('this template knows nothing of ' + m.role) }}
{%- elif m.role == 'system' and without_system -%}
{{ raise_exception('there is no turn of the system') }}
{%- elif not loop.first and m.role == loop.previtem.role -%}
{{ raise_exception('roles must alternate') }}
{%- endif -%}
<|{{ m.role }}|>{{ m.content }}<|end|>
{%- endfor -%}
{%- set last = messages[-1].content -%}
{%- if '</tool_response>' in last[-20:] or 'hello' in last %}<|answer|>
{%- elif 'both' in last %}<|calls twice|>
{%- else %}<|calls|>
{%- endif -%}
"""
SCHEMA = {"type": "object", "properties": {"location": {"type": "string"}}}
NO = {"type": "object", "properties": {"w": {"enum": ["no"]}}, "required": ["w"]}
SCHEMAS = {"get_weather": SCHEMA, "get_time": {"type": "object"}, "say": NO}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": name, "parameters": schema}}
    for name, schema in SCHEMAS.items()
]
OF_RESPONSES: list[Any] = [
    {"type": "function", "name": name, "parameters": schema} for name, schema in SCHEMAS.items()
]
OF_MESSAGES: list[Any] = [
    {"name": name, "input_schema": schema} for name, schema in SCHEMAS.items()
]
ONE, BOTH = "one of them", "both of them"
WITHOUT_SYSTEM = {"chat_template_kwargs": {"without_system": True}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = make_chat_checkpoint(tmp_path_factory.mktemp("plain"))
    (made / "chat_template.jinja").write_text(TEMPLATE)
    return made


@pytest.fixture(scope="module")
def plain(folder: Path) -> Iterator[RunningServer]:
    words = ("model=hf", f"model.path={folder}", "task.served_model_name=plain")
    with serving(*words, "decoding=greedy", "decoding.max_tokens=null") as running:
        yield running


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[LLM]:
    with LLM(str(folder), device="cpu", overrides=["runtime.threads=1"]) as llm:
        yield llm


@pytest.fixture
def talker(plain: RunningServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{plain.url}/v1", api_key="none", max_retries=0)


def user(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


def chat(client: openai.OpenAI, messages: Any, is_streamed: bool, **fields: Any) -> Any:
    """The choice of an answer, whole or as the openai package makes it of a stream."""
    known = {"model": "plain", "messages": messages, "tools": TOOLS, **fields}
    if not is_streamed:
        return client.chat.completions.create(**known).choices[0]
    with client.chat.completions.stream(**known) as stream:
        return stream.get_final_completion().choices[0]


def calls(message: Any) -> list[tuple[str, Any]]:
    made = message.tool_calls or ()
    return [(one.function.name, json.loads(one.function.arguments)) for one in made]


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("body", [{}, WITHOUT_SYSTEM])
def test_chat_completions(talker: openai.OpenAI, is_streamed: bool, body: Any) -> None:
    further = {"extra_body": body}
    choice = chat(talker, user(BOTH), is_streamed, **further)
    assert choice.finish_reason == "tool_calls" and choice.message.content == "Let me see."
    assert calls(choice.message) == [CALL, SECOND_CALL]
    made = [one.model_dump() for one in choice.message.tool_calls]
    results = [{"role": "tool", "tool_call_id": one["id"], "content": "sunny"} for one in made]
    history = [*user(BOTH), {"role": "assistant", "tool_calls": made}, *results]
    for tools in (TOOLS, []):
        answer = chat(talker, history, is_streamed, **{**further, "tools": tools})
        assert (answer.message.content, answer.finish_reason) == (GREETING, "stop")
    answer = chat(talker, [*history, *user("hello?")], is_streamed, **further)
    assert answer.message.content == GREETING and not answer.message.tool_calls
    alone = chat(talker, user(BOTH), is_streamed, parallel_tool_calls=False, **further)
    assert calls(alone.message) == [CALL]


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "say"}}])
@pytest.mark.parametrize("text", [ONE, "hello"])
def test_a_call_that_must_be_made_is_made(
    talker: openai.OpenAI, is_streamed: bool, choice: Any, text: str
) -> None:
    tools = TOOLS[2:] if choice == "required" else TOOLS
    made = chat(talker, user(text), is_streamed, tools=tools, tool_choice=choice)
    assert calls(made.message) == [("say", {"w": "no"})] and not made.message.content
    assert made.finish_reason == "tool_calls"


def test_arguments_are_streamed_and_a_call_that_is_cut_off_says_so(talker: openai.OpenAI) -> None:
    stream = talker.chat.completions.create(
        model="plain", messages=user(ONE), tools=TOOLS, stream=True
    )
    deltas = [one.choices[0].delta.tool_calls for one in stream if one.choices]
    pieces = [made.function.arguments for calls in deltas for made in calls or ()]
    assert len([one for one in pieces if one]) > 1
    assert json.loads("".join(pieces)) == CALL[1]
    cut = chat(talker, user(ONE), False, max_tokens=6)
    assert cut.finish_reason == "length" and cut.message.content is None
    (made,) = cut.message.tool_calls
    assert json.dumps(CALL[1]).startswith(made.function.arguments)
    short = chat(talker, user(ONE), False, max_tokens=3)
    assert short.finish_reason == "length" and not short.message.tool_calls
    assert short.message.content.startswith("<tool_call>")


def test_a_call_of_no_tool_is_text(talker: openai.OpenAI) -> None:
    """The model calls what it was not given."""
    for is_streamed in (False, True):
        answer = chat(talker, user(ONE), is_streamed, tools=TOOLS[2:])
        assert not answer.message.tool_calls and answer.finish_reason == "stop"
        assert answer.message.content.startswith('<tool_call>\n{"name": "get_weather"')


def test_strict_tools_and_forms(talker: openai.OpenAI) -> None:
    function = {"name": "get_weather", "strict": True, "parameters": NO}
    tools = [{"type": "function", "function": function}]
    for further in ({}, {"response_format": {"type": "json_object"}}):
        made = chat(talker, user(ONE), False, tools=tools, **further)
        assert calls(made.message) == [("get_weather", {"w": "no"})]


def test_responses(talker: openai.OpenAI) -> None:
    known: dict[str, Any] = {"model": "plain", "tools": OF_RESPONSES}
    with talker.responses.stream(input=BOTH, **known) as stream:
        final = stream.get_final_response()
    message, *made = final.output
    assert message.content[0].text == "Let me see."
    assert [(one.name, json.loads(one.arguments)) for one in made] == [CALL, SECOND_CALL]
    results = [
        {"type": "function_call_output", "call_id": one.call_id, "output": "sunny"} for one in made
    ]
    given = [*user(BOTH), *final.output, *results]
    answer = talker.responses.create(input=given, instructions="Be brief.", **known)
    assert answer.output_text == GREETING
    choice: Any = {"type": "function", "name": "say"}
    (call,) = talker.responses.create(input="hello", tool_choice=choice, **known).output
    assert (call.name, json.loads(call.arguments)) == ("say", {"w": "no"})


def test_messages(plain: RunningServer) -> None:
    client = anthropic.Anthropic(base_url=plain.url, api_key="none", max_retries=0)
    known: dict[str, Any] = {"model": "plain", "max_tokens": 200, "tools": OF_MESSAGES}
    with client.messages.stream(messages=user(BOTH), **known) as stream:
        turn = stream.get_final_message()
    text, *made = turn.content
    assert text.text == "Let me see." and turn.stop_reason == "tool_use"
    assert [(one.name, one.input) for one in made] == [CALL, SECOND_CALL]
    results = [{"type": "tool_result", "tool_use_id": one.id, "content": "sunny"} for one in made]
    messages: Any = [*user(BOTH), {"role": "assistant", "content": turn.content}]
    for more in ([], [{"type": "text", "text": "hello?"}]):
        messages = [*messages[:2], {"role": "user", "content": [*results, *more]}]
        answer = client.messages.create(messages=messages, system="Be brief.", **known)
        assert answer.content[0].text == GREETING and answer.stop_reason == "end_turn"
    must: Any = {"type": "tool", "name": "say"}
    (call,) = client.messages.create(messages=user("hello"), tool_choice=must, **known).content
    assert (call.name, call.input) == ("say", {"w": "no"})


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize"])
@pytest.mark.parametrize("call", [{"function": "x"}, {"function": None}, {"type": "custom"}])
def test_a_call_that_is_none_is_the_client_s_error(
    plain: RunningServer, path: str, call: dict[str, Any]
) -> None:
    messages = [*user("hello"), {"role": "assistant", "tool_calls": [call]}]
    body = {"model": "plain", "messages": messages, "max_tokens": 1}
    known = body if path != "/tokenize" else {"messages": messages}
    status, answer = call_json(f"{plain.url}{path}", known)
    assert status == 400
    words = "messages[1].tool_calls[0].function must be an object with a name"
    assert answer["error"]["message"].startswith(words)


def test_a_result_without_a_call_is_read(plain: RunningServer, engine: LLM) -> None:
    """Nothing else of the conversation is of tools."""
    messages = [{"role": "function", "name": "f", "content": "sunny"}, *user("hello")]
    status, found = call_json(f"{plain.url}/tokenize", {"messages": messages})
    expected = engine.chat(messages, SamplingParams(max_tokens=1))[0]
    assert expected.prompt is not None and status == 200
    assert "<tool_response>\nsunny\n</tool_response>\nhello" in expected.prompt
    assert found["tokens"] == expected.prompt_token_ids


def test_what_the_server_says_of_the_model(
    plain: RunningServer, chat_server: RunningServer
) -> None:
    assert plain.process.stdout is not None
    assert "the generic form" in plain.process.stdout.readline()  # behind the address
    for server, name, form in ((plain, "plain", "generic"), (chat_server, "talker", "hermes")):
        card = call_json(f"{server.url}/v1/models/{name}")[1]
        assert card["tool_call_form"] == form


def test_the_prompt_is_that_of_chat_and_bounded_as_others(
    engine: LLM, plain: RunningServer, talker: openai.OpenAI
) -> None:
    expected = engine.chat(user(ONE), SamplingParams(max_tokens=1), tools=TOOLS)[0]
    assert expected.prompt is not None and instructions(TOOLS) in expected.prompt
    body = {"messages": user(ONE), "tools": TOOLS}
    _, found = call_json(f"{plain.url}/tokenize", body)
    assert found["tokens"] == expected.prompt_token_ids
    described = {"name": "f", "description": "x" * 17_000}
    with pytest.raises(openai.BadRequestError, match="context"):
        chat(talker, user(ONE), False, tools=[{"type": "function", "function": described}])
    half = {"name": "f", "description": "\ud800"}
    status, answer = call_json(
        f"{plain.url}/v1/chat/completions",
        {"model": "plain", **body, "tools": [{"type": "function", "function": half}]},
    )
    assert status == 400 and "no character" in answer["error"]["message"]


def test_the_embedded_model_calls_what_it_must(server: RunningServer) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    for is_streamed in (False, True):
        choice = chat(
            client,
            user("def f("),
            is_streamed,
            model="tiny",
            tools=TOOLS[2:],
            tool_choice="required",
        )
        assert calls(choice.message) == [("say", {"w": "no"})]


# ---- any schema

VALUE = st.deferred(
    lambda: (
        st.sampled_from([{"type": "integer"}, {"type": "boolean"}, {"type": "string"}, {}])
        | st.lists(st.text(max_size=4), min_size=1, max_size=3).map(lambda one: {"enum": one})
        | st.builds(
            lambda item, most: {"type": "array", "items": item, "maxItems": most},
            VALUE,
            st.integers(0, 2),
        )
        | OBJECT
    )
)
OBJECT = st.dictionaries(st.text(max_size=4), VALUE, max_size=3).map(
    lambda known: {
        "type": "object",
        "properties": known,
        "required": [*known],
        "additionalProperties": False,
    }
)


@settings(max_examples=25)
@given(schema=OBJECT, text=st.sampled_from([ONE, BOTH, "hello"]), seed=st.integers(0, 9))
def test_a_required_call_parses_and_satisfies_any_schema(
    engine: LLM, schema: dict[str, Any], text: str, seed: int
) -> None:
    """Whole, by tokens and by characters it is one call."""
    function = {"name": "say", "parameters": schema}
    tools = Tools([{"type": "function", "function": function}], "required")
    assert engine.tokenizer is not None
    grammar = answer_grammar(None, tools, GENERIC, engine.tokenizer, False)
    params = SamplingParams(
        max_tokens=400, temperature=0.5 * (seed % 2), seed=seed, structured_outputs=grammar
    )
    prompt = engine.tokenizer.render_chat(user(text), tools=tools.tools)
    pieces = [piece.text for piece in engine.stream(prompt, params)]
    whole = "".join(pieces)
    answers = [parsed(tools, given) for given in ([whole], pieces, [*whole])]
    (call,) = answers[0].calls
    assert call.name == "say" and not answers[0].text
    jsonschema.validate(json.loads(call.arguments), schema)
    for other in answers[1:]:
        (same,) = other.calls
        assert replace(same, id=call.id) == call and not other.text


def parsed(tools: Tools, pieces: list[str]) -> ParsedAnswer:
    parser, answer = AnswerParser(False, GENERIC, tools.schemas, trims=True), ParsedAnswer()
    for piece in pieces:
        answer.add(parser.push(piece))
    answer.add(parser.finish())
    return answer
