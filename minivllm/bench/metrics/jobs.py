"""The jobs of an agentic workload: how long they take, what the prefix cache gives them and what
they cost.

A session is a job: all calls of an agent and of its sub-agents. Sessions that start at a random
instant are under way before the window begins, so they are no jobs; their calls count for the hit
rates.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from minivllm.bench.hardware.readings import Energy
from minivllm.bench.metrics.latency import percentiles
from minivllm.bench.metrics.prefix_sharing import PrefixTree
from minivllm.bench.metrics.price import JOULES_PER_KWH
from minivllm.bench.metrics.request_trace import RequestTrace
from minivllm.bench.records.feature_figures import JobFigures
from minivllm.bench.records.figures import Metrics
from minivllm.bench.workloads.workload import Workload

SECONDS = 3600.0
MILLION = 1e6


@dataclass(frozen=True)
class JobContext:
    """What else the figures of jobs need.

    Args:
        metrics: of the same window.
        energy: of the window.
        price: `measure.price`.
        liveness: what the engine counted; the block size of its cache bounds what can be reused.
        cache_state: see `JobFigures`.
        devices: that the engine computes on.
    """

    metrics: Metrics
    energy: Energy
    price: Mapping[str, Any]
    liveness: Mapping[str, Mapping[str, float | str]]
    cache_state: str
    devices: int = 1


def cache_state(keeps_prefixes: bool, prefix_cache: str) -> str:
    """What the prefix cache holds when the window begins, see `JobFigures`.

    Args:
        keeps_prefixes: whether the engine's cache cannot be emptied.
        prefix_cache: `measure.prefix_cache`.
    """
    return "kept" if keeps_prefixes and prefix_cache == "cold" else prefix_cache


def job_figures(
    traces: Sequence[RequestTrace], workload: Workload, context: JobContext
) -> JobFigures | None:
    """The figures of a workload of sessions; None for any other.

    Args:
        traces: one a request that was sent, in the workload's order.
        workload: the requests that were sent.
        context: see there.
    """
    if not any(request.session for request in workload.requests):
        return None
    session_of = {request.request_id: str(request.session) for request in workload.requests}
    sizes = Counter(session_of.values())
    sessions: dict[str, list[RequestTrace]] = defaultdict(list)
    for trace in traces:
        sessions[session_of[trace.request_id]].append(trace)
    midway = {request.session for request in workload.priming}
    jobs = [
        calls
        for name, calls in sessions.items()
        if name not in midway and sum(trace.completed for trace in calls) == sizes[name]
    ]
    shareable = _shareable(traces, workload, context)
    figures = JobFigures(
        sessions=len(sessions),
        num_jobs=len(jobs),
        latency_s=percentiles([_end(calls) - _begin(calls) for calls in jobs]),
        session_hit_rate=percentiles(
            [rate for calls in sessions.values() if (rate := _hit_rate(calls)) is not None]
        ),
        hit_rate=_hit_rate(traces),
        optimal_hit_rate=_share(sum(shareable.values()), sum(t.input_tokens for t in traces)),
        live_tokens=_live_tokens(sessions, shareable),
        cache_state="primed" if workload.priming else context.cache_state,
        primed_tokens=sum(len(request.prompt_token_ids) for request in workload.priming),
        client_lag_ms=percentiles(
            [1e3 * (t.submitted_s - t.scheduled_s) for t in traces if t.submitted_s is not None]
        ),
    )
    _price(figures, traces, context)
    return figures


def _price(figures: JobFigures, traces: Sequence[RequestTrace], context: JobContext) -> None:
    """Rates, energy and money of a job; of a window with sessions that are no jobs there is no
    share of a job."""
    metrics, price = context.metrics, context.price
    count, window_s = figures.num_jobs, metrics.duration_s
    if not count or not window_s:
        return
    figures.jobs_per_hour = SECONDS * count / window_s
    figures.jobs_per_hour_per_device = figures.jobs_per_hour / context.devices
    if figures.latency_s.mean:
        figures.jobs_per_hour_per_user = SECONDS / figures.latency_s.mean
    if count < figures.sessions:
        return
    joules = context.energy.joules
    figures.joules_per_job = None if joules is None else joules / count
    hour, kwh = price.get("device_hour"), price.get("kwh")
    if hour is not None or (kwh is not None and joules is not None):
        money = (hour or 0.0) * context.devices * window_s / SECONDS
        figures.cost_per_job = (money + (kwh or 0.0) * (joules or 0.0) / JOULES_PER_KWH) / count
    prices = [price.get(f"million_{kind}") for kind in ("input", "cached", "output")]
    if any(one is not None for one in prices) and figures.hit_rate is not None:
        cached = sum(trace.cached_tokens or 0 for trace in traces)
        amounts = (metrics.input_tokens - cached, cached, metrics.output_tokens)
        money = sum((one or 0.0) * n for one, n in zip(prices, amounts, strict=True))
        figures.token_cost_per_job = money / MILLION / count


def _begin(calls: Sequence[RequestTrace]) -> float:
    return min(trace.scheduled_s for trace in calls)


def _end(calls: Sequence[RequestTrace]) -> float:
    return max(trace.finished_s or trace.scheduled_s for trace in calls)


def _hit_rate(traces: Sequence[RequestTrace]) -> float | None:
    """Share of the prompt tokens that the prefix cache had; None where the engine does not say."""
    counted = [trace for trace in traces if trace.cached_tokens is not None]
    cached = sum(trace.cached_tokens or 0 for trace in counted)
    return _share(cached, sum(trace.input_tokens for trace in counted))


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None


def _shareable(
    traces: Sequence[RequestTrace], workload: Workload, context: JobContext
) -> dict[str, int]:
    """Of each prompt the tokens that a prefix cache without limit would have had, by request: those
    of whole blocks that an earlier prompt begins with, and never the last token."""
    block = max(1, int(float(context.liveness.get("cache", {}).get("block_size", 1.0)) or 1))
    tree = PrefixTree()
    for request in workload.priming:
        tree.insert(request.prompt_token_ids)
    if context.cache_state == "warm":
        for request in workload.requests:
            tree.insert(request.prompt_token_ids)
    prompts = {request.request_id: request.prompt_token_ids for request in workload.requests}
    submitted = [
        (trace.submitted_s, i, trace.request_id)
        for i, trace in enumerate(traces)
        if trace.submitted_s is not None
    ]
    shareable = {}
    for _, _, name in sorted(submitted):
        known = min(tree.insert(prompts[name]), len(prompts[name]) - 1)
        shareable[name] = known // block * block
    return shareable


def _live_tokens(
    sessions: Mapping[str, Sequence[RequestTrace]], shareable: Mapping[str, int]
) -> int:
    """Most tokens that the sessions under way had computed at one time, each counted once: what a
    cache holds that drops nothing of them."""
    changes: list[tuple[float, int]] = []
    for calls in sessions.values():
        total = 0
        for trace in calls:
            own = trace.input_tokens - shareable.get(trace.request_id, 0) + len(trace.token_times)
            changes.append((trace.scheduled_s, own))
            total += own
        changes.append((_end(calls), -total))
    live = most = 0
    for _, change in sorted(changes):  # at one time what ends before what begins
        live += change
        most = max(most, live)
    return most
