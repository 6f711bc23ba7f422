"""The metrics of objectives: what meets the limits of `measure.slo`."""

from __future__ import annotations

from collections.abc import Callable

from minivllm.bench.metrics.latency import E2E, TPOT, TTFT, Distribution, Metric
from minivllm.bench.metrics.request_trace import RequestTrace
from minivllm.bench.metrics.window import Run
from minivllm.bench.records.record import Attainment


class Goodput(Metric):
    """Requests per second that meet every objective set in `measure.slo`; null if none is set.

    Formula: requests with TTFT <= slo.ttft_ms, TPOT <= slo.tpot_ms and E2E <= slo.e2e_ms, of those
    that are set, / (last token - first arrival). A request of one token meets any TPOT.
    Example: with slo.ttft_ms=2000 a alone counts: 1 in 5 s, 0.2.
    """

    name = "goodput_requests_per_s"
    unit = "requests/s"
    direction = "higher"

    def measure(self, run: Run) -> float | None:
        return _good_per_second(run, lambda trace: 1)


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
        return _good_per_second(run, lambda trace: len(trace.token_times))


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
            metric.name: sum(_meets(trace, metric, limit) for trace in run.traces) / run.asked
            for metric, limit in limits
        }
        return Attainment(**shares, all=len(_good(run)) / run.asked)


def _limits(run: Run) -> list[tuple[Distribution, float]]:
    """The objectives that are set."""
    limits = [(metric, run.slo.get(metric.name)) for metric in (TTFT(), TPOT(), E2E())]
    return [(metric, limit) for metric, limit in limits if limit is not None]


def _meets(trace: RequestTrace, metric: Distribution, limit: float) -> bool:
    return all(sample <= limit for sample in metric.samples(trace))


def _good(run: Run) -> list[RequestTrace]:
    """The requests that meet every objective."""
    limits = _limits(run)
    return [trace for trace in run.traces if all(_meets(trace, *limit) for limit in limits)]


def _good_per_second(run: Run, amount: Callable[[RequestTrace], int]) -> float | None:
    """What the requests that meet every objective amount to in a second; None where none is set."""
    if not _limits(run) or run.whole is None:
        return None
    return sum(map(amount, _good(run))) / run.whole.duration_s
