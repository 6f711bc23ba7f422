"""OpenAI's chat messages: whatever is legal there, checked, and as plain text."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from minivllm.errors import BadInput

TEXT_PARTS = ("text", "input_text", "output_text")


def parse_messages(value: Any, where: str) -> list[dict[str, Any]]:
    """Messages with text as content; null, missing and empty contents are empty texts.

    Keys that chat templates know (`tool_calls`, `tool_call_id`, `name`) are kept; a tool call's arguments become the
    object that they are the JSON of, as templates expect.

    Raises:
        BadInput: starting with `where`: these are no messages, or nobody says anything.
    """
    if not isinstance(value, list) or not value:
        raise BadInput(f"{where}: messages must be a non-empty list of objects with role and content")
    messages = [_message(message, f"{where}: messages[{i}]") for i, message in enumerate(value)]
    if not any(message["content"] or message.get("tool_calls") for message in messages):
        raise BadInput(
            f"{where}: messages[0].content must be a non-empty string, as no other message has text"
        )
    return messages


def as_lines(messages: Sequence[dict[str, Any]]) -> str:
    """Messages as `role: content` lines, ending where the assistant's answer begins; for models without a chat template."""
    lines = []
    for message in messages:
        calls = [
            json.dumps(call.get("function", call), ensure_ascii=False)
            for call in message.get("tool_calls", ())
        ]
        said = " ".join(piece for piece in (message["content"], *calls) if piece)
        lines.append(f"{message['role']}: {said}\n")
    return "".join(lines) + "assistant:"


def checked(text: str, what: str) -> str:
    """The text itself. Raises BadInput, starting with `what`, for one that cannot be encoded."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise BadInput(f"{what} holds half a surrogate pair, which is no text") from None
    return text


def _message(message: Any, what: str) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise BadInput(f"{what} must be an object with role and content")
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise BadInput(f"{what}.role must be a non-empty string")
    result: dict[str, Any] = {
        "role": checked(role, f"{what}.role"),
        "content": _content(message.get("content"), f"{what}.content"),
    }
    calls = message.get("tool_calls")
    if calls is None and isinstance(message.get("function_call"), dict):  # as they were before tools
        calls = [{"type": "function", "function": message["function_call"]}]
    if calls is not None:
        if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
            raise BadInput(f"{what}.tool_calls must be a list of objects")
        result["tool_calls"] = [_call(call, f"{what}.tool_calls") for call in calls]
    for key in ("name", "tool_call_id"):
        if isinstance(message.get(key), str):
            result[key] = checked(message[key], f"{what}.{key}")
    return result


def _content(value: Any, what: str) -> str:
    if value is None:
        return ""
    if isinstance(value, list):
        if not all(isinstance(part, dict) and part.get("type") in TEXT_PARTS for part in value):
            raise BadInput(f"{what} has parts that are not text")
        value = "".join(_content(part.get("text"), what) for part in value)
    if not isinstance(value, str):
        raise BadInput(f"{what} must be a string, a list of parts or null")
    return checked(value, what)


def _call(call: dict[str, Any], what: str) -> dict[str, Any]:
    """A tool call with its arguments as an object, where they are the JSON of one."""
    try:
        checked(json.dumps(call, ensure_ascii=False), what)
    except RecursionError:
        raise BadInput(f"{what} are nested too deeply") from None
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"])
    except (ValueError, RecursionError):
        return call
    return {**call, "function": {**function, "arguments": arguments}} if isinstance(arguments, dict) else call
