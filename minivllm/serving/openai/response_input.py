"""The input of /v1/responses, items and tools, as messages and tools of a chat template."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from minivllm.errors import BadInput
from minivllm.models.load.messages import has_images, text_content
from minivllm.serving.errors import ApiError
from minivllm.serving.http.calls import ignore

ROLES = ("user", "assistant", "system", "developer")
# Items of tools that another server has run in earlier turns; the texts around them, which say what
# came of it, are kept.
_SERVER_TOOLS = (
    *("web_search_call", "file_search_call", "code_interpreter_call", "image_generation_call"),
    *("mcp_list_tools", "mcp_call", "mcp_approval_request", "mcp_approval_response"),
)


def read_input(given: str | Sequence[Any], instructions: str | None) -> list[dict[str, Any]]:
    """Messages in the form of chat completions.

    The thoughts, the text and the calls of one assistant's turn, which are items of their own, are
    one message.

    Args:
        given: a text of the user, or items.
        instructions: come first, as a message of the system.

    Raises:
        ApiError: naming the item that is wrong.
    """
    messages: list[dict[str, Any]] = []
    if instructions is not None:
        messages.append({"role": "system", "content": instructions})
    if isinstance(given, str):
        return [*messages, {"role": "user", "content": given}]
    if not given:
        raise _wrong("input is empty")
    for number, item in enumerate(given):
        _add(messages, item, f"input[{number}]")
    return messages


def _add(messages: list[dict[str, Any]], item: Any, where: str) -> None:
    """Add an item to the messages."""
    kind = item.get("type", "message") if isinstance(item, dict) else None
    if kind == "message":
        _add_message(messages, item, where)
    elif kind == "function_call":
        function = {name: _text(item, name, where) for name in ("name", "arguments")}
        call_id = _text(item, "call_id", where)
        call = {"id": call_id, "type": "function", "function": function}
        _turn(messages).setdefault("tool_calls", []).append(call)
    elif kind == "function_call_output":
        call_id, given = _text(item, "call_id", where), item.get("output")
        output = given if has_images(given) else _content(item, "output", where)
        messages.append({"role": "tool", "tool_call_id": call_id, "content": output})
    elif kind == "reasoning":
        _add_reasoning(messages, item, where)
    elif kind in _SERVER_TOOLS:
        ignore(f"{where}: {kind}")
    else:
        raise _wrong(
            f"{where}.type must be message, function_call, function_call_output or reasoning"
        )


def _add_message(messages: list[dict[str, Any]], item: dict[str, Any], where: str) -> None:
    if (role := item.get("role")) not in ROLES:
        raise _wrong(f"{where}.role must be one of {', '.join(ROLES)}")
    given = item.get("content")
    content = given if has_images(given) else _content(item, "content", where)
    last = messages[-1] if messages else {}
    only_thinks = last.get("role") == "assistant" and not last.keys() & {"content", "tool_calls"}
    if role == "assistant" and only_thinks:
        last["content"] = content
    else:
        messages.append({"role": role, "content": content})


def _add_reasoning(messages: list[dict[str, Any]], item: dict[str, Any], where: str) -> None:
    """Add thoughts; those that only another server can read are left out."""
    parts = item.get("content") or []
    if not parts and item.get("encrypted_content"):
        ignore(f"{where}.encrypted_content")
    if not isinstance(parts, list) or not all(isinstance(part, dict) for part in parts):
        raise _wrong(f"{where}.content must be parts of reasoning_text")
    texts = [_text(part, "text", f"{where}.content") for part in parts]
    if texts:
        messages.append({"role": "assistant", "reasoning_content": "".join(texts)})


def _turn(messages: list[dict[str, Any]]) -> dict[str, Any]:
    """The last message, if it is the assistant's, or a new one."""
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant"})
    return messages[-1]


def _text(item: dict[str, Any], name: str, where: str) -> str:
    if not isinstance(value := item.get(name), str):
        raise _wrong(f"{where}.{name} must be a text")
    return value


def _content(item: dict[str, Any], name: str, where: str) -> str:
    try:
        return text_content(item.get(name), f"{where}.{name}")
    except BadInput as error:
        raise _wrong(str(error)) from None


def _wrong(message: str) -> ApiError:
    return ApiError(400, message, param="input")


def chat_tools(tools: Sequence[Any] | None) -> list[Any]:
    """Tools as chat completions have them: what describes a function lies in an object of its
    own."""
    result = []
    for tool in tools or ():
        if isinstance(tool, dict) and tool.get("type") == "function":
            function = {k: v for k, v in tool.items() if k != "type" and v is not None}
            tool = {"type": "function", "function": function}
        result.append(tool)
    return result


def chat_choice(choice: Any) -> Any:
    """`tool_choice` as chat completions have it."""
    match choice:
        case {"type": "function", "name": name}:
            return {"type": "function", "function": {"name": name}}
        case {"type": "allowed_tools", "tools": list(tools), **rest}:
            return {
                "type": "allowed_tools",
                "allowed_tools": {"mode": rest.get("mode"), "tools": chat_tools(tools)},
            }
    return choice
