"""OpenAI's chat messages: validated, with text contents. Torch-free.

Chat and benchmarks with files of prompts take the same messages."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from minivllm.errors import BadInput
from minivllm.platform.untrusted import parse_json

TEXT_PARTS = ("text", "input_text", "output_text")
IMAGE_PARTS = ("image_url", "input_image", "image", "image_pil")
_OVER_CONTENT = re.compile(r"""\bin\s+\w+(\[\s*['"]content['"]\s*\]|\.content\b)""")
_IS_STRING = re.compile(r"""(\[\s*['"]content['"]\s*\]|\.content|\bcontent)\s+is\s+string""")
CALLS = ("tool_calls", "function_call")
RESULT_ROLES = ("tool", "function")  # of what tools have answered; the latter before `tool`


@dataclass
class ImageParts:
    """The images of messages, while these are parsed.

    Attributes:
        placeholder: what a prompt has where an image is.
        trusted: whether the messages are of this program's own user: an image may then be an object
            or a path, and not only a URL.
        sources: of the images, in order: ("url", its text), or ("image", what stands for it).
    """

    placeholder: str
    trusted: bool = False
    sources: list[tuple[str, Any]] = field(default_factory=list)


def parse_messages(
    value: Any, where: str = "", images: ImageParts | None = None
) -> list[dict[str, Any]]:
    """Messages with text as content; null, missing and empty contents are empty texts. A content
    with images is a list of parts, {"type": "text", "text": ...} and {"type": "image", ...}.

    Other keys (`name`, `tool_call_id`, what a template knows besides) are kept. A tool call has a
    `function`, an object with a name; its arguments become the object that they are the JSON of, as
    templates expect.

    Args:
        value: the messages of one conversation.
        where: it stands, as file and line; begins the messages of errors.
        images: gets the images; None: there may be none.

    Raises:
        BadInput: these are no messages.
    """
    prefix = f"{where}: " if where else ""
    if not isinstance(value, Sequence) or isinstance(value, str) or not value:
        raise BadInput(
            f"{prefix}messages must be a non-empty list of objects with role and content"
        )
    return [_message(message, f"{prefix}messages[{i}]", images) for i, message in enumerate(value)]


def has_images(content: Any) -> bool:
    """Whether the content of a message has an image."""
    return isinstance(content, list) and any(
        isinstance(part, dict) and part.get("type") in IMAGE_PARTS for part in content
    )


def has_calls(messages: Sequence[Mapping[str, Any]]) -> bool:
    """Whether any message calls a tool, or is what a tool has answered."""
    return any(one["role"] in RESULT_ROLES or "tool_calls" in one for one in messages)


def with_known_roles(template: str, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages whose role `developer` is `system` for a chat template that does not know it."""
    if re.search(r"\bdeveloper\b", template):
        return messages
    return [{**one, "role": "system"} if one["role"] == "developer" else one for one in messages]


def for_template(template: str, messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages with the contents that a chat template takes: lists of parts if it goes over these,
    texts otherwise."""
    over_parts = _OVER_CONTENT.search(template) is not None
    takes_text = not over_parts or _IS_STRING.search(template) is not None
    result = []
    for message in messages:
        content = message.get("content")
        if isinstance(content, str) and not takes_text:
            content = [{"type": "text", "text": content}]
        elif isinstance(content, list) and not over_parts:
            content = "".join(part.get("text", part.get("placeholder", "")) for part in content)
        result.append({**message, "content": content})
    return result


def says_something(messages: Sequence[Mapping[str, Any]]) -> bool:
    """Whether any message has content or calls a tool."""
    return any(message["content"] or message.get("tool_calls") for message in messages)


def as_lines(messages: Sequence[dict[str, Any]]) -> str:
    """Messages as `role: content` lines, ending where the assistant's answer begins; for models
    without a chat template."""
    lines = []
    for message in messages:
        calls = [
            json.dumps(call["function"], ensure_ascii=False)
            for call in message.get("tool_calls", ())
        ]
        content = " ".join(piece for piece in (message["content"], *calls) if piece)
        lines.append(f"{message['role']}: {content}\n")
    return "".join(lines) + "assistant:"


def checked(text: str, what: str) -> str:
    """The text itself. Raises BadInput, starting with `what`, for text that cannot be encoded."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise BadInput(f"{what} holds half a surrogate pair, which is no text") from None
    return text


def _message(message: Any, what: str, images: ImageParts | None = None) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise BadInput(f"{what} must be an object with role and content")
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise BadInput(f"{what}.role must be a non-empty string")
    result = {
        key: value for key, value in message.items() if value is not None and key not in CALLS
    }
    result["role"] = checked(role, f"{what}.role")
    content: Any = message.get("content")
    if images is not None and has_images(content):
        result["content"] = _parts(content, f"{what}.content", images)
    else:
        result["content"] = text_content(content, f"{what}.content")
    calls, old = message.get("tool_calls"), message.get("function_call")
    if calls is not None:
        if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
            raise BadInput(f"{what}.tool_calls must be a list of objects")
        result["tool_calls"] = [
            _call(call, f"{what}.tool_calls[{i}].function") for i, call in enumerate(calls)
        ]
    elif old is not None:  # as it was before tools
        result["tool_calls"] = [_call({"type": "function", "function": old}, f"{what}.{CALLS[1]}")]
    try:
        written = json.dumps(result, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise BadInput(
            f"{what} must be made of JSON's values, not nested too deeply ({error})"
        ) from None
    checked(written, what)
    return result


def text_content(value: Any, what: str) -> str:
    """The text of a content: a string, null, or a list of parts, which follow each other.

    Args:
        value: the content.
        what: it is; begins the messages of errors.

    Raises:
        BadInput: a part is not text, or the value is something else.
    """
    if value is None:
        return ""
    if isinstance(value, list):
        for part in value:
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            if kind not in TEXT_PARTS or not isinstance(part, dict):
                raise BadInput(
                    f"{what} has parts that are not text ({kind!r:.40}): images, audio and files "
                    "are not supported, and no URL is fetched"
                )
        value = "".join(text_content(part.get("text"), what) for part in value)
    if not isinstance(value, str):
        raise BadInput(f"{what} must be a string, a list of parts or null")
    return checked(value, what)


def _parts(content: list[Any], what: str, images: ImageParts) -> list[dict[str, Any]]:
    """The parts of a content with images, whose sources are added to those known."""
    parts = []
    for part in content:
        if isinstance(part, dict) and part.get("type") in IMAGE_PARTS:
            images.sources.append(_image(part, what, images.trusted))
            parts.append({"type": "image", "placeholder": images.placeholder})
        else:
            parts.append({"type": "text", "text": text_content([part], what)})
    return parts


def _image(part: dict[str, Any], what: str, trusted: bool) -> tuple[str, Any]:
    """The source of an image."""
    kind = part["type"]
    if kind in ("image", "image_pil"):
        if not trusted or part.get(kind) is None:
            raise BadInput(f"{what}: an image is given as an image_url with a data: URI here")
        return "image", part[kind]
    url = part.get("image_url")
    url = url.get("url") if isinstance(url, dict) else url
    if not isinstance(url, str):
        raise BadInput(f"{what}: image_url must be a text, or an object with the text url")
    return "url", url


def _call(call: dict[str, Any], what: str) -> dict[str, Any]:
    """A tool call with its arguments as an object, where they are the JSON of one. A name that
    stands in the call itself, as some datasets have it, goes into its function.

    Raises:
        BadInput: starting with `what`: the function is no object with a name.
    """
    if "function" not in call and "name" in call:
        flat = {key: value for key, value in call.items() if key not in ("id", "type")}
        call = {key: value for key, value in call.items() if key not in flat} | {"function": flat}
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise BadInput(f"{what} must be an object with a name, which is a text")
    if not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = parse_json(function["arguments"], "arguments")
    except BadInput:
        return call
    return (
        {**call, "function": {**function, "arguments": arguments}}
        if isinstance(arguments, dict)
        else call
    )
