"""Conversations in Anthropic's form, as chat templates know them."""

from __future__ import annotations

from typing import Any

from minivllm.serving.anthropic.schemas import (
    Block,
    CountBody,
    ImageBlock,
    Message,
    TextBlock,
    ThinkingBlock,
    Tool,
    ToolChoice,
    ToolResultBlock,
    ToolUseBlock,
    block_of,
    is_of_another_server,
    part_of,
)
from minivllm.serving.errors import ApiError
from minivllm.serving.http.calls import ignore
from minivllm.serving.openai.tools import MOST_TOOLS, Choice, Tools, supported

BETWEEN = "\n"  # blocks of text that stand side by side, and turns of one role
_TEXTS = ("content", "reasoning_content")  # of a message


def conversation(body: CountBody) -> list[dict[str, Any]]:
    """The messages of a body in OpenAI's form. Neighbours of one role become one message, as
    Anthropic's API says.

    Raises:
        ApiError: a block is not supported, or a result answers no call.
    """
    writer = _Writer()
    if body.system is not None:
        writer.add("system", body.system, "system", (TextBlock,))
    for number, message in enumerate(body.messages):
        writer.add_message(message, f"messages.{number}")
    return [
        {key: _joined(one) if key in _TEXTS else one for key, one in message.items()}
        for message in writer.messages
    ]


def _joined(pieces: list[str | dict[str, Any]]) -> str | list[dict[str, Any]]:
    """Texts in one; where there are images, parts in OpenAI's form."""
    texts = [piece for piece in pieces if isinstance(piece, str)]
    if len(texts) == len(pieces):
        return BETWEEN.join(texts)
    parts: list[dict[str, Any]] = []
    for piece in pieces:
        if not isinstance(piece, str):
            parts.append(piece)
        elif parts and parts[-1]["type"] == "text":
            parts[-1]["text"] += BETWEEN + piece
        else:
            parts.append({"type": "text", "text": piece})
    return parts


class _Writer:
    """Writes messages in OpenAI's form, each text as the list of its parts: texts that grow by
    copies would take seconds for the parts that a body has room for."""

    _KINDS: dict[str, tuple[type[Block], ...]] = {
        "system": (TextBlock,),
        "user": (TextBlock, ImageBlock, ToolResultBlock),
        "assistant": (TextBlock, ThinkingBlock, ToolUseBlock),
    }

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self._names: dict[str, str] = {}  # of tools, by the ids of their calls

    def add_message(self, message: Message, where: str) -> None:
        """Add one turn."""
        self.add(message.role, message.content, f"{where}.content", self._KINDS[message.role])

    def add(
        self,
        role: str,
        content: str | list[dict[str, Any]],
        where: str,
        kinds: tuple[type[Block], ...],
    ) -> None:
        """Add the content of a turn."""
        if isinstance(content, str):
            self._add_text(role, content)
            return
        for number, given in enumerate(content):
            place = f"{where}.{number}"
            if role == "assistant" and is_of_another_server(given):
                ignore(f"{place}: {given['type']}")
                continue
            match block_of(given, place, *kinds):
                case TextBlock(text=text):
                    self._add_text(role, text)
                case ImageBlock() as image:
                    self._append(self._turn(role), "content", image.part())
                case ThinkingBlock(thinking=thinking):
                    self._append(self._turn(role), "reasoning_content", thinking)
                case ToolUseBlock() as call:
                    self._add_call(role, call, place)
                case ToolResultBlock() as result:
                    self._add_result(result, place)

    def _turn(self, role: str) -> dict[str, Any]:
        """The message of a role that is being written."""
        if not self.messages or self.messages[-1]["role"] != role:
            self.messages.append({"role": role, "content": []})
        return self.messages[-1]

    def _append(self, message: dict[str, Any], key: str, text: str | dict[str, Any]) -> None:
        parts = message.setdefault(key, [])
        if parts == [""]:  # no line before the first text
            parts.clear()
        parts.append(text)

    def _add_text(self, role: str, text: str) -> None:
        self._append(self._turn(role), "content", text)

    def _add_call(self, role: str, call: ToolUseBlock, where: str) -> None:
        if call.id in self._names:
            raise ApiError(
                400, f"{where}.id: {call.id!r:.100} is the id of another call", param=where
            )
        self._names[call.id] = call.name
        function = {"name": call.name, "arguments": call.input}
        calls = self._turn(role).setdefault("tool_calls", [])
        calls.append({"id": call.id, "type": "function", "function": function})

    def _add_result(self, result: ToolResultBlock, where: str) -> None:
        name = self._names.get(result.tool_use_id)
        if name is None:
            raise ApiError(
                400,
                f"{where}.tool_use_id: no call before it has the id {result.tool_use_id!r:.100}",
                param=where,
            )
        pieces: list[str | dict[str, Any]] = []
        given = result.content or ""
        for number, one in enumerate([] if isinstance(given, str) else given):
            match block_of(one, f"{where}.content.{number}", TextBlock, ImageBlock):
                case TextBlock(text=text):
                    pieces.append(text)
                case ImageBlock() as image:
                    pieces.append(image.part())
        pieces = [given] if isinstance(given, str) else pieces
        if result.is_error:
            first = pieces.pop(0) if pieces and isinstance(pieces[0], str) else ""
            pieces.insert(0, f"Error: {first}")
        self.messages.append(
            {
                "role": "tool",
                "tool_call_id": result.tool_use_id,
                "name": name,
                "content": pieces,
            }
        )


def read_tools(given: list[dict[str, Any]] | None, choice: ToolChoice | None) -> Tools | None:
    """The tools of a body; None where there are none, or none may be called.

    Raises:
        ApiError: naming the field that is wrong.
    """
    name = None if choice is None else choice.name
    known = supported(given, (None, "custom"), name or "")
    tools = [_tool(one, f"tools.{number}") for number, one in enumerate(known or [])]
    names = [tool["function"]["name"] for tool in tools]
    if len(tools) > MOST_TOOLS:
        raise ApiError(400, f"tools: at most {MOST_TOOLS}", param="tools")
    if len(set(names)) < len(names):
        raise ApiError(400, "tools: each must have a name of its own", param="tools")
    kind = "auto" if choice is None else choice.type
    if (name is not None) != (kind == "tool") or (kind == "tool" and name not in names):
        raise ApiError(
            400,
            "tool_choice.name must be the name of a tool, with type=tool alone",
            param="tool_choice",
        )
    if kind in ("any", "tool") and not tools:
        raise ApiError(400, "tool_choice: there are no tools", param="tool_choice")
    if kind == "none" or not tools:
        return None
    must: Choice = "auto" if kind == "auto" else "required"
    is_parallel = choice is None or not choice.disable_parallel_tool_use
    return Tools(tools, must, name, is_parallel, any(one.get("strict") for one in known or []))


def _tool(given: dict[str, Any], where: str) -> dict[str, Any]:
    """A tool in OpenAI's form."""
    tool = part_of(Tool, given, where)
    function: dict[str, Any] = {"name": tool.name}
    if tool.description is not None:
        function["description"] = tool.description
    return {"type": "function", "function": {**function, "parameters": tool.input_schema}}
