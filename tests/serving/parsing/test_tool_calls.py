"""Calls are found in any pieces of a text, and what is no call stays text."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minivllm.serving.parsing.tool_calls import (
    ArgumentsDelta,
    ContentDelta,
    ToolCallBegin,
    ToolCallParser,
)
from minivllm.serving.parsing.tool_forms import (
    FUNCTOOLS,
    GENERIC,
    GRANITE,
    HERMES,
    LLAMA,
    MISTRAL,
    PHI4,
    QWEN_CODER,
    ToolForm,
)

FORMS = [HERMES, GENERIC, QWEN_CODER, LLAMA, MISTRAL, GRANITE, PHI4, FUNCTOOLS]
TOOLS: dict[str, Any] = {
    "f": {"properties": {"a": {"type": "array"}, "n": {"type": ["integer", "null"]}}},
    "get_weather": None,
}


def parse(form: ToolForm, *pieces: str) -> list[Any]:
    """Texts, and calls as [name, arguments], in order."""
    parser, found = ToolCallParser(form, TOOLS), list[Any]()
    for event in [e for piece in pieces for e in parser.push(piece)] + parser.finish():
        match event:
            case ContentDelta(text):
                assert text
                if found and isinstance(found[-1], str):
                    found[-1] += text
                else:
                    found.append(text)
            case ToolCallBegin(index, _, name):
                assert index == sum(isinstance(one, list) for one in found)
                found.append([name, ""])
            case ArgumentsDelta(index, text):
                assert text and index == sum(isinstance(one, list) for one in found) - 1
                assert isinstance(found[-1], list), "arguments after text"
                found[-1][1] += text
    return found


def cut(text: str, places: list[int]) -> list[str]:
    """A text in pieces."""
    ends = sorted({place % (len(text) + 1) for place in places} | {0, len(text)})
    return [text[begin:end] for begin, end in pairwise(ends)]


# ---- calls as models write them

CALL = '{"name": "f", "arguments": {"a": [1, {"b": "}"}]}}'
ARGUMENTS = '{"a": [1, {"b": "}"}]}'
OTHER = '{"parameters": {}, "name": "get_weather"}'
EMPTY = '{"name": "get_weather"}'
XML = f"<function=f>\n<parameter=a>\n{ARGUMENTS[6:-1]}\n</parameter>\n</function>"
XML_OTHER = "<function=get_weather></function>"
WRITTEN = [
    (HERMES, f"<tool_call>\n{CALL}\n</tool_call>", 1),
    (HERMES, f"<tool_call>{CALL}</tool_call>\n<tool_call>\n{OTHER}\n</tool_call>\n", 2),
    (HERMES, f"<tool_call>{CALL}<tool_call>{OTHER}", 2),
    (HERMES, f"<tool_call>[{CALL}, {OTHER}]</tool_call>", 2),
    (HERMES, f"<tool_call>{CALL}}}\n</tool_call>", 1),
    (HERMES, f"<tool_call>{CALL[:-1]}</tool_call>", 1),
    (QWEN_CODER, f"<tool_call>\n{CALL}\n</tool_call>", 1),
    (QWEN_CODER, f"<tool_call>\n{XML}\n</tool_call>\n<tool_call>\n{XML_OTHER}</tool_call>", 2),
    (GENERIC, f"<tool_call>\n{CALL}\n</tool_call>\n<tool_call>\n{EMPTY}\n</tool_call>", 2),
    (GENERIC, f"<tool_call>{CALL}\n<tool_call>{EMPTY}", 2),
    (GENERIC, f"\n{CALL}", 1),
    (GENERIC, f"{CALL}\n</tool_call>", 1),
    (GENERIC, f"[{CALL}, {EMPTY}]", 2),
    (LLAMA, CALL, 1),
    (LLAMA, f"\n<|python_tag|>{CALL}", 1),
    (LLAMA, f"{CALL}; {OTHER}", 2),
    (LLAMA, f'{{"type": "function", {CALL[1:]}', 1),
    (MISTRAL, f"[TOOL_CALLS] [{CALL}, {OTHER}]", 2),
    (MISTRAL, f'[TOOL_CALLS] [{CALL[:-1]}, "id": "aB3456789"}}]', 1),
    (MISTRAL, f"[TOOL_CALLS]f[ARGS]{ARGUMENTS}[TOOL_CALLS]get_weather{{}}", 2),
    (MISTRAL, f"[TOOL_CALLS]f[CALL_ID]aB3456789[ARGS]{ARGUMENTS}", 1),
    (GRANITE, f"<|tool_call|>[{CALL},\n{OTHER}]", 2),
    (PHI4, f"<|tool_call|>[{CALL}, {OTHER}]<|/tool_call|>", 2),
    (FUNCTOOLS, f"functools[{CALL}]", 1),
]


@pytest.mark.parametrize(("form", "text", "count"), WRITTEN)
def test_calls_of_each_family(form: ToolForm, text: str, count: int) -> None:
    calls = [["f", ARGUMENTS], ["get_weather", "{}"]][:count]
    assert parse(form, text) == calls == parse(form, *text)


def test_text_around_calls_keeps_all_but_the_space_beside_them() -> None:
    text = f" I look.\n\n<tool_call>\n{CALL}\n</tool_call>\n\nDone. <b>\n"
    assert parse(HERMES, *text) == [" I look.", ["f", ARGUMENTS], "Done. <b>\n"]
    text = f"It is:<|python_tag|>{CALL} or so"
    assert parse(LLAMA, *text) == ["It is:", ["f", ARGUMENTS], "or so"]


def test_a_generic_call_leaves_the_text_around_it() -> None:
    wrong = '<tool_call>{"name": "h", "arguments": {}}</tool_call>'
    text = f"I look.\n<tool_call>{CALL}</tool_call>\nand {wrong}"
    assert parse(GENERIC, *text) == ["I look.", ["f", ARGUMENTS], f"and {wrong}"]
    assert parse(GENERIC, f"{CALL}\nDone.") == [["f", ARGUMENTS], "Done."]


NONE = '{"name": "h", "arguments": {"a": [1]}}'
BEFORE = '{"arguments": {"a": [1]}, "name": "h"}'


@pytest.mark.parametrize("wrong", [NONE, BEFORE, '{"name": "h"}', '{"id": 1, "name": "h"}'])
@pytest.mark.parametrize(
    ("form", "text"),
    [
        (GENERIC, "<tool_call>[{call}, {wrong}]</tool_call>"),
        (GENERIC, "<tool_call>\n[{call},{wrong}\n]\n</tool_call>"),
        (GENERIC, "[{call}, {wrong}]"),
        (LLAMA, "{call}; {wrong}"),
    ],
)
def test_of_a_list_only_the_object_that_is_no_call_is_text(
    form: ToolForm, text: str, wrong: str
) -> None:
    written = text.format(call=CALL, wrong=wrong)
    assert parse(form, *written) == [["f", ARGUMENTS], wrong] == parse(form, written)
    more = text.format(call=CALL, wrong=f"{wrong}{';' if form is LLAMA else ','}{EMPTY}")
    expected = [["f", ARGUMENTS], wrong, ["get_weather", "{}"]]
    assert parse(form, *more) == expected == parse(form, more)


def test_a_list_that_begins_with_no_call_is_text() -> None:
    for text in (f"<tool_call>[{NONE}, {CALL}]</tool_call>", f"[{NONE}, {CALL}]"):
        assert parse(GENERIC, *text) == [text] == parse(GENERIC, text)


def test_an_object_of_a_list_that_ends_early_is_kept() -> None:
    for end in range(1, len(NONE)):
        text = f"<tool_call>[{CALL}, {NONE[:end]}"
        kept = f", {NONE[:end]}"
        assert parse(GENERIC, *text) == [["f", ARGUMENTS], kept] == parse(GENERIC, text)


def test_space_that_goes_on_is_text() -> None:
    """It is not held back without a bound."""
    space = " " * 200
    for form, call in (
        (HERMES, f"<tool_call>{CALL}</tool_call>"),
        (LLAMA, f"<|python_tag|>{CALL}"),
    ):
        for text in (f"{space}{call}", f"a{space}{call}"):
            expected = [text[: text.index("<") - 64], ["f", ARGUMENTS]]
            assert parse(form, text) == expected == parse(form, *text)
    assert parse(LLAMA, space + CALL) == [space + CALL] == parse(LLAMA, *space, *CALL)


@pytest.mark.parametrize("form", FORMS)
def test_a_forced_call_is_a_call(form: ToolForm) -> None:
    written = {"name": "f", form.arguments_key: {"x": 1}}
    text = form.before + json.dumps(written) + form.after
    assert parse(form, *text) == [["f", '{"x": 1}']]


def test_arguments_come_while_they_are_written() -> None:
    parser = ToolCallParser(HERMES)
    assert parser.push('<tool_call>{"name": "f", "arguments"') == []
    events = parser.push(': {"city": "Par')
    assert [type(event) for event in events] == [ToolCallBegin, ArgumentsDelta]
    assert parser.push("is") == [ArgumentsDelta(0, "is")]
    assert parser.push('"}}') == [ArgumentsDelta(0, '"}')]


def test_ids_are_those_that_the_chat_template_accepts() -> None:
    for form, length in ((HERMES, 29), (MISTRAL, 9)):
        events = ToolCallParser(form).push(f"{form.begin}[{CALL},{CALL}]")
        ids = [event.id for event in events if isinstance(event, ToolCallBegin)]
        assert len(set(ids)) == 2 and {len(one) for one in ids} == {length}
        assert form is HERMES or all(one.isalnum() for one in ids)


# ---- what is no call


@pytest.mark.parametrize(
    ("form", "text"),
    [
        (HERMES, "<tool_call>"),
        (HERMES, "a <tool_cal"),
        (HERMES, "say <tool_call> to call\n"),
        (HERMES, "<tool_call>{'name': 'f', 'arguments': {}}</tool_call>"),
        (HERMES, '<tool_call>{"arguments": {"a": 1}}</tool_call>'),
        (HERMES, '<tool_call>{"name": "", "arguments": {}}</tool_call>'),
        (HERMES, '<tool_call>{"name": "f", "arguments": "{}"}</tool_call>'),
        (HERMES, '<tool_call>{"name": "f", "arguments": [1]}</tool_call>'),
        (HERMES, '<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>'),
        (HERMES, "<tool_call>[]</tool_call>"),
        (QWEN_CODER, "<tool_call>\n<function=\n></function>"),
        (QWEN_CODER, "<tool_call>\n<func"),
        (GENERIC, '<tool_call>\n{"name": "h", "arguments": {}}\n</tool_call>'),
        (GENERIC, '<tool_call>\n{"name": <function name>, "arguments": <object>}\n</tool_call>'),
        (GENERIC, '{"name": "Ada", "arguments": {}}'),
        (GENERIC, '{"name": "f", "parameters": {"type": "object"}}'),  # a description
        (GENERIC, f"<tool_call>{OTHER}</tool_call>"),
        (GENERIC, '{"name": "f", "age": 3}'),
        (GENERIC, f"I call {CALL}"),
        (GENERIC, f"```json\n{CALL}\n```"),
        (GENERIC, "say `<tool_call>` to call"),
        (LLAMA, '{"name": "Ada", "parameters": {}}'),  # an answer in JSON, of no tool
        (LLAMA, '{"city": "Paris"}'),
        (LLAMA, '<|python_tag|>brave_search.call(query="x")'),
        (LLAMA, f"I call {CALL}"),
        (MISTRAL, "[TOOL_CALLS] I do not know"),
        (MISTRAL, f"[TOOL_CALLS]{'a' * 400}" + "{}"),
        (FUNCTOOLS, "import functools\n\n@functools.cache\n"),
    ],
)
def test_what_is_no_call_is_text(form: ToolForm, text: str) -> None:
    assert parse(form, text) == [text] == parse(form, *text)


def test_a_call_after_what_is_no_call() -> None:
    text = f'<tool_call>{{"name"<tool_call>{CALL}</tool_call>'
    assert parse(HERMES, *text) == ['<tool_call>{"name"', ["f", ARGUMENTS]]


def test_a_call_that_goes_wrong_ends_there_and_the_rest_is_text() -> None:
    text = '<tool_call>{"name": "f", "arguments": {"a": 1,, "b"}}'
    assert parse(HERMES, *text) == [["f", '{"a": 1,'], ', "b"}}']
    text = '<tool_call>{"name": "f", "arguments": {"a": "x\ny"}}'
    assert parse(HERMES, *text) == [["f", '{"a": "x'], '\ny"}}']


def test_xml_that_goes_wrong_or_ends_early_is_kept() -> None:
    begun = "<tool_call><function=f><parameter=n>1</parameter>"
    assert parse(QWEN_CODER, *begun) == [["f", '{"n": 1']]
    assert parse(QWEN_CODER, *begun, "oh, no") == [["f", '{"n": 1'], "oh, no"]
    assert parse(QWEN_CODER, *begun, "<parameter=x>te") == [["f", '{"n": 1'], "<parameter=x>te"]


def test_a_value_of_xml_is_a_text_with_its_own_lines() -> None:
    value = "\n\ndef f():\n    return '</p>'\n\n"
    text = f"<tool_call><function=f><parameter=x>{value}</parameter></function></tool_call>"
    (call,) = parse(QWEN_CODER, *text)
    assert json.loads(call[1]) == {"x": value[1:-1]}


def test_a_text_that_ends_early_keeps_the_call_that_has_begun() -> None:
    whole = f"<tool_call>{CALL}</tool_call>"
    begun = whole.index('{"a"') + 1
    for end in range(begun, len(whole)):
        name, arguments = parse(HERMES, whole[:end])[0]
        assert name == "f" and arguments and ARGUMENTS.startswith(arguments)
    for end in range(begun):
        assert parse(HERMES, whole[:end]) == ([whole[:end]] if end else [])


# ---- any text

FRAGMENTS = [
    *('"name"', '"arguments"', '"parameters"', '"f"', '"get_weather"', '"a\\"\\u00e9"', "null"),
    *("{", "}", "[", "]", ",", ":", ";", " ", "\n", "12", "-0.5e3", '"', "\\", "x", "[ARGS]"),
    *('{"name": "f", "arguments": {', CALL, OTHER, XML, XML_OTHER, XML[:-11]),
    *(f"{CALL}, ", f"[{CALL},", '{"name": "h"}', '{"name": "h", "arguments": {}}'),
    *("<function=f>", "<parameter=x>", "</parameter>", "</function>", "<"),
]
# Characters that are in no marker and no key of a call.
PLAIN = "12xαβ"


@st.composite
def texts(draw: st.DrawFn, form: ToolForm) -> str:
    markers = [form.begin, form.begin[:5], form.end or ";", form.before, form.after]
    part = st.sampled_from(FRAGMENTS) | st.sampled_from(markers) | st.text(PLAIN, max_size=3)
    return "".join(draw(st.lists(part, max_size=14)))


@given(st.data(), st.sampled_from(FORMS), st.lists(st.integers(0, 999), max_size=20))
def test_the_cut_of_a_text_changes_nothing(
    data: st.DataObject, form: ToolForm, places: list[int]
) -> None:
    text = data.draw(texts(form))
    assert parse(form, *cut(text, places)) == parse(form, text)


@given(st.data(), st.sampled_from(FORMS))
def test_nothing_is_lost(data: st.DataObject, form: ToolForm) -> None:
    text = data.draw(texts(form))
    found = parse(form, text)
    if not any(isinstance(one, list) for one in found):
        assert "".join(found) == text
    events = "".join(one if isinstance(one, str) else "".join(one) for one in found)
    assert [events.count(char) for char in PLAIN] == [text.count(char) for char in PLAIN]
