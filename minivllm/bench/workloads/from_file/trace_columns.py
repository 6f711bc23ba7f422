"""Traces of no named format: tables and JSON lines whose columns tell a time and two lengths."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from minivllm.bench.workloads.from_file import row_lengths
from minivllm.bench.workloads.from_file.prompt_line import short_name
from minivllm.bench.workloads.from_file.trace_row import (
    TraceRow,
    finite,
    hash_ids,
    length,
    seconds,
)
from minivllm.errors import BadInput
from minivllm.platform.times import moment
from minivllm.platform.untrusted import parse_json

# Usual names of the time, as `row_lengths.plain` writes them.
TIMES = frozenset(
    (
        *("timestamp", "time", "ts", "arrivaltime", "arrivedat", "arrival", "arrivaltimestamp"),
        *("starttime", "requesttime", "requesttimestamp", "sendtime", "senttime", "createdat"),
    )
)
NAMES = {"timestamp": TIMES, "input_len": row_lengths.INPUT, "output_len": row_lengths.OUTPUT}
HASHES = "hash_ids"
UNITS = {"s": 1, "ms": 1000, "us": 10**6, "ns": 10**9}  # in a second


@dataclass(frozen=True)
class TraceColumns:
    """Which columns of a trace are the time of a request and its lengths."""

    timestamp: str
    input_len: str
    output_len: str
    hash_ids: str

    @classmethod
    def of(cls, names: Sequence[str], given: Mapping[str, str], where: str) -> TraceColumns:
        """The columns by their usual names, or by those given.

        Args:
            names: all columns.
            given: `workload.columns`.
            where: file and line, which begin the message.

        Raises:
            BadInput: a column is missing, or several may be meant.
        """
        found = {HASHES: given.get(HASHES, HASHES)}
        there = ", ".join(map(short_name, names[:12])) or "none"
        for known, usual in NAMES.items():
            fitting = [name for name in names if row_lengths.plain(name) in usual]
            if known in given:
                fitting = [name for name in names if name == given[known]]
                if not fitting:
                    raise BadInput(
                        f"{where}: there is no column {short_name(given[known])}, which "
                        f"workload.columns names as the {known}; the columns are {there}"
                    )
            if len(fitting) != 1:
                what = f"{' and '.join(map(short_name, fitting))} may be it" if fitting else "none"
                raise BadInput(
                    f"{where}: which column is the {known} of a request? {what} of the columns "
                    f"{there}; name it with workload.columns={{{known}: NAME}}"
                )
            found[known] = fitting[0]
        return cls(**found)

    @classmethod
    def told(cls, names: Sequence[str]) -> bool:
        """Whether usual names tell the columns."""
        try:
            cls.of(names, {}, "")
        except BadInput:
            return False
        return True


def column_rows(
    path: Path, lines: Iterable[tuple[int, str]], given: Mapping[str, str], unit: str | None
) -> Iterator[TraceRow]:
    """Requests of a CSV file with a header, or of JSON objects, one a line.

    Args:
        path: the file.
        lines: with their numbers.
        given: `workload.columns`.
        unit: `workload.time_unit`; None takes dates alone.

    Raises:
        BadInput: naming the file and the line.
    """
    columns: TraceColumns | None = None
    for line, row in _rows(path, lines):
        where = f"{path}:{line}"
        columns = columns or TraceColumns.of(list(row), given, where)
        values = [row.get(name) for name in (columns.timestamp, columns.input_len)]
        values.append(row.get(columns.output_len))
        if None in values:
            raise BadInput(f"{where}: a value is missing; is the file cut off?")
        when, prompt, answer = values
        yield TraceRow(
            line,
            _time(when, unit, f"{where}: {short_name(columns.timestamp)}"),
            length(prompt, f"{where}: {short_name(columns.input_len)}"),
            length(answer, f"{where}: {short_name(columns.output_len)}"),
            hash_ids(row.get(columns.hash_ids), where),
        )


def _rows(path: Path, lines: Iterable[tuple[int, str]]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Rows with the number of their last line."""
    lines = iter(lines)
    first_number, first = next(lines, (1, ""))
    if first.lstrip().startswith("{"):
        for count, line in ((first_number, first), *lines):
            row = parse_json(line, f"{path}:{count}: the line")
            if not isinstance(row, dict):
                raise BadInput(f"{path}:{count}: the line is no JSON object, as the first one is")
            yield count, row
        return
    count = first_number

    def texts() -> Iterator[str]:
        nonlocal count
        yield first
        for count, line in lines:  # noqa: B007  # the last line that the reader has taken
            yield line

    try:
        for row in csv.DictReader(texts(), skipinitialspace=True):
            yield count, {name: cell for name, cell in row.items() if name is not None}
    except csv.Error as error:
        raise BadInput(f"{path}:{count}: not valid CSV ({error})") from None


def _time(value: Any, unit: str | None, what: str) -> float:
    if unit is not None:
        return finite(seconds, value, what, f"a time in {unit}") / UNITS[unit]
    if isinstance(value, str) and not _is_number(value):
        return finite(moment, value, what, "a date, or a number")
    raise BadInput(
        f"{what}={value!r:.60}: the unit of times that are no dates cannot be told: set "
        f"workload.time_unit to one of {', '.join(UNITS)}"
    )


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
