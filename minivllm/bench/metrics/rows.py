"""Rows of a record's tables, and what those of steps come to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from minivllm.bench.metrics import metrics
from minivllm.bench.metrics.request_trace import RequestTrace
from minivllm.bench.metrics.roofline import PHASES
from minivllm.bench.records.record import Breakdown

Rows = list[dict[str, Any]]
BREAKDOWN = (*PHASES, "gap_ms")


def breakdown(steps: Rows) -> Breakdown:
    """Mean milliseconds a step, by phase; None for a phase that the engine does not report."""
    result = Breakdown(steps=len(steps))
    for name in BREAKDOWN:
        values = [step[name] for step in steps if step.get(name) is not None]
        setattr(result, name, sum(values) / len(values) if values else None)
    return result


def kv_waste(steps: Rows) -> float | None:
    """Mean over steps of the fraction of allocated cache slots that hold no token."""
    shares = [
        step["kv_slots_wasted"] / step["kv_slots_allocated"]
        for step in steps
        if step.get("kv_slots_allocated")
    ]
    return sum(shares) / len(shares) if shares else None


def recorded_requests(traces: Sequence[RequestTrace], with_ids: bool = True) -> Rows:
    """Rows of requests.parquet: the metrics' rows, and every token with its time (clock seconds).

    Simulated tokens have no ids that mean anything; they are left out then.
    """
    rows = metrics.request_rows(traces)
    for row, trace in zip(rows, traces, strict=True):
        if with_ids:
            row["token_ids"] = trace.token_ids
        row["token_times_s"] = trace.token_times
    return rows
