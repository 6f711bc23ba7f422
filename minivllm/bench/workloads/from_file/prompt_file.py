"""Reading a file of prompts, an entry at a time: JSON lines, one JSON list, a CSV or Parquet file,
or a saved dataset."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from minivllm.bench.workloads.from_file import tables
from minivllm.bench.workloads.from_file.conversation import (
    CONVERSATION_KEYS,
    parse_conversation,
)
from minivllm.bench.workloads.from_file.prompt_line import PromptLine
from minivllm.bench.workloads.from_file.prompt_row import PROMPT_KEYS, mapped, parse_row
from minivllm.bench.workloads.tally import Tally
from minivllm.errors import BadInput
from minivllm.platform import untrusted
from minivllm.platform.unpacking import UNREADABLE, unpacked, unreadable

NO_LIST = "a ShareGPT file is one JSON list of conversations, at least one"


def read_prompt_file(
    path: Path,
    format: str = "auto",
    tally: Tally | None = None,
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
    tally = Tally() if tally is None else tally
    knob = f"workload.path={path}"
    format = detect(path, knob) if format == "auto" else format
    if split is not None and format != "dataset":
        raise BadInput(f"workload.split={split}: {knob} is no saved dataset, which has splits")
    for entry in _entries(path, knob, format, tally, columns or {}, split):
        tally.read += 1
        if entry is not None:
            yield entry
    if not tally.read:
        raise BadInput(
            f"{path}: {NO_LIST}"
            if format in ("sharegpt", "list")
            else f"workload.path={path} holds no prompts"
        )


def detect(path: Path, knob: str) -> str:
    """Which format a file has: dataset, csv, parquet, list (one JSON list) or jsonl."""
    if path.is_dir():
        return "dataset"
    with unpacked(untrusted.open_file(path, knob)) as file:
        try:
            begin = file.read(untrusted.CHUNK)
        except UNREADABLE as error:
            raise BadInput(f"{knob} cannot be read: {unreadable(error)}") from None
    if begin.startswith(tables.PARQUET):
        return "parquet"
    if path.name.lower().removesuffix(".gz").endswith(".csv"):
        return "csv"
    first = begin.removeprefix(untrusted.BYTE_ORDER_MARK).lstrip()[:1]
    return "list" if first == b"[" else "jsonl"


def _entries(
    path: Path,
    knob: str,
    format: str,
    tally: Tally,
    columns: Mapping[str, str],
    split: str | None,
) -> Iterator[PromptLine | None]:
    """The entries of a file of a known format; None for one that is left out."""
    if format == "sharegpt" and detect(path, knob) != "list":
        raise BadInput(f"{path}: {NO_LIST}")
    if format in ("sharegpt", "list"):
        for number, value in enumerate(untrusted.read_list(path, knob), start=1):
            value = mapped(value, columns, f"{path}: entry {number}")
            if format == "sharegpt" or _is_conversation(value) or not isinstance(value, dict):
                yield parse_conversation(value, f"{path}: conversation {number}", tally)
            else:
                yield parse_row(value, f"{path}: entry {number}", tally)
    elif format == "jsonl":
        for number, line in enumerate(untrusted.read_lines(path, knob), start=1):
            line = line.removeprefix(untrusted.BYTE_ORDER_MARK) if number == 1 else line
            if line.strip():
                yield parse_line(line, f"{path}:{number}", tally, columns)
    else:
        rows = {
            "csv": lambda: tables.csv_rows(path, knob, frozenset(_texts(columns))),
            "parquet": lambda: tables.parquet_rows(path, knob),
            "dataset": lambda: tables.dataset_rows(path, knob, split),
        }[format]()
        for where, row in rows:
            yield _parse(mapped(row, columns, where), where, tally)


def _texts(columns: Mapping[str, str]) -> Iterator[str]:
    """Columns of texts, whatever their cells look like."""
    yield from (name for known, name in columns.items() if known == "prompt")
    if "prompt" not in columns:
        yield "prompt"


def parse_line(
    line: bytes, where: str, tally: Tally | None = None, columns: Mapping[str, str] | None = None
) -> PromptLine | None:
    """One line of JSON; None for a conversation that is left out, see `parse_conversation`.

    Raises:
        BadInput: starting with `where`.
    """
    row = untrusted.parse_json(line, f"{where}: the line", "each line must be one JSON object")
    return _parse(mapped(row, columns or {}, where), where, Tally() if tally is None else tally)


def _parse(row: Any, where: str, tally: Tally) -> PromptLine | None:
    if _is_conversation(row):
        return parse_conversation(row, where, tally)
    return parse_row(row, where, tally)


def _is_conversation(row: Any) -> bool:
    if not isinstance(row, dict) or any(key in row for key in (*PROMPT_KEYS, "body")):
        return False
    return any(key in row for key in CONVERSATION_KEYS)
