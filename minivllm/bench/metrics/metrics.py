"""The metrics: one class each, with its unit, direction, formula and an example; the glossary
prints itself from them.

The examples are of two requests that are due at 100 s at an engine which serves one at a time. a
has a prompt of 3 tokens, and its output tokens come at 101, 102, 102 and 103 s; b has a prompt of
5, and its come at 104 and 105 s.

Only completed requests (ended by "stop" or "length" with at least one token) are measured; the
validity gate flags a measurement in which others occur. Times of one request are clock seconds:
scheduled, started (first step), t_1 ... t_n (when each output token became available to the
caller).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import numpy as np

from minivllm.bench.metrics.request_trace import RequestTrace
from minivllm.bench.metrics.window import Run, Span
from minivllm.bench.records.record import Metrics, Percentiles, Window


class Metric(ABC):
    """One entry of the record's `metrics`: `name` is its field there.

    A metric's docstring says what it is, after `Formula:` how it is computed, and after `Example:`
    a case by hand.
    """

    name: ClassVar[str]
    unit: ClassVar[str]
    direction: ClassVar[Literal["lower", "higher"] | None] = None  # which is better; None: neither

    @abstractmethod
    def measure(self, run: Run) -> Any:
        """The metric's value; None where it is not defined."""


class Distribution(Metric):
    """A metric with samples, recorded as mean and percentiles."""

    unit = "ms"
    direction = "lower"

    @abstractmethod
    def samples(self, trace: RequestTrace) -> list[float]:
        """What one completed request adds."""

    def measure(self, run: Run) -> Percentiles:
        """Mean, percentiles and number of the samples of all requests."""
        return percentiles([sample for trace in run.traces for sample in self.samples(trace)])


class TTFT(Distribution):
    """Time to first token: how long a caller waits for a sign of life, queueing included.

    Formula: 1000 (t_1 - scheduled), a sample a request.
    Example: a 101 - 100 s, b 104 - 100 s: 1000 and 4000 ms, mean 2500.
    """

    name = "ttft_ms"

    def samples(self, trace: RequestTrace) -> list[float]:
        return [1e3 * (trace.token_times[0] - trace.scheduled_s)]


class ITL(Distribution):
    """Inter-token latency: how evenly tokens flow. Tokens that arrive together share the wait for
    them.

    Formula: k tokens that arrive together at t, the previous at t', give k samples of 1000 (t - t')
    / k; of those that come with the first token, each after it gives a sample of 0. Pooled over
    requests, so that a request of n tokens gives n - 1 samples with the sum 1000 (t_n - t_1). One
    all of whose tokens come at once, as a beam search's do, has none.
    Example: a's two tokens at 102 share the second since 101: 500 and 500 ms, then 1000; b 1000:
    mean 750.
    """

    name = "itl_ms"

    def samples(self, trace: RequestTrace) -> list[float]:
        times = trace.token_times
        if times[-1] == times[0]:
            return []
        gaps: list[float] = []
        last, start = times[0], 1
        while start < len(times):
            end = start + 1
            while end < len(times) and times[end] == times[start]:
                end += 1
            gaps.extend([1e3 * (times[start] - last) / (end - start)] * (end - start))
            last, start = times[start], end
        return gaps


class TPOT(Distribution):
    """Time per output token after the first, one figure a request; those whose tokens come at once
    have none.

    Formula: (E2E - TTFT) / (n - 1) = 1000 (t_n - t_1) / (n - 1).
    Example: a 2000 / 3 = 666.7 ms, b 1000 / 1: mean 833.333.
    """

    name = "tpot_ms"

    def samples(self, trace: RequestTrace) -> list[float]:
        times = trace.token_times
        return [1e3 * (times[-1] - times[0]) / (len(times) - 1)] if times[-1] > times[0] else []


class E2E(Distribution):
    """End-to-end latency: from when a request was due to its last token.

    Formula: 1000 (t_n - scheduled).
    Example: a 103 - 100 s, b 105 - 100 s: 3000 and 5000 ms, mean 4000.
    """

    name = "e2e_ms"

    def samples(self, trace: RequestTrace) -> list[float]:
        return [1e3 * (trace.token_times[-1] - trace.scheduled_s)]


