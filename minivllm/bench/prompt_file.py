"""Reading a JSONL file of prompts."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from minivllm.errors import BadInput

PROMPT_KEYS = ("prompt", "prompt_token_ids", "messages")
LENGTH_KEYS = ("max_tokens", "output_len")


@dataclass(frozen=True)
class PromptLine:
    """One line's request: text or token ids, never both; `where` is the file and line number for messages."""

    where: str
    text: str | None
    token_ids: tuple[int, ...] | None
    max_tokens: int | None


def read_prompt_file(path: Path, limit: int | None = None) -> list[PromptLine]:
    """Parse a file of JSON objects, one a line, up to `limit` of them; blank lines are skipped.

    Raises:
        BadInput: naming the file and, where one is to blame, the line number.
    """
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        raise BadInput(f"workload.path={path}: there is no such file") from None
    except OSError as error:
        raise BadInput(f"workload.path={path} cannot be read: {error.strerror or error}") from error
    lines: list[PromptLine] = []
    for number, line in enumerate(raw.removeprefix(b"\xef\xbb\xbf").split(b"\n"), start=1):
        if limit is not None and len(lines) == limit:
            break
        if line.strip():
            lines.append(parse_line(line, f"{path}:{number}"))
    if not lines:
        raise BadInput(f"workload.path={path} holds no prompts")
    return lines


def parse_line(line: bytes, where: str) -> PromptLine:
    """One line of the file.

    Raises:
        BadInput: starting with `where`.
    """
    try:
        row = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError:
        raise BadInput(f"{where}: not UTF-8") from None
    except (ValueError, RecursionError) as error:
        raise BadInput(f"{where}: not valid JSON ({error}); each line must be one JSON object") from None
    if not isinstance(row, dict):
        raise BadInput(f'{where}: a line must be a JSON object such as {{"prompt": "..."}}')
    present = [key for key in PROMPT_KEYS if key in row]
    if len(present) != 1:
        found = f"it has {' and '.join(present)}" if present else "it has none of them"
        raise BadInput(f"{where}: a line must have exactly one of {', '.join(PROMPT_KEYS)}; {found}")
    text, token_ids = None, None
    if present[0] == "prompt":
        text = _text(row["prompt"], f"{where}: prompt")
    elif present[0] == "messages":
        text = _join_messages(row["messages"], where)
    else:
        token_ids = _token_ids(row["prompt_token_ids"], where)
    return PromptLine(where, text, token_ids, _max_tokens(row, where))


def _text(value: Any, what: str) -> str:
    if not isinstance(value, str) or not value:
        raise BadInput(f"{what} must be a non-empty string")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        raise BadInput(f"{what} holds half a surrogate pair, which is no text") from None
    return value


def _token_ids(value: Any, where: str) -> tuple[int, ...]:
    if (
        not isinstance(value, list)
        or not value
        or any(type(token) is not int or token < 0 for token in value)
    ):
        raise BadInput(f"{where}: prompt_token_ids must be a non-empty list of whole numbers, 0 or more")
    return tuple(value)


def _join_messages(value: Any, where: str) -> str:
    """OpenAI messages as `role: content` lines, ending where the assistant's answer begins."""
    if not isinstance(value, list) or not value:
        raise BadInput(f"{where}: messages must be a non-empty list of objects with role and content")
    lines = []
    for i, message in enumerate(value):
        what = f"{where}: messages[{i}]"
        if not isinstance(message, dict):
            raise BadInput(f"{what} must be an object with role and content")
        role, content = message.get("role"), message.get("content")
        if isinstance(content, list):
            if not all(isinstance(part, dict) and part.get("type") == "text" for part in content):
                raise BadInput(f"{what}.content has parts that are not text")
            content = "".join(_text(part.get("text"), f"{what}.content") for part in content)
        lines.append(f"{_text(role, f'{what}.role')}: {_text(content, f'{what}.content')}\n")
    return "".join(lines) + "assistant:"


def _max_tokens(row: dict[str, Any], where: str) -> int | None:
    given = [key for key in LENGTH_KEYS if row.get(key) is not None]
    if len(given) == 2:
        raise BadInput(f"{where}: max_tokens and output_len mean the same; give one")
    if not given:
        return None
    value = row[given[0]]
    if type(value) is not int or value < 1:
        raise BadInput(f"{where}: {given[0]}={value!r} must be a whole number of at least 1")
    return value
