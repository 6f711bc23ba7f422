"""Percentiles of latencies that were requested: their columns, their figures, and where there are
too few samples."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

from minivllm.analysis.cell import Cell
from minivllm.analysis.format import listing
from minivllm.analysis.rows import Row, frame, number, status_of
from minivllm.bench.metrics.latency import fewest, token_gaps
from minivllm.bench.records.storage import REQUESTS
from minivllm.report.tables import COLUMNS, Column

LATENCIES = {"ttft_ms": "TTFT", "itl_ms": "ITL", "tpot_ms": "TPOT", "e2e_ms": "E2E"}
_KEY = re.compile(r"metrics\.(\w+)\.p([\d.]+)")


def columns(requested: Sequence[float]) -> tuple[Column, ...]:
    """The table's columns with these percentiles of every latency in place of the usual ones; none
    requested: the usual."""
    if not requested:
        return COLUMNS
    throughput, *others = COLUMNS
    chosen = [
        Column(_key(metric, p), f"{title} p{p:g}", terminal=True)
        for metric, title in LATENCIES.items()
        for p in requested
    ]
    return (throughput, *chosen, *(column for column in others if not _KEY.fullmatch(column.key)))


def _key(metric: str, p: float) -> str:
    return f"metrics.{metric}.p{p:g}"


def complete(rows: Iterable[Row], requested: Sequence[float]) -> None:
    """Add to rows those percentiles that their records lack, from the table of requests beside
    each.

    One that takes more samples than there are stays away, as does one whose table is missing, torn
    or another's.
    """
    for row in rows:
        if status_of(row) != "ok":
            continue
        lacking = {
            metric: [
                p
                for p in requested
                if row.get(_key(metric, p)) is None and _samples(row, metric) >= fewest(p)
            ]
            for metric in LATENCIES
        }
        if (
            any(lacking.values())
            and (table := frame(row, REQUESTS, [*LATENCIES, "token_times_s"])) is not None
        ):
            for metric, missing in lacking.items():
                row.update(_found(table, metric, missing))


def _samples(row: Row, metric: str) -> float:
    return number(row.get(f"metrics.{metric}.n")) or 0


def _found(table: Any, metric: str, percentiles: Sequence[float]) -> dict[str, float]:
    """The percentiles of a latency over the requests of a table, linear between ranks as those of a
    record."""
    import numpy as np

    if not percentiles or "ttft_ms" not in table:
        return {}
    done = table[table["ttft_ms"].notna()]
    if metric in table:
        values = done[metric].dropna().to_numpy(dtype=float)
    elif metric == "itl_ms" and "token_times_s" in table:
        times = (np.asarray(each, dtype=float).tolist() for each in done["token_times_s"])
        values = np.array([gap for each in times for gap in token_gaps(each)], dtype=float)
    else:
        return {}
    return {
        _key(metric, p): float(np.percentile(values, p))
        for p in percentiles
        if len(values) >= fewest(p)
    }


def too_few(cells: Sequence[Cell], requested: Sequence[Column]) -> list[str]:
    """A sentence for each percentile that some cell lacks, on how many samples it takes and how
    many there were."""
    short_columns: dict[tuple[str, int, int], list[str]] = {}
    for column in requested:
        if (match := _KEY.fullmatch(column.key)) is None:
            continue
        metric, least = match[1], fewest(float(match[2]))
        counts = [
            max(_samples(row, metric) for row in cell.timed)
            for cell in cells
            if cell.ok and cell.mean(column.key) is None
        ]
        if short := [int(n) for n in counts if n < least]:
            noun = "gaps" if metric == "itl_ms" else "requests"
            short_columns.setdefault((noun, least, max(short)), []).append(column.title)
    return [
        f"{listing(titles)}: at least {least:,} {noun} a block are needed, there were {n:,}."
        for (noun, least, n), titles in short_columns.items()
    ]


def why_missing(cell: Cell, column: Column) -> str:
    """Why a cell lacks a percentile; empty for other columns."""
    if (match := _KEY.fullmatch(column.key)) is None:
        return ""
    least, n = fewest(float(match[2])), cell.first(f"metrics.{match[1]}.n")
    if (number(n) or 0) >= least:
        return "the table of requests is missing or damaged"
    return f"p{match[2]} needs at least {least} samples; here {int(n or 0)}"
