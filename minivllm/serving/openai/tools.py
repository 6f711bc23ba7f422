"""Tools in OpenAI's form, and which of them an answer may or must call."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from minivllm.serving.errors import ApiError
from minivllm.serving.http.calls import ignore

MOST_TOOLS = 128  # as OpenAI's
_NAME = re.compile(r"[\w.-]{1,256}", re.ASCII)
Choice = Literal["none", "auto", "required"]


@dataclass(frozen=True)
class Tools:
    """The tools of a call.

    Args:
        tools: as the chat template gets them: {"type": "function", "function": {"name": ...,
            "description": ..., "parameters": ...}}.
        choice: whether the answer may call one, or must.
        name: of the one that it must call; None: any.
        parallel: whether it may call several.
        strict: arguments have to satisfy the schemas.
    """

    tools: Sequence[Mapping[str, Any]]
    choice: Choice
    name: str | None = None
    parallel: bool = True
    strict: bool = False

    @property
    def names(self) -> list[str]:
        """The names of the tools."""
        return list(self.schemas)

    @property
    def schemas(self) -> dict[str, Any]:
        """The names of the tools, with the JSON schemas of their parameters; None: it has none."""
        functions = [tool["function"] for tool in self.tools]
        return {one["name"]: one.get("parameters") for one in functions}


def supported(given: Any, types: Sequence[str | None], name: str = "") -> Any:
    """The tools of a body without those that a client does not run itself, as a search of the web:
    no answer calls them, and the call's line in the log names them.

    Args:
        given: `tools`.
        types: of the tools that clients run.
        name: of the tool that `tool_choice` asks for.

    Raises:
        ApiError: the one that is wanted is none of these.
    """
    kept = []
    for number, tool in enumerate(given if isinstance(given, list) else ()):
        kind = tool.get("type") if isinstance(tool, dict) else None
        if not isinstance(kind, str) or kind in types:
            kept.append(tool)
            continue
        if name and name in (kind, tool.get("name")):
            raise ApiError(
                400,
                f"tool_choice: this server has no tool of type {kind!r:.100}, only those that the "
                "client runs",
                param="tool_choice",
                code="unsupported_value",
            )
        ignore(f"tools[{number}]: {kind} {tool.get('name') or ''}".rstrip())
    return kept if isinstance(given, list) else given


def _asked(choice: Any) -> str:
    """The type of the tool that `tool_choice` asks for, where it is no function; else ""."""
    kind = choice.get("type") if isinstance(choice, dict) else None
    return kind if isinstance(kind, str) and kind not in ("function", "allowed_tools") else ""


def read_tools(given: Any, choice: Any, parallel: bool | None) -> Tools | None:
    """The tools of a body of chat completions; None where there are none, or none may be called.

    Args:
        given: `tools`.
        choice: `tool_choice`.
        parallel: `parallel_tool_calls`.

    Raises:
        ApiError: naming the field that is wrong.
    """
    given = supported(given, ("function",), _asked(choice))
    if not given:
        if choice not in (None, "none", "auto"):
            raise ApiError(400, "tool_choice needs tools", param="tool_choice")
        return None
    if not isinstance(given, list) or len(given) > MOST_TOOLS:
        raise ApiError(400, f"tools must be a list of at most {MOST_TOOLS} tools", param="tools")
    for number, tool in enumerate(given):
        _check(tool, f"tools[{number}]")
    given, choice = _allowed(given, choice)
    is_strict = any(tool["function"].get("strict") for tool in given)
    tools = Tools(
        [_without_strict(tool) for tool in given],
        *_choice(choice),
        parallel is not False,
        is_strict,
    )
    if len(tools.names) < len(given):
        raise ApiError(400, "tools must have names of their own", param="tools")
    if tools.name is not None and tools.name not in tools.names:
        raise ApiError(
            400, f"tool_choice names {tools.name!r:.100}, which is no tool", param="tool_choice"
        )
    return None if tools.choice == "none" else tools


def schema_paths(given: Sequence[Any] | None, tools: Tools | None, path: str) -> dict[str, str]:
    """The paths of tools' schemas in a body, by what errors of a grammar name; see `naming`.

    Args:
        given: the body's tools.
        tools: those that may be called.
        path: of a schema, with {} for the tool's place.
    """
    if tools is None:
        return {}
    holders = [one.get("function", one) for one in given or () if isinstance(one, dict)]
    names = [one.get("name") if isinstance(one, dict) else None for one in holders]
    called = tools.names if tools.name is None else [tools.name]
    return {
        f"tools[{number}].parameters": path.format(names.index(name))
        for number, name in enumerate(called)
        if name in names
    }


def _allowed(given: list[Any], choice: Any) -> tuple[list[Any], Any]:
    """The tools that `tool_choice` of the type allowed_tools leaves, and its mode in place of it:
    the model is shown no others."""
    match choice:
        case {"type": "allowed_tools", "allowed_tools": {"mode": "auto" | "required"} as kept}:
            mode, allowed = kept["mode"], kept.get("tools")
        case {"type": "allowed_tools"}:
            raise ApiError(
                400,
                "tool_choice.allowed_tools.mode must be auto or required",
                param="tool_choice.allowed_tools.mode",
            )
        case _:
            return given, choice
    where = "tool_choice.allowed_tools.tools"
    if not isinstance(allowed, list) or not allowed:
        raise ApiError(400, f"{where} must be a list of tools", param=where)
    known = {tool["function"]["name"]: tool for tool in given}
    names = []
    for number, one in enumerate(allowed):
        match one:
            case {"type": "function", "function": {"name": str(name)}} if name in known:
                names.append(name)
            case _:
                place = f"{where}[{number}]"
                raise ApiError(400, f"{place} is none of the tools", param=place)
    return [tool for name, tool in known.items() if name in names], mode


def _without_strict(tool: dict[str, Any]) -> dict[str, Any]:
    """A tool without what only this server reads."""
    function = {key: value for key, value in tool["function"].items() if key != "strict"}
    return {**tool, "function": function}


def _check(tool: Any, where: str) -> None:
    """Raise ApiError for what is no function tool."""
    if not isinstance(tool, dict) or tool.get("type") != "function":
        raise ApiError(400, f'{where}.type must be "function"', param=f"{where}.type")
    function = tool.get("function")
    if not isinstance(function, dict):
        raise ApiError(400, f"{where} must describe a function", param=f"{where}.function")
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ApiError(
            400,
            f"{where}: the name must be made of letters, digits, _, . and -",
            param=f"{where}.function.name",
        )
    if not isinstance(function.get("strict"), bool | None):
        place = f"{where}.function.strict"
        raise ApiError(400, f"{where}: strict must be true or false", param=place)
    if not isinstance(function.get("parameters") or {}, dict):
        place = f"{where}.function.parameters"
        raise ApiError(400, f"{where}: parameters must be a JSON schema", param=place)


def _choice(choice: Any) -> tuple[Choice, str | None]:
    """What `tool_choice` says, and the name of the tool that it asks for."""
    match choice:
        case None | "auto":
            return "auto", None
        case "none" | "required":
            return choice, None
        case {"type": "function", "function": {"name": str(name)}}:
            return "required", name
    raise ApiError(
        400,
        "tool_choice must be none, auto, required, allowed_tools or a function's name in an object",
        param="tool_choice",
    )
