"""The metrics of objectives: what meets the limits of `measure.slo`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from minivllm.bench.metrics.latency import E2E, TPOT, TTFT, Distribution, Metric
from minivllm.bench.metrics.request_trace import RequestTrace
from minivllm.bench.metrics.window import Run, Span
from minivllm.bench.records.figures import Attainment


class Goodput(Metric):
    """Requests per second that meet every objective set in `measure.slo`; null if none is set, or
    if TPOT is one and not known of some request: then attainment is null, too.

    Formula: requests that throughput counts with TTFT <= slo.ttft_ms, TPOT <= slo.tpot_ms and E2E
    <= slo.e2e_ms, of those that are set, / (last token - first arrival). A request of one token
    meets any TPOT; of one of several tokens in one chunk it is not known.
    Example: with slo.ttft_ms=2000 a alone counts: 1 in 5 s, 0.2.
    """

    name = "goodput_requests_per_s"
    unit = "requests/s"
    direction = "higher"

    def measure(self, run: Run) -> float | None:
        return _good_per_second(run, lambda trace, span: 1)


class GoodTokens(Metric):
    """Output tokens per second of the requests that meet every objective set in `measure.slo`; null
    if none is set.

    Formula: output tokens of the requests that goodput counts / (last token - first arrival).
    Example: with slo.ttft_ms=2000 a alone counts: its 4 tokens in 5 s, 0.8.
    """

    name = "goodput_tokens_per_s"
    unit = "tokens/s"
    direction = "higher"

    def measure(self, run: Run) -> float | None:
        return _good_per_second(run, lambda trace, span: span.count(trace.token_times))


class Attained(Metric):
    """Share of the requests that meet each objective set in `measure.slo`, and all of them; null if
    none is set.

    Formula: for each objective, and for all together: requests that meet it / requests, those that
    failed or were shed among them.
    Example: with slo.ttft_ms=2000 and slo.e2e_ms=5000: a meets both, b the second: ttft_ms 0.5,
    e2e_ms 1, all 0.5.
    """

    name = "attainment"
    unit = "share"
    direction = "higher"

    def measure(self, run: Run) -> Attainment | None:
        limits = _limits(run)
        if not limits or run.whole is None:
            return None
        shares = {
            metric.name: _share(run, [_meets(trace, metric, limit) for trace in run.traces])
            for metric, limit in limits
        }
        return Attainment(**shares, all=_share(run, [_good(trace, limits) for trace in run.traces]))


Limits = list[tuple[Distribution, float]]


def _limits(run: Run) -> Limits:
    """The objectives that are set."""
    limits = [(metric, run.slo.get(metric.name)) for metric in (TTFT(), TPOT(), E2E())]
    return [(metric, limit) for metric, limit in limits if limit is not None]


def is_met(name: str, value_ms: float | None, tokens: int, limit_ms: float) -> bool | None:
    """Whether a completed request meets an objective; None where that is not known.

    Args:
        name: of the latency.
        value_ms: its latency.
        tokens: of its output; one of a single token meets any TPOT.
        limit_ms: the objective.
    """
    if value_ms is None:
        return True if name == TPOT.name and tokens == 1 else None
    return value_ms <= limit_ms


def all_met(met: Iterable[bool | None]) -> bool | None:
    """Whether every objective is met; None where that of one is not known."""
    known = list(met)
    return None if None in known else all(known)


def _meets(trace: RequestTrace, metric: Distribution, limit: float) -> bool | None:
    value = next(iter(metric.samples(trace)), None)
    return is_met(metric.name, value, len(trace.token_times), limit)


def _good(trace: RequestTrace, limits: Limits) -> bool | None:
    """Whether a request meets every objective."""
    return all_met(_meets(trace, *limit) for limit in limits)


def _share(run: Run, met: list[bool | None]) -> float | None:
    """The share of the measured requests, the failed ones too; None where it is not known."""
    return None if None in met else met.count(True) / run.requests


def _counted(run: Run) -> list[RequestTrace] | None:
    """The requests that goodput counts; None without objectives, or where they are not known."""
    limits = _limits(run)
    if not limits or run.whole is None or None in (_good(trace, limits) for trace in run.traces):
        return None
    return [trace for trace in run.ended_in(run.whole) if _good(trace, limits)]


def good_requests(run: Run) -> int | None:
    """How many requests goodput counts; None where it is null."""
    counted = _counted(run)
    return None if counted is None else len(counted)


def _good_per_second(run: Run, amount: Callable[[RequestTrace, Span], int]) -> float | None:
    """What the requests that goodput counts amount to in a second."""
    counted, span = _counted(run), run.whole
    if counted is None or span is None:
        return None
    return sum(amount(trace, span) for trace in counted) / span.duration_s


def unknown_objective(traces: Sequence[RequestTrace], slo: Mapping[str, float | None]) -> list[str]:
    """Why goodput and attainment are null although objectives are set: one sentence, or none.

    Args:
        traces: the measured requests.
        slo: `measure.slo`.
    """
    completed = [trace for trace in traces if trace.completed]
    limit = slo.get(TPOT.name)
    bundles = [] if limit is None else [t for t in completed if _meets(t, TPOT(), limit) is None]
    if not bundles:
        return []
    return [
        f"measure.slo.tpot_ms: the time per output token of {len(bundles)} of {len(completed)} "
        "requests is not known, since all their tokens came in one chunk: goodput and attainment "
        "are null"
    ]
