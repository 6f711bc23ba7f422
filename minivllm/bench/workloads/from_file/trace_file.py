"""Reading traces of production traffic: when requests came and how long they were, never their
text."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from minivllm.bench.workloads.from_file import tables
from minivllm.bench.workloads.from_file.trace_format import FORMATS, TraceFormat, TraceRow
from minivllm.errors import BadInput

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
        path: a table (CSV, JSON lines, one JSON list or Parquet) as Azure (Splitwise, Patel et al.
            2024), BurstGPT (Wang et al. 2024), Mooncake (Qin et al. 2024) or Alibaba's Bailian
            (Wang et al. 2025) publish them, or with columns of any names.
        format: azure, mooncake, burstgpt, bailian, columns, or auto, which goes by the columns.
        select: shown each request in order of time, says whether it is wanted; None ends the
            reading. Only wanted ones are kept in memory. By default all are.
        look_ahead: lines that a request may be out of order by. Where it is given the file is read
            no further than it must be; None sorts all requests.
        columns: `workload.columns`, of the format columns.
        time_unit: `workload.time_unit`, of the same.

    Raises:
        BadInput: naming the file and, where one is to blame, the line or the row.
    """
    raw = _rows(path, format, columns or {}, time_unit)
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


def _rows(
    path: Path, format: str, given: Mapping[str, str], unit: str | None
) -> Iterator[TraceRow]:
    """The requests in the order of the file."""
    knob, is_known, columns = f"workload.path={path}", format != "auto", None
    kind = tables.detect(path, knob, ADVICE, otherwise="csv")
    for row in tables.read_rows(path, kind, knob, ADVICE, strict=False):
        values = row.value if isinstance(row.value, dict) else {}
        if columns is None:
            names = list(dict.fromkeys(row.names or values))
            if not is_known:
                format = "columns" if given or unit else _detect(names, row.names_at)
            columns = FORMATS.get(format) or TraceFormat.by_names(names, given, unit, row.names_at)
            tables.check_once(row.names, columns.needed, row.names_at)
        try:
            request = columns.row(row.number, values, row.where)
        except KeyError as error:
            raise BadInput(_missing(row, error.args[0], format, columns)) from None
        if format == "mooncake":
            _check_milliseconds(values, row.where, is_known)
        yield request


def _missing(row: tables.Row, name: str, format: str, columns: TraceFormat) -> str:
    """The message about a request that has no value in the column `name`."""
    if name in row.names:
        return tables.cut_off(row.where, len(row.value), len(set(row.names)))
    if format == "columns":
        return f"{row.where}: a value is missing; is the file cut off?"
    needed = ", ".join(columns.needed)
    return (
        f"{row.names_at}: a trace of format {format} needs the columns {needed}; {name} is missing"
    )


def _detect(names: Sequence[str], where: str) -> str:
    """The format of a trace with columns of these names."""
    for format, columns in FORMATS.items():
        if columns.fits(names):
            return format
    try:
        TraceFormat.by_names(names, {}, None, where)
    except BadInput:
        known = " or ".join(
            f"{', '.join(FORMATS[name].needed)} ({name})" for name in ("azure", "burstgpt")
        )
        raise BadInput(
            f"{where}: neither a header nor a JSON object with the columns of a known format, such "
            f"as {known}; name its columns with workload.columns"
        ) from None
    return "columns"


def _check_milliseconds(values: Mapping[str, Any], where: str, is_known: bool) -> None:
    """Raise BadInput for a request that is not Mooncake's: Bailian's traces have columns of the
    same names, and times in seconds. Where the format was not set, a fraction may be seconds."""
    if others := [key for key in FORMATS["bailian"].marks if key in values]:
        raise BadInput(
            f"{where}: {' and '.join(others)} are columns of Bailian's traces, whose times are in "
            "seconds and not in milliseconds; set workload.format=bailian"
        )
    time = values["timestamp"]
    if not is_known and not float(time).is_integer():
        raise BadInput(
            f"{where}: timestamp={time!r:.60} is a fraction, where Mooncake's times are whole "
            "milliseconds; set workload.format=mooncake if these are milliseconds, or bailian if "
            "they are seconds"
        )
