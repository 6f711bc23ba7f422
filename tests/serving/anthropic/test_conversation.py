"""Conversations in Anthropic's form become messages that chat templates know."""

from __future__ import annotations

from typing import Any

import pytest

from minivllm.serving.anthropic.conversation import conversation, read_tools
from minivllm.serving.anthropic.schemas import CountBody, ToolChoice
from minivllm.serving.errors import ApiError
from minivllm.serving.http import calls

CALL = {"type": "tool_use", "id": "a1", "name": "f", "input": {"x": 1}}
TOOL = {"name": "f", "description": "does", "input_schema": {"type": "object"}}


def written(*turns: tuple[str, Any], system: Any = None) -> list[dict[str, Any]]:
    messages: Any = [{"role": role, "content": content} for role, content in turns]
    return conversation(CountBody(model="m", messages=messages, system=system))


def text(value: str) -> dict[str, Any]:
    return {"type": "text", "text": value, "cache_control": {"type": "ephemeral"}}


def test_texts_of_a_turn_and_turns_of_a_role_are_joined_by_lines() -> None:
    found = written(
        ("user", "a"), ("user", [text("b"), text("c")]), ("assistant", "d"), system=[text("s")]
    )
    assert found == [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "a\nb\nc"},
        {"role": "assistant", "content": "d"},
    ]


@pytest.mark.parametrize(
    ("blocks", "expected"),
    [([""], ""), (["", "", "a"], "a"), (["a", "", "b"], "a\n\nb"), (["a", ""], "a\n")],
)
def test_an_empty_text_begins_no_line_before_the_first(blocks: list[str], expected: str) -> None:
    found = written(("user", [text(one) for one in blocks]))
    assert found == [{"role": "user", "content": expected}]


def test_a_call_and_its_result_are_messages_of_their_own_roles() -> None:
    thought = {"type": "thinking", "thinking": "t", "signature": "any"}
    result = {"type": "tool_result", "tool_use_id": "a1", "content": [text("r"), text("s")]}
    failed = {"type": "tool_result", "tool_use_id": "a2", "content": "no", "is_error": True}
    empty = {"type": "tool_result", "tool_use_id": "a1"}
    calls = [text("now"), CALL, {**CALL, "id": "a2", "name": "g", "input": {}}]
    found = written(
        ("user", "u"),
        ("assistant", [thought, *calls]),
        ("user", [result, failed, empty, text("v")]),
    )
    functions = [{"name": "f", "arguments": {"x": 1}}, {"name": "g", "arguments": {}}]
    assert found[1] == {
        "role": "assistant",
        "content": "now",
        "reasoning_content": "t",
        "tool_calls": [
            {"id": f"a{number}", "type": "function", "function": function}
            for number, function in enumerate(functions, 1)
        ],
    }
    assert found[2:] == [
        {"role": "tool", "tool_call_id": "a1", "name": "f", "content": "r\ns"},
        {"role": "tool", "tool_call_id": "a2", "name": "g", "content": "Error: no"},
        {"role": "tool", "tool_call_id": "a1", "name": "f", "content": ""},
        {"role": "user", "content": "v"},
    ]


def test_what_only_another_server_can_read_is_left_out() -> None:
    found = {"type": "web_search_result", "url": "u", "title": "t", "encrypted_content": "x"}
    result = {"type": "web_search_tool_result", "tool_use_id": "s1", "content": [found]}
    cited = {**text("b"), "citations": [{"type": "web_search_result_location", "url": "u"}]}
    call = calls.Call("id", "client")
    token = calls.CALL.set(call)
    blocks = [
        {"type": "redacted_thinking", "data": "x"},
        text("a"),
        {"type": "server_tool_use", "id": "s1", "name": "web_search", "input": {"query": "q"}},
        result,
        cited,
    ]
    messages = written(("user", "u"), ("assistant", blocks))
    calls.CALL.reset(token)
    assert messages[1] == {"role": "assistant", "content": "a\nb"}
    assert call.ignored == [
        "messages.1.content.0: redacted_thinking",
        "messages.1.content.2: server_tool_use",
        "messages.1.content.3: web_search_tool_result",
        "TextBlock.citations",
    ]


def test_two_calls_with_one_id_are_refused() -> None:
    with pytest.raises(ApiError, match="'a1' is the id of another call") as error:
        written(("assistant", [CALL, CALL]))
    assert error.value.param == "messages.0.content.1.id"


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        (None, ("auto", None, True)),
        ({"type": "auto", "disable_parallel_tool_use": True}, ("auto", None, False)),
        ({"type": "any"}, ("required", None, True)),
        ({"type": "tool", "name": "f"}, ("required", "f", True)),
    ],
)
def test_which_tools_are_called(choice: Any, expected: tuple[Any, ...]) -> None:
    tools = read_tools([TOOL], None if choice is None else ToolChoice(**choice))
    assert tools is not None
    assert (tools.choice, tools.name, tools.parallel) == expected
    function = {"name": "f", "description": "does", "parameters": {"type": "object"}}
    assert tools.tools == [{"type": "function", "function": function}]


def test_no_tools_are_called() -> None:
    assert read_tools([TOOL], ToolChoice(type="none")) is None
    assert read_tools([], None) is None
