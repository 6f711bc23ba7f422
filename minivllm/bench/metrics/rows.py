"""Rows of a record's tables, and what those of steps come to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from minivllm.bench.metrics import metrics
from minivllm.bench.metrics.request_trace import UNMEASURED, RequestTrace
from minivllm.bench.metrics.roofline import PHASES
from minivllm.bench.records.figures import Breakdown
from minivllm.extras.speculative.proposer import SpeculationCounters

Rows = list[dict[str, Any]]
BREAKDOWN = (*PHASES, "gap_ms", "collective_ms")


def breakdown(steps: Rows) -> Breakdown:
    """Mean milliseconds a step, by phase; None for a phase that the engine does not report."""
    result = Breakdown(steps=len(steps))
    for name in BREAKDOWN:
        values = [step[name] for step in steps if step.get(name) is not None]
        setattr(result, name, sum(values) / len(values) if values else None)
    whole = sum(getattr(result, name) or 0.0 for name in (*PHASES, "gap_ms"))
    if whole and result.collective_ms is not None:
        result.collective_share = result.collective_ms / whole
    return result


def kv_waste(steps: Rows) -> float | None:
    """Mean over steps of the fraction of allocated cache slots that hold no token."""
    shares = [
        step["kv_slots_wasted"] / step["kv_slots_allocated"]
        for step in steps
        if step.get("kv_slots_allocated")
    ]
    return sum(shares) / len(shares) if shares else None


def recorded_requests(
    traces: Sequence[RequestTrace],
    with_ids: bool = True,
    drafts: SpeculationCounters | None = None,
    until_s: float | None = None,
) -> Rows:
    """Rows of requests.parquet: the metrics' rows, the request's drafts, and every token with its
    time (clock seconds).

    Args:
        traces: one a request.
        with_ids: False leaves out the tokens' ids; those of simulated tokens mean nothing.
        drafts: None: there was no speculation.
        until_s: requests that were due from then on kept up the load and are not measured: they
            have no latencies, and the status "unmeasured"; None: all are.
    """
    rows = metrics.request_rows(traces)
    for row, trace in zip(rows, traces, strict=True):
        counts = None if drafts is None else drafts.requests.get(trace.request_id, (0, 0, 0))
        if until_s is not None and trace.scheduled_s >= until_s:
            row |= {name: None for name in row if name.endswith("_ms")}
            row["status"] = UNMEASURED
        row["draft_tokens"] = counts and counts[1]
        row["accepted_tokens"] = counts and counts[2]
        if with_ids:
            row["token_ids"] = trace.token_ids
        row["token_times_s"] = trace.token_times
    return rows