class Queue(Distribution):
    """The part of TTFT before a request's first step, where the engine says when that was.

    Formula: 1000 (started - scheduled).
    Example: a starts at once, b at 103: 0 and 3000 ms, mean 1500.
    """

    name = "queue_ms"

    def samples(self, trace: RequestTrace) -> list[float]:
        return [] if trace.started_s is None else [1e3 * (trace.started_s - trace.scheduled_s)]


class Rate(Metric):
    """A metric that counts something over a span of time."""

    direction = "higher"

    @abstractmethod
    def count(self, trace: RequestTrace, span: Span) -> int:
        """What one completed request adds within the span."""

    def over(self, run: Run, span: Span | None) -> float | None:
        """Count per second of the span."""
        return (
            None
            if span is None
            else sum(self.count(trace, span) for trace in run.traces) / span.duration_s
        )

    def measure(self, run: Run) -> float | None:
        """Count per second from the first arrival to the last token."""
        return self.over(run, run.whole)


class OutputThroughput(Rate):
    """Output tokens per second.

    Formula: output tokens / (last token - first arrival).
    Example: 6 tokens in the 5 s from 100 to 105: 1.2.
    """

    name = "output_tokens_per_s"
    unit = "tokens/s"

    def count(self, trace: RequestTrace, span: Span) -> int:
        return span.count(trace.token_times)


class TotalThroughput(Rate):
    """Prompt and output tokens per second; a prompt counts when its first output token arrives.

    Formula: (prompt tokens + output tokens) / (last token - first arrival).
    Example: 3 + 5 prompt tokens and 6 of output in 5 s: 2.8.
    """

    name = "total_tokens_per_s"
    unit = "tokens/s"

    def count(self, trace: RequestTrace, span: Span) -> int:
        prompt = trace.input_tokens if trace.token_times[0] in span else 0
        return prompt + span.count(trace.token_times)


class RequestThroughput(Rate):
    """Completed requests per second; a request counts when its last token arrives.

    Formula: completed requests / (last token - first arrival).
    Example: 2 requests in 5 s: 0.4.
    """

    name = "requests_per_s"
    unit = "requests/s"

    def count(self, trace: RequestTrace, span: Span) -> int:
        return int(trace.token_times[-1] in span)


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
        limits = [(metric, run.slo.get(metric.name)) for metric in (TTFT(), TPOT(), E2E())]
        limits_set = [(metric, limit) for metric, limit in limits if limit is not None]
        if not limits_set or run.whole is None:
            return None
        good = sum(
            all(sample <= limit for metric, limit in limits_set for sample in metric.samples(trace))
            for trace in run.traces
        )
        return good / run.whole.duration_s


class Duration(Metric):
    """Length of the measured window.

    Formula: last token - first arrival; if the last request to end was shed, to then.
    Example: from 100 to 105 s: 5.
    """

    name = "duration_s"
    unit = "s"
    direction = "lower"

    def measure(self, run: Run) -> float | None:
        return run.whole.duration_s if run.whole else None


class NumRequests(Metric):
    """Requests that completed.

    Formula: number of requests that ended by "stop" or "length" with at least one token.
    Example: a and b: 2.
    """

    name = "num_requests"
    unit = "requests"

    def measure(self, run: Run) -> int:
        return len(run.traces)


class InputTokens(Metric):
    """Prompt tokens of the completed requests, counted as ids.

    Formula: sum of prompt lengths.
    Example: 3 + 5: 8.
    """

    name = "input_tokens"
    unit = "tokens"

    def measure(self, run: Run) -> int:
        return sum(trace.input_tokens for trace in run.traces)


class OutputTokens(Metric):
    """Output tokens of the completed requests, counted as ids.

    Formula: sum of output lengths.
    Example: 4 + 2: 6.
    """

    name = "output_tokens"
    unit = "tokens"

    def measure(self, run: Run) -> int:
        return sum(len(trace.token_times) for trace in run.traces)


