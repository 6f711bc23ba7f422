"""Tools, their calls and their results as texts of messages, for chat templates that take them in
no other way. Torch-free."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from minivllm.errors import BadInput
from minivllm.models.load.messages import RESULT_ROLES

Messages = list[dict[str, Any]]
Content = str | list[dict[str, Any]]  # a text, or parts of which some are images

# The generic form of calls, which is that of Hermes; the parser of a server's answers reads it.
CALL_BEGIN, CALL_END = "<tool_call>", "</tool_call>"
RESULT_BEGIN, RESULT_END = "<tool_response>", "</tool_response>"
# Phi-4-mini's template takes tools as a text of the system message. As its card has it:
SYSTEM = "You are a helpful assistant with some tools."
_KEY = re.compile(r"""\[\s*['"]tools['"]\s*\]|\.tools\b""")
_VARIABLE = re.compile(r"""(?<![\w.'"])tools(?![\w'"])""")


class CallForm(Protocol):
    """How a model writes a call that it has to make: `before`, a JSON object with `name` and
    `arguments_key`, and `after`."""

    @property
    def before(self) -> str: ...
    @property
    def after(self) -> str: ...
    @property
    def arguments_key(self) -> str: ...


class GenericCall(NamedTuple):
    """The generic form of a call."""

    before: str = f"{CALL_BEGIN}\n"
    after: str = f"\n{CALL_END}"
    arguments_key: str = "arguments"


GENERIC_CALL = GenericCall()


class ToolTexts(NamedTuple):
    """A conversation with tools, as a chat template takes it.

    Attributes:
        messages: with what the template takes as text.
        tools: the variable of the template; None: the messages have them, or there are none.
        instructions: the text of the system turn that describes the tools; empty: there is none.
        without_system: the messages with that text in the first turn of the user, for a template
            that does not show a turn of the system.
    """

    messages: Messages
    tools: Any = None
    instructions: str = ""
    without_system: Messages | None = None


def takes_tools(template: str) -> bool:
    """Whether a chat template takes descriptions of tools, in whatever way."""
    return re.search(r"\btools\b", template) is not None


def takes_tools_in_system(template: str) -> bool:
    """Whether a chat template takes tools as a key of a message, and not as a variable."""
    return bool(_KEY.search(template)) and not _VARIABLE.search(template)


def tool_texts(template: str, messages: Sequence[Mapping[str, Any]], tools: Any) -> ToolTexts:
    """A conversation as a template takes it, which may take no tools.

    Args:
        template: Jinja source.
        messages: see `parse_messages`.
        tools: in OpenAI's form; None or empty: there are none, and calls of earlier turns alone.

    Raises:
        BadInput: the tools are not objects of JSON.
    """
    given = [dict(message) for message in messages]
    if takes_tools(template):
        if tools and takes_tools_in_system(template):
            return ToolTexts(with_tools_in_system(given, tools))
        return ToolTexts(given, tools)
    plain = with_results_of_users(with_calls_in_content(given, GENERIC_CALL, "\n"))
    if not tools:
        return ToolTexts(plain)
    text = instructions(tools)
    return ToolTexts(_in_system(plain, text), None, text, _in_user(plain, text))


def _functions(tools: Any) -> list[str]:
    """The functions that tools are, each as JSON. Raises BadInput for other tools."""
    try:
        functions = [tool.get("function", tool) for tool in tools]
        if not all(isinstance(function, Mapping) for function in functions):
            raise TypeError("a function is no object")
        return [json.dumps(function, ensure_ascii=False) for function in functions]
    except (AttributeError, TypeError, ValueError, RecursionError) as error:
        raise BadInput(
            f"tools must be a list of objects that describe functions, in JSON's values ({error})"
        ) from None


def instructions(tools: Any) -> str:
    """What functions there are and how a model calls them. Raises BadInput for other tools."""
    return "\n".join(
        (
            "You can call these functions. Each line describes one, with the JSON schema of its "
            "parameters:",
            *_functions(tools),
            "To call a function, write its name and arguments as JSON between two tags:",
            CALL_BEGIN,
            '{"name": <function name>, "arguments": <object>}',
            CALL_END,
            f"Its result comes between {RESULT_BEGIN} and {RESULT_END}. Where no function helps, "
            "answer in plain words.",
        )
    )


def with_tools_in_system(messages: Messages, tools: Any) -> Messages:
    """Messages whose first one, of the system, has the tools as JSON. Raises BadInput for other
    tools than functions."""
    first, rest = {"role": "system", "content": SYSTEM}, list(messages)
    if rest and rest[0]["role"] == "system":
        first = rest.pop(0)
    return [{**first, "tools": f"[{', '.join(_functions(tools))}]"}, *rest]


def with_calls_in_content(
    messages: Sequence[Mapping[str, Any]], form: CallForm, between: str = ""
) -> Messages:
    """Messages whose calls are a part of their texts, as the model has written them.

    Args:
        messages: see `parse_messages`.
        form: of the calls.
        between: a text and a call, or two calls.
    """
    result = []
    for message in messages:
        one = dict(message)
        for call in one.pop("tool_calls", ()):
            function = call["function"]
            written = {
                "name": function["name"],
                form.arguments_key: function.get("arguments", {}),
            }
            text = json.dumps(written, ensure_ascii=False)
            one["content"] = _joined(one.get("content"), between, form.before + text + form.after)
        result.append(one)
    return result


def with_results_of_users(messages: Messages) -> Messages:
    """Messages whose results of tools are turns of the user, as every template knows them. Such a
    turn has all results that stand side by side, and what the user says beside them: roles take
    turns as they did."""
    result: Messages = []
    after_result = False
    for message in messages:
        is_result = message["role"] in RESULT_ROLES
        if is_result:
            content = _joined(RESULT_BEGIN, "\n", message.get("content"))
            message = {"role": "user", "content": _joined(content, "\n", RESULT_END)}
        of_user = result and result[-1]["role"] == message["role"] == "user"
        if of_user and (is_result or after_result):
            last = result.pop()
            both = _joined(last.get("content"), "\n", message.get("content"))
            message = {**last, "content": both}
        result.append(message)
        after_result = is_result
    return result


def _joined(first: Content | None, between: str, second: Content | None) -> Content:
    """Two contents in one; an empty one is left out."""
    if not first or not second:
        return first or second or ""
    if isinstance(first, str) and isinstance(second, str):
        return first + between + second
    return [*_parts(first), *_parts(between), *_parts(second)]


def _parts(content: Content) -> list[dict[str, Any]]:
    if isinstance(content, str):
        return [{"type": "text", "text": content}] if content else []
    return content


def _in_system(messages: Messages, text: str) -> Messages:
    """Messages with a text at the end of the first turn, which is the system's."""
    if messages and messages[0]["role"] == "system":
        first = messages[0]
        content = _joined(first.get("content"), "\n\n", text)
        return [{**first, "content": content}, *messages[1:]]
    return [{"role": "system", "content": text}, *messages]


def _in_user(messages: Messages, text: str) -> Messages:
    """Messages with a text at the beginning of the first turn of the user, which is the first one
    behind those of the system."""
    place = next((i for i, one in enumerate(messages) if one["role"] != "system"), len(messages))
    before, rest = messages[:place], messages[place:]
    if rest and rest[0]["role"] == "user":
        content = _joined(text, "\n\n", rest[0].get("content"))
        return [*before, {**rest[0], "content": content}, *rest[1:]]
    return [*before, {"role": "user", "content": text}, *rest]
