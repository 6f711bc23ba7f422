"""Reading traces of production traffic: when requests came and how long they were, never what they
said."""

from __future__ import annotations

import csv
import heapq
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

from minivllm.bench.workloads.from_file.trace_columns import TraceColumns, column_rows
from minivllm.bench.workloads.from_file.trace_row import (
    TraceRow,
    finite,
    hash_ids,
    length,
    seconds,
)
from minivllm.errors import BadInput
from minivllm.platform.times import moment
from minivllm.platform.untrusted import parse_json, read_text_lines

FORMATS = ("azure", "mooncake", "burstgpt", "bailian")
BLOCK_TOKENS = {"mooncake": 512, "bailian": 16}  # that a hash id stands for
AZURE = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
BURSTGPT = ("Timestamp", "Request tokens", "Response tokens")
LENGTHS = ("timestamp", "input_length", "output_length")  # of Mooncake and Bailian alike
BAILIAN = ("chat_id", "parent_chat_id")  # which Mooncake's traces have not
IMAGES = "NumImages"  # of Azure's trace with images
KIND_LENGTH = 20  # most characters of a request's type
ADVICE = "docs/guides/traces.md says where traces are published"


def read_trace(
    path: Path,
    format: str = "auto",
    select: Callable[[TraceRow], bool | None] | None = None,
    look_ahead: int | None = None,
    columns: Mapping[str, str] | None = None,
    time_unit: str | None = None,
) -> tuple[list[TraceRow], int]:
    """The requests of a trace, by time, and the number of those left out because they have no
    prompt or no answer: they failed when the trace was taken.

    Args:
        path: a CSV file as Azure (Splitwise, Patel et al. 2024) or BurstGPT (Wang et al. 2024)
            publish them, or JSON lines as Mooncake (Qin et al. 2024) or Alibaba's Bailian (Wang et
            al. 2025) do; or either with columns of any names.
        format: azure, mooncake, burstgpt, bailian, columns, or auto, which tells by the first line.
        select: shown each request in order of time, says whether it is wanted; None ends the
            reading. Only wanted ones are kept in memory. By default all are.
        look_ahead: lines that a request may be out of order by. Where it is given the file is read
            no further than it must be; None sorts all requests.
        columns: `workload.columns`, of the format columns.
        time_unit: `workload.time_unit`, of the same.

    Raises:
        BadInput: naming the file and, where one is to blame, the line number.
    """
    lines = _numbered(path)
    first_line = next(lines, (1, ""))
    has_format = format != "auto"
    if not has_format:
        named = bool(columns or time_unit)
        format = "columns" if named else _detect(path, *first_line)
    numbered = chain([first_line], lines)
    if format in ("azure", "burstgpt"):
        raw = _table(path, numbered, format)
    elif format == "columns":
        raw = column_rows(path, numbered, columns or {}, time_unit)
    else:
        raw = _jsonl(path, numbered, format, has_format)
    selected: list[TraceRow] = []
    first_s, failed = None, 0
    for row in _by_time(path, raw, look_ahead):
        if first_s is None:
            first_s = row.time_s
        if not row.input_tokens or not row.output_tokens:
            failed += 1
            continue
        row = replace(row, time_s=row.time_s - first_s)
        keep = True if select is None else select(row)
        if keep is None:
            break
        if keep:
            selected.append(row)
    if first_s is None:
        raise BadInput(f"workload.path={path} holds no requests")
    return selected, failed


def _by_time(path: Path, rows: Iterable[TraceRow], look_ahead: int | None) -> Iterator[TraceRow]:
    """Rows in order of time; requests of one moment keep their order."""
    if look_ahead is None:
        yield from sorted(rows, key=lambda row: row.time_s)
        return
    waiting: list[tuple[float, int, TraceRow]] = []
    last = -math.inf
    for row in rows:
        if row.time_s < last:
            raise BadInput(
                f"{path}:{row.line}: earlier than requests more than {look_ahead:,} lines above "
                "it; sort the trace by time"
            )
        heapq.heappush(waiting, (row.time_s, row.line, row))
        if len(waiting) > look_ahead:
            last, _, earliest = heapq.heappop(waiting)
            yield earliest
    while waiting:
        yield heapq.heappop(waiting)[2]


def _numbered(path: Path) -> Iterator[tuple[int, str]]:
    """Lines that are not blank, with their numbers from 1."""
    lines = read_text_lines(path, f"workload.path={path}", ADVICE)
    return ((number, line) for number, line in enumerate(lines, start=1) if line.strip())


def _detect(path: Path, number: int, head: str) -> str:
    if head.lstrip().startswith("{"):
        return _detect_json(path, number, head)
    names = [name.strip(' "') for name in head.split(",")]
    for format, columns in (("azure", AZURE), ("burstgpt", BURSTGPT)):
        if set(names).issuperset(columns):
            return format
    if TraceColumns.told(names):
        return "columns"
    raise BadInput(
        f"{path}:{number}: neither JSON lines nor a header with {', '.join(AZURE)} or "
        f"{', '.join(BURSTGPT)}; set workload.format to one of {', '.join(FORMATS)} if it is one "
        "of those, or name its columns with workload.columns"
    )


