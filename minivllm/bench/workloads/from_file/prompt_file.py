"""Reading a file of prompts, an entry at a time: JSON lines, one JSON list, a CSV or Parquet file,
or a saved dataset."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from minivllm.bench.workloads.from_file import tables
from minivllm.bench.workloads.from_file.prompt_row import (
    PROMPT_KEYS,
    TEXT_NAMES,
    PromptLine,
    mapped,
    parse_row,
)
from minivllm.bench.workloads.from_file.row_lengths import plain
from minivllm.bench.workloads.from_file.tables import Tally, short_name
from minivllm.errors import BadInput
from minivllm.models.load import messages as openai

USERS = frozenset(("human", "user", "prompter", "question"))
ASSISTANTS = frozenset(
    ("gpt", "assistant", "chatgpt", "bing", "bard", "model", "ai", "bot", "claude", "answer")
)
OTHERS = frozenset(("system", "developer", "tool", "function", "function_call", "observation"))
CONVERSATION_KEYS = ("conversations", "conversation")
NO_QUESTION = "conversations were left out, no user asks anything in them"
NO_ANSWER = "conversations were left out, no answer follows their first question"
BLANK_TURNS = "turns of conversations were blank and passed over"
JOINED_TURNS = "questions are of several turns of the user in a row, joined by line breaks"
LATER_QUESTIONS = "questions come after the first answer of their conversation and were not sent"


def parse_conversation(
    conversation: Any, where: str, tally: Tally | None = None
) -> PromptLine | None:
    """One conversation of a ShareGPT file: the first question of its user, and what that was
    answered.

    Turns have `from` and `value`, or `role` and `content`; speakers are known in any case of
    letters. Blank turns are passed over. Where the user speaks several times before an answer, all
    of it is the question. Later questions are counted.

    Returns:
        The request; None without a question or an answer, which `tally` counts.

    Raises:
        BadInput: starting with `where`.
    """
    tally = Tally() if tally is None else tally
    turns = None
    if isinstance(conversation, dict):
        turns = next((conversation[key] for key in CONVERSATION_KEYS if key in conversation), None)
    if not isinstance(turns, list):
        raise BadInput(f'{where}: must be a JSON object with "conversations", a list')
    parsed = [_turn(turn, f"{where}: conversations[{i}]", tally) for i, turn in enumerate(turns)]
    # An answer that is blank stays: the question has none.
    spoken = [(who, words) for who, words in parsed if words.strip() or who == "assistant"]
    begin = next((i for i, (who, _) in enumerate(spoken) if who == "user"), None)
    if begin is None:
        tally.left_out[NO_QUESTION] += 1
        return None
    end = next((i for i in range(begin, len(spoken)) if spoken[i][0] != "user"), len(spoken))
    who, answer = spoken[end] if end < len(spoken) else ("", "")
    if who != "assistant" or not answer.strip():
        tally.left_out[NO_ANSWER] += 1
        return None
    tally.unused[BLANK_TURNS] += len(parsed) - len(spoken)
    tally.unused[JOINED_TURNS] += end - begin > 1
    tally.unused[LATER_QUESTIONS] += sum(who == "user" for who, _ in spoken[end:])
    question = "\n".join(words for _, words in spoken[begin:end])
    return PromptLine(where, question, None, None, answer)


def _turn(turn: Any, where: str, tally: Tally) -> tuple[str, str]:
    """Who speaks (user, assistant, or another), and what; blank where it is null."""
    row = turn if isinstance(turn, dict) else {}
    speaker = next((row[key] for key in ("from", "role") if isinstance(row.get(key), str)), None)
    words = next((row[key] for key in ("value", "content") if row.get(key) is not None), None)
    if words is None and ("value" in row or "content" in row):
        words = ""
    if speaker is None or not isinstance(words, str):
        raise BadInput(f'{where} must be an object with "from" and "value", both text')
    name = speaker.strip().casefold()
    openai.checked(words, f"{where}: its text")
    if name in USERS or name in ASSISTANTS:
        return "user" if name in USERS else "assistant", words
    if name not in OTHERS:
        tally.unused[
            f"turns are of {short_name(speaker)!r}, who is known neither as user nor as assistant"
        ] += 1
    return "other", words


NO_LIST = "a ShareGPT file is one JSON list of conversations, at least one"


def read_prompt_file(
    path: Path,
    format: str = "auto",
    tally: tables.Tally | None = None,
    columns: Mapping[str, str] | None = None,
    split: str | None = None,
) -> Iterator[PromptLine]:
    """Parse a file of prompts, an entry at a time; one that gzip has packed is unpacked.

    Args:
        path: the file, or the folder of a saved dataset.
        format: jsonl (JSON objects, one a line; blank lines are skipped), sharegpt (one JSON list
            of conversations, see `parse_conversation`), csv, parquet, dataset, or auto, which tells
            by the ending and the first characters: a list may hold whatever a line may.
        tally: counts the entries and what is not taken from them.
        columns: `workload.columns`: the file's own names of what is known here by others.
        split: `workload.split`, of a saved dataset.

    Raises:
        BadInput: naming the file and, where one is to blame, the line number or the conversation's.
    """
    tally, columns = tally or tables.Tally(), columns or {}
    knob = f"workload.path={path}"
    kind = format
    if format == "auto":
        kind = "dataset" if path.is_dir() else tables.detect(path, knob)
    elif format == "sharegpt" and (kind := tables.detect(path, knob)) != "list":
        raise BadInput(f"{path}: {NO_LIST}")
    if split is not None and kind != "dataset":
        raise BadInput(f"workload.split={split}: {knob} is no saved dataset, which has splits")
    for row in tables.read_rows(path, kind, knob, split=split):
        tally.read += 1
        value, where = row.value, row.where
        if kind == "csv":
            value = _with_json_cells(value, columns)
        value = mapped(value, columns, where)
        if kind == "list" and (
            format == "sharegpt" or not isinstance(value, dict) or _is_conversation(value)
        ):
            entry = parse_conversation(value, f"{path}: conversation {row.number}", tally)
        else:
            entry = parse_entry(value, where, tally)
        if entry is not None:
            yield entry
    if not tally.read:
        raise BadInput(f"{path}: {NO_LIST}" if kind == "list" else f"{knob} holds no prompts")


def parse_entry(row: Any, where: str, tally: tables.Tally | None = None) -> PromptLine | None:
    """One entry of a file; None for a conversation that is left out, see `parse_conversation`.

    Raises:
        BadInput: starting with `where`.
    """
    tally = tally or tables.Tally()
    if _is_conversation(row):
        return parse_conversation(row, where, tally)
    return parse_row(row, where, tally)


def _is_conversation(row: Any) -> bool:
    if not isinstance(row, dict) or any(key in row for key in (*PROMPT_KEYS, "body")):
        return False
    return any(key in row for key in CONVERSATION_KEYS)


def _with_json_cells(row: Mapping[str, Any], columns: Mapping[str, str]) -> dict[str, Any]:
    """A row of a CSV file, whose cells may hold JSON: a number, true, a list; an empty one is null.
    Texts in columns of texts are left as they are."""
    text = columns.get("prompt", "prompt")
    return {
        name: cell or None if name == text or plain(name) in TEXT_NAMES else _json_cell(cell)
        for name, cell in row.items()
    }


def _json_cell(cell: str) -> Any:
    if not cell or cell[0] not in "-0123456789[{tfn":
        return cell or None
    try:
        return json.loads(cell)
    except (ValueError, RecursionError):
        return cell
