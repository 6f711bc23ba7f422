"""Items of /v1/responses as messages of a chat template."""

from __future__ import annotations

from typing import Any

import pytest

from minivllm.serving.errors import ApiError
from minivllm.serving.http import calls
from minivllm.serving.openai.response_input import read_input

CALL = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
CHAT_CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
THOUGHTS = {
    "type": "reasoning",
    "summary": [],
    "content": [{"type": "reasoning_text", "text": "hm"}],
}
SAID = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "yes"}]}


def test_text_follows_instructions() -> None:
    assert read_input("hi", "be brief") == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "hi"},
    ]


def test_items_of_one_turn_of_the_assistant_are_one_message() -> None:
    result = {
        "type": "function_call_output",
        "call_id": "c",
        "output": [{"type": "input_text", "text": "3"}],
    }
    other = {**SAID, "phase": "commentary", "content": "so"}
    items = [THOUGHTS, SAID, CALL, CALL, result, CALL, THOUGHTS, CALL, SAID, other]
    messages = read_input([{"role": "user", "content": "hi"}, *items], None)
    assert messages == [
        {"role": "user", "content": "hi"},
        {
            "role": "assistant",
            "reasoning_content": "hm",
            "content": "yes",
            "tool_calls": [CHAT_CALL, CHAT_CALL],
        },
        {"role": "tool", "tool_call_id": "c", "content": "3"},
        {"role": "assistant", "tool_calls": [CHAT_CALL]},
        {"role": "assistant", "reasoning_content": "hm", "tool_calls": [CHAT_CALL]},
        {"role": "assistant", "content": "yes"},
        {"role": "assistant", "content": "so"},
    ]


@pytest.mark.parametrize(
    ("item", "words"),
    [
        (3, "input[1].type must be message"),
        ({"type": "item_reference", "id": "x"}, "input[1].type must be message"),
        ({"role": "tool", "content": "x"}, "input[1].role must be one of user"),
        ({"role": "user", "content": 3}, "input[1].content must be a string"),
        ({**CALL, "arguments": {}}, "input[1].arguments must be a text"),
        ({"type": "function_call_output", "output": "x"}, "input[1].call_id must be a text"),
        ({**THOUGHTS, "content": [3]}, "input[1].content must be parts of reasoning_text"),
    ],
)
def test_a_wrong_item_is_named(item: Any, words: str) -> None:
    with pytest.raises(ApiError) as error:
        read_input([{"role": "user", "content": "hi"}, item], None)
    assert words in error.value.message
    assert error.value.param is not None and error.value.message.startswith(error.value.param)


@pytest.mark.parametrize(
    "item",
    [
        {"type": "reasoning", "summary": [], "encrypted_content": "x"},
        {"type": "web_search_call", "id": "w", "status": "completed", "action": {}},
        {"type": "mcp_call", "id": "m", "name": "f", "arguments": "{}", "output": "x"},
    ],
)
def test_what_only_another_server_can_read_is_left_out(item: Any) -> None:
    call = calls.Call("id", "client")
    token = calls.CALL.set(call)
    said = {"role": "assistant", "content": "4"}
    found = read_input([{"role": "user", "content": "hi"}, item, said], None)
    calls.CALL.reset(token)
    assert [one["role"] for one in found] == ["user", "assistant"] and len(call.ignored) == 1