def _detect_json(path: Path, number: int, head: str) -> str:
    """Which of the formats in JSON lines. Their lengths have the same names, and their times differ
    by a factor of 1,000."""
    row = parse_json(head, f"{path}:{number}: the line")
    has_names = isinstance(row, dict) and set(row).issuperset(LENGTHS)
    if isinstance(row, dict) and not has_names and TraceColumns.told(list(row)):
        return "columns"
    row = _object(head, f"{path}:{number}")
    if any(key in row for key in BAILIAN):
        return "bailian"
    if "hash_ids" not in row:
        raise BadInput(
            f"{path}:{number}: whether its times are seconds or milliseconds cannot be told "
            f"without hash_ids (Mooncake) or {' and '.join(BAILIAN)} (Bailian); set "
            "workload.format=mooncake for milliseconds, or bailian for seconds"
        )
    return "mooncake"


def _table(path: Path, lines: Iterable[tuple[int, str]], format: str) -> Iterator[TraceRow]:
    """Rows of a CSV file with a header."""
    columns, when = (AZURE, moment) if format == "azure" else (BURSTGPT, seconds)
    number = 1

    def texts() -> Iterator[str]:
        nonlocal number
        for number, line in lines:  # noqa: B007  # the last line that the reader has taken
            yield line

    reader = csv.reader(texts())
    try:
        header = [name.strip() for name in next(reader, [])]
        missing = [name for name in columns if name not in header]
        if missing:
            raise BadInput(
                f"{path}:{number}: the header lacks {', '.join(missing)}, which "
                f"workload.format={format} needs"
            )
        for name in columns:
            if header.count(name) > 1:
                raise BadInput(
                    f"{path}:{number}: the header has {name} twice; leave one of the columns out"
                )
        places = [header.index(name) for name in columns]
        images = header.index(IMAGES) if IMAGES in header else len(header)
        for cells in reader:
            where = f"{path}:{number}"
            if len(cells) <= max(places):
                raise BadInput(
                    f"{where}: {len(cells)} of {len(header)} columns; is the file cut off?"
                )
            time, prompt, answer = (cells[place] for place in places)
            yield TraceRow(
                number,
                finite(when, time, f"{where}: {columns[0]}", "a time"),
                length(prompt, f"{where}: {columns[1]}"),
                length(answer, f"{where}: {columns[2]}"),
                kind="image" if cells[images : images + 1] not in ([], [""], ["0"]) else "text",
            )
    except csv.Error as error:
        raise BadInput(f"{path}:{number}: not valid CSV ({error})") from error


def _object(line: str, where: str) -> dict[str, Any]:
    """A line's JSON object, with the keys that every trace has."""
    row = parse_json(line, f"{where}: the line")
    missing = [key for key in LENGTHS if not isinstance(row, dict) or key not in row]
    if missing:
        raise BadInput(
            f"{where}: a JSON object with {', '.join(LENGTHS)} is needed; {missing[0]} is missing"
        )
    fields: dict[str, Any] = row
    return fields


def _jsonl(
    path: Path, lines: Iterable[tuple[int, str]], format: str, has_format: bool
) -> Iterator[TraceRow]:
    """Rows of a file of JSON objects; Mooncake's times are in milliseconds, Bailian's in seconds.
    Where the format was not told, fractions of milliseconds may be seconds, and are rejected."""
    milliseconds = format == "mooncake"
    unit = "a time in milliseconds" if milliseconds else "a time in seconds"
    for number, line in lines:
        where = f"{path}:{number}"
        row = _object(line, where)
        if milliseconds and any(key in row for key in BAILIAN):
            raise BadInput(
                f"{where}: {' and '.join(key for key in BAILIAN if key in row)} are columns of "
                "Bailian's traces, whose times are in seconds and not in milliseconds; set "
                "workload.format=bailian"
            )
        time = finite(seconds, row["timestamp"], f"{where}: timestamp", unit)
        if milliseconds and not has_format and not time.is_integer():
            raise BadInput(
                f"{where}: timestamp={row['timestamp']!r:.60} is a fraction, where Mooncake's "
                "times are whole milliseconds; set workload.format=mooncake if these are "
                "milliseconds, or bailian if they are seconds"
            )
        kind = row.get("type")
        yield TraceRow(
            number,
            time / 1000 if milliseconds else time,
            length(row["input_length"], f"{where}: input_length"),
            length(row["output_length"], f"{where}: output_length"),
            hash_ids(row.get("hash_ids"), where),
            BLOCK_TOKENS[format],
            kind=sys.intern(kind[:KIND_LENGTH]) if isinstance(kind, str) else "text",
            chat=None if milliseconds else row.get("chat_id"),
            parent=None if milliseconds else _parent(row.get("parent_chat_id")),
        )


def _parent(value: Any) -> object:
    """The turn before, of a conversation; None of a first one."""
    return None if value in (None, -1, "-1") else value
