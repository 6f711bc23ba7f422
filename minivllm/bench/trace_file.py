"""Reading traces of production traffic: when requests came and how long they were, never what they said."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from minivllm.bench.text_file import read_lines
from minivllm.errors import BadInput

FORMATS = ("azure", "mooncake", "burstgpt")
AZURE = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
BURSTGPT = ("Timestamp", "Request tokens", "Response tokens")
MOONCAKE = ("timestamp", "input_length", "output_length")
LARGEST_ID = 2**50  # of a block, so that the positions of its tokens are machine words
LONGEST = 2**31 - 1


@dataclass(frozen=True, slots=True)
class TraceRow:
    """One request of a trace. `line` is its line number, from 1."""

    line: int
    time_s: float  # after the trace's first request
    input_tokens: int
    output_tokens: int
    hash_ids: tuple[int, ...] = ()  # of the prompt's blocks, where the trace has them


def read_trace(path: Path, format: str = "auto") -> tuple[list[TraceRow], int]:
    """The requests of a trace, by time, and the number of those left out because they have no prompt or no
    answer: they failed when the trace was taken.

    Args:
        path: a CSV file as Azure (Splitwise, Patel et al. 2024) or BurstGPT (Wang et al. 2024) publish them,
            or JSON lines as Mooncake (Qin et al. 2024) does.
        format: azure, mooncake, burstgpt, or auto, which tells by the first line.

    Raises:
        BadInput: naming the file and, where one is to blame, the line number.
    """
    lines = read_lines("workload.path", path, "docs/guides/traces.md says where traces are published")
    if format == "auto":
        format = _detect(path, lines)
    raw = _jsonl(path, lines) if format == "mooncake" else _table(path, lines, format)
    rows = sorted(raw, key=lambda row: row.time_s)  # stable: requests of one moment keep their order
    if not rows:
        raise BadInput(f"workload.path={path} holds no requests")
    first = rows[0].time_s
    answered = [
        TraceRow(row.line, row.time_s - first, row.input_tokens, row.output_tokens, row.hash_ids)
        for row in rows
        if row.input_tokens and row.output_tokens
    ]
    return answered, len(rows) - len(answered)


def _detect(path: Path, lines: list[str]) -> str:
    head = next((line for line in lines if line.strip()), "")
    if head.lstrip().startswith("{"):
        return "mooncake"
    names = {name.strip(' "') for name in head.split(",")}
    for format, columns in (("azure", AZURE), ("burstgpt", BURSTGPT)):
        if names.issuperset(columns):
            return format
    raise BadInput(
        f"{path}:1: neither JSON lines nor a header with {', '.join(AZURE)} or {', '.join(BURSTGPT)}; "
        f"set workload.format to one of {', '.join(FORMATS)} if it is one of those"
    )


def _table(path: Path, lines: Iterable[str], format: str) -> Iterator[TraceRow]:
    """Rows of a CSV file with a header."""
    columns, when = (AZURE, _moment) if format == "azure" else (BURSTGPT, _seconds)
    reader = csv.reader(lines)
    header = [name.strip() for name in next(reader, [])]
    missing = [name for name in columns if name not in header]
    if missing:
        raise BadInput(
            f"{path}:1: the header lacks {', '.join(missing)}, which workload.format={format} needs"
        )
    places = [header.index(name) for name in columns]
    try:
        for cells in reader:
            if not cells:
                continue
            where = f"{path}:{reader.line_num}"
            if len(cells) <= max(places):
                raise BadInput(f"{where}: {len(cells)} of {len(header)} columns; is the file cut off?")
            time, prompt, answer = (cells[place] for place in places)
            yield TraceRow(
                reader.line_num,
                _read(when, time, f"{where}: {columns[0]}", "a time"),
                _length(prompt, f"{where}: {columns[1]}"),
                _length(answer, f"{where}: {columns[2]}"),
            )
    except csv.Error as error:
        raise BadInput(f"{path}:{reader.line_num}: not valid CSV ({error})") from error


def _jsonl(path: Path, lines: Iterable[str]) -> Iterator[TraceRow]:
    """Rows of a file of JSON objects; times in milliseconds."""
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise BadInput(f"{where}: not valid JSON ({error})") from None
        missing = [key for key in MOONCAKE if not isinstance(row, dict) or key not in row]
        if missing:
            raise BadInput(
                f"{where}: a JSON object with {', '.join(MOONCAKE)} is needed; {missing[0]} is missing"
            )
        yield TraceRow(
            number,
            _read(_seconds, row["timestamp"], f"{where}: timestamp", "a time in milliseconds") / 1000,
            _length(row["input_length"], f"{where}: input_length"),
            _length(row["output_length"], f"{where}: output_length"),
            _hash_ids(row.get("hash_ids"), where),
        )


def _hash_ids(value: Any, where: str) -> tuple[int, ...]:
    ids = [] if value is None else value
    if not isinstance(ids, list) or any(type(i) is not int or not 0 <= i < LARGEST_ID for i in ids):
        raise BadInput(f"{where}: hash_ids must be a list of whole numbers in [0, 2^50)")
    return tuple(ids)


def _read(parse: Callable[[Any], float], value: Any, what: str, kind: str) -> float:
    try:
        number = parse(value)
    except (ValueError, TypeError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise BadInput(f"{what}={value!r:.60} is not {kind}")
    return number


def _moment(text: str) -> float:
    moment = datetime.fromisoformat(text.strip())
    # In this machine's time zone an hour might occur twice, or never.
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


def _seconds(value: Any) -> float:
    if isinstance(value, bool):
        raise ValueError("true is no time")
    return float(value)


def _length(value: Any, what: str) -> int:
    number = _read(_seconds, value, what, "a number of tokens")
    if number != int(number) or not 0 <= number <= LONGEST:
        raise BadInput(f"{what}={value!r:.60} is not a number of tokens")
    return int(number)
