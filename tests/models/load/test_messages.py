"""Chat messages: one checker for conversations from Python and for lines of a file."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minivllm.errors import BadInput
from minivllm.models.load.messages import as_lines, has_calls, parse_messages
from minivllm.models.load.tool_texts import tool_texts
from minivllm.prompts import conversations

CALL = {"type": "function", "function": {"name": "find", "arguments": '{"what": [1]}'}}


def test_whatever_is_legal_is_text_and_what_templates_know_is_kept() -> None:
    parsed = parse_messages(
        [
            {
                "role": "user",
                "content": [{"type": "text", "text": "a"}, {"type": "text"}],
                "name": "me",
            },
            {
                "role": "assistant",
                "tool_calls": [CALL],
                "reasoning_content": "well",
                "content": None,
            },
            {"role": "tool", "tool_call_id": "c1", "content": "found", "name": None},
            {"role": "assistant", "function_call": {"name": "f", "arguments": "no JSON"}},
            {"role": "assistant", "tool_calls": [{"id": "c2", "name": "f", "arguments": "{}"}]},
        ]
    )
    assert parsed[0] == {"role": "user", "content": "a", "name": "me"}
    assert parsed[1]["tool_calls"][0]["function"]["arguments"] == {"what": [1]}
    assert parsed[1]["reasoning_content"] == "well" and parsed[1]["content"] == ""
    assert parsed[2] == {"role": "tool", "tool_call_id": "c1", "content": "found"}
    assert parsed[3]["tool_calls"][0]["function"]["arguments"] == "no JSON"
    assert parsed[4]["tool_calls"] == [{"id": "c2", "function": {"name": "f", "arguments": {}}}]
    assert as_lines(parsed[:1]) == "user: a\nassistant:"


DEEP: Any = "x"
for _ in range(100_000):
    DEEP = [DEEP]


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (3, " must be an object with role and content"),
        ({"content": "a"}, r"\.role must be a non-empty string"),
        ({"role": "user", "content": 3}, r"\.content must be a string, a list of parts or null"),
        (
            {"role": "user", "content": [{"type": "image_url"}]},
            r"\.content has parts that are not text",
        ),
        ({"role": "user", "content": "\ud800"}, r"\.content holds half a surrogate pair"),
        ({"role": "user", "name": "\ud800"}, " holds half a surrogate pair"),
        ({"role": "user", "tool_calls": {}}, r"\.tool_calls must be a list of objects"),
        *(
            (
                {"role": "assistant", "tool_calls": [CALL, call]},
                r"\.tool_calls\[1\]\.function must be an object with a name, which is a text",
            )
            for call in (
                *({"function": "x"}, {"function": None}, {"function": {"arguments": {}}}),
                *({"function": {"name": 3}}, {}, {"name": ["f"]}),
                {"id": "c", "type": "custom", "custom": {"name": "f", "input": "x"}},
            )
        ),
        *(
            (
                {"role": "assistant", "function_call": call},
                r"\.function_call must be an object with a name, which is a text",
            )
            for call in ("f", {}, {"name": None})
        ),
        ({"role": "user", "extra": {1, 2}}, " must be made of JSON's values"),
        ({"role": "user", "extra": DEEP}, " must be made of JSON's values"),
    ],
)
def test_what_is_wrong_is_said_with_its_place(message: Any, words: str) -> None:
    good = {"role": "user", "content": "a"}
    with pytest.raises(BadInput, match=rf"^f:3: messages\[1\]{words}"):
        parse_messages([good, message], "f:3")
    if isinstance(message, dict):
        with pytest.raises(BadInput, match=rf"^conversation 2: messages\[1\]{words}"):
            conversations([[good], [good, message]])


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


MESSAGE = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant"]) | JSON},
    optional={
        "content": st.text()
        | st.lists(st.fixed_dictionaries({"type": st.just("text"), "text": st.text()}))
        | JSON,
        "tool_calls": st.lists(st.fixed_dictionaries({"function": JSON})) | JSON,
        "function_call": JSON,
        "name": JSON,
        "more": JSON,
    },
)


@given(st.lists(MESSAGE, max_size=3))
def test_parsed_messages_are_messages_and_nothing_else_is_raised(value: list[Any]) -> None:
    try:
        parsed = parse_messages(value)
    except BadInput:
        return
    assert parse_messages(parsed) == parsed
    assert json.loads(json.dumps(parsed)) == parsed
    assert not has_calls(tool_texts("", parsed, None).messages)