class Steady(Metric):
    """Throughput while the engine is fully loaded: ramp-up and the drain at the end are left out.

    Formula: as the three throughputs, over the span from when the running requests first number
    min(max_num_seqs, concurrency or number of requests) to when the last request leaves the queue;
    null if that never happens, or if nothing waits any more once the batch is full.
    Example: full from 100 s (room for one), nothing waits from 103: 3 s, and in them a's 4 tokens:
    1.33333 a second.
    """

    name = "steady"
    unit = "s, tokens/s, requests/s"
    direction = "higher"

    def measure(self, run: Run) -> Window:
        span = run.steady
        return Window(
            duration_s=span.duration_s if span else None,
            output_tokens_per_s=OutputThroughput().over(run, span),
            total_tokens_per_s=TotalThroughput().over(run, span),
            requests_per_s=RequestThroughput().over(run, span),
        )


METRICS: tuple[Metric, ...] = (
    TTFT(),
    ITL(),
    TPOT(),
    E2E(),
    Queue(),
    OutputThroughput(),
    TotalThroughput(),
    RequestThroughput(),
    Goodput(),
    Duration(),
    NumRequests(),
    InputTokens(),
    OutputTokens(),
    Steady(),
)


def compute(
    traces: Sequence[RequestTrace],
    slo: Mapping[str, float | None],
    max_running: int,
    own: Mapping[str, Metric] | None = None,
) -> Metrics:
    """All metrics of one measurement.

    Args:
        traces: one a request, as the driver returns them.
        slo: limits in milliseconds by `ttft_ms`, `tpot_ms`, `e2e_ms`; None or missing is not set.
        max_running: most requests that can run at once (`driver.full_batch`).
        own: metrics of the user's own, by their names in the record's `metrics.own`.
    """
    completed = [trace for trace in traces if trace.completed]
    first_arrival = min((trace.scheduled_s for trace in traces), default=None)
    last_end = max((trace.ended_s for trace in traces if trace.ended_s is not None), default=None)
    run = Run(completed, first_arrival, last_end, max_running, slo)
    values = {metric.name: metric.measure(run) for metric in METRICS}
    return Metrics(**values, own={name: one.measure(run) for name, one in (own or {}).items()})


def fewest(p: float) -> int:
    """Samples that the p-th percentile takes: 1 / (1 - p), so that one of them lies beyond it."""
    return math.ceil(round(100 / (100 - p), 6))  # 100 - 99.9 is not quite 0.1


def percentiles(samples: Sequence[float]) -> Percentiles:
    """Mean and percentiles, linear between ranks; those that take more samples are null."""
    n = len(samples)
    if n == 0:
        return Percentiles()
    values = np.asarray(samples, dtype=np.float64)
    known = {f"p{p}": float(np.percentile(values, p)) for p in (50, 90, 95, 99) if n >= fewest(p)}
    return Percentiles(mean=float(values.mean()), n=n, **known)


def request_rows(traces: Sequence[RequestTrace], origin_s: float = 0.0) -> list[dict[str, Any]]:
    """A row a request, failed ones too, for requests.parquet; times are seconds after
    `origin_s`."""

    def since(time_s: float | None) -> float | None:
        return None if time_s is None else time_s - origin_s

    def one(metric: Distribution, trace: RequestTrace) -> float | None:
        samples = metric.samples(trace) if trace.completed else []
        return samples[0] if samples else None

    return [
        {
            "request_id": trace.request_id,
            "scheduled_s": since(trace.scheduled_s),
            "submitted_s": since(trace.submitted_s),
            "started_s": since(trace.started_s),
            "first_token_s": since(trace.token_times[0] if trace.token_times else None),
            "last_token_s": since(trace.token_times[-1] if trace.token_times else None),
            "input_tokens": trace.input_tokens,
            "output_tokens": len(trace.token_times),
            "finish_reason": trace.finish_reason,
            "status": trace.status,
            "error": trace.error,
            "ttft_ms": one(TTFT(), trace),
            "tpot_ms": one(TPOT(), trace),
            "e2e_ms": one(E2E(), trace),
            "queue_ms": one(Queue(), trace),
        }
        for trace in traces
    ]
