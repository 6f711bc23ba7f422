"""Reading a file of prompts: JSON lines, or the conversations that ShareGPT's users shared."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from minivllm.bench.text_file import not_text, read_bytes
from minivllm.errors import BadInput

FORMATS = ("auto", "jsonl", "sharegpt")
PROMPT_KEYS = ("prompt", "prompt_token_ids", "messages")
LENGTH_KEYS = ("max_tokens", "output_len")
USERS, ASSISTANTS = ("human", "user"), ("gpt", "assistant", "chatgpt", "bing", "bard")


@dataclass(frozen=True)
class PromptLine:
    """One request: text or token ids, never both; `where` is the file and line number for messages.

    `answer` is what somebody was answered, as ShareGPT has it: the output shall be as long.
    """

    where: str
    text: str | None
    token_ids: tuple[int, ...] | None
    max_tokens: int | None
    answer: str | None = None


def read_prompt_file(path: Path, format: str = "auto") -> Iterator[PromptLine]:
    """Parse a file of prompts.

    Args:
        path: the file.
        format: jsonl (JSON objects, one a line; blank lines are skipped), sharegpt (one JSON list of
            conversations, see `parse_conversation`), or auto, which tells by the first character.

    Raises:
        BadInput: naming the file and, where one is to blame, the line number or the conversation's.
    """
    raw = read_bytes("workload.path", path)
    if format == "sharegpt" or (format == "auto" and raw.lstrip()[:1] == b"["):
        yield from _conversations(raw, path)
        return
    empty = True
    for number, line in enumerate(raw.split(b"\n"), start=1):
        if line.strip():
            empty = False
            yield parse_line(line, f"{path}:{number}")
    if empty:
        raise BadInput(f"workload.path={path} holds no prompts")


def _conversations(raw: bytes, path: Path) -> Iterator[PromptLine]:
    try:
        talks = json.loads(raw.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise not_text(path, error) from None
    except json.JSONDecodeError as error:
        raise BadInput(f"{path}:{error.lineno}: not valid JSON ({error.msg})") from None
    except (ValueError, RecursionError) as error:
        raise BadInput(f"{path}: not valid JSON ({error})") from None
    if not isinstance(talks, list) or not talks:
        raise BadInput(f"{path}: a ShareGPT file is one JSON list of conversations, at least one")
    for number, talk in enumerate(talks, start=1):
        if (line := parse_conversation(talk, f"{path}: conversation {number}")) is not None:
            yield line


def parse_conversation(talk: Any, where: str) -> PromptLine | None:
    """One conversation of a ShareGPT file: the first turn of its user, and what that was answered.

    Returns:
        The request; None where no answer follows, or one of them is blank.

    Raises:
        BadInput: starting with `where`.
    """
    turns = talk.get("conversations") if isinstance(talk, dict) else None
    if not isinstance(turns, list):
        raise BadInput(f'{where}: must be a JSON object with "conversations", a list')
    said = []
    for i, turn in enumerate(turns):
        if not isinstance(turn, dict) or not all(isinstance(turn.get(key), str) for key in ("from", "value")):
            raise BadInput(
                f'{where}: conversations[{i}] must be an object with "from" and "value", both text'
            )
        said.append((turn["from"], turn["value"]))
    first = next((i for i, (who, _) in enumerate(said) if who in USERS), len(said))
    if first + 1 >= len(said) or said[first + 1][0] not in ASSISTANTS:
        return None
    question, answer = said[first][1], said[first + 1][1]
    if not question.strip() or not answer.strip():
        return None
    return PromptLine(
        where, _text(question, f"{where}: its question"), None, None, _text(answer, f"{where}: its answer")
    )


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
