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

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from minivllm.bench.metrics.latency import E2E, ITL, TPOT, TTFO, TTFT, Distribution, Metric, Queue
from minivllm.bench.metrics.objectives import Attained, Goodput, GoodTokens, good_requests
from minivllm.bench.metrics.request_trace import RequestTrace
from minivllm.bench.metrics.window import Run, Span
from minivllm.bench.records.figures import Metrics, RequestCounts, Window


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


class ReasoningTokens(Metric):
    """Output tokens of thinking blocks, which `output_tokens` counts, too; null where the engine
    tells of none.

    Formula: sum of the server's counts of reasoning tokens, or of the tokens of its chunks of
    reasoning.
    Example: if a's tokens at 101 and 102 s are a thinking block: 3.
    """

    name = "reasoning_tokens"
    unit = "tokens"

    def measure(self, run: Run) -> int | None:
        return sum(trace.reasoning_tokens for trace in run.traces) or None


class Steady(Metric):
    """Throughput while the engine is fully loaded: ramp-up and the drain at the end are left out.

    Formula: as the three throughputs, over the span from when the running requests first number
    min(max_num_seqs, concurrency or number of requests) to when so many last run and no request
    waits in the queue any more, at most to the last start. One waits there whose wait two others
    or more end in; a conversation or session runs from its first start to its last token. Null if
    that never happens, or if nothing waits any more once the batch is full.
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


class Counted(Metric):
    """Which requests the figures count: latencies and attainment those that were due within the
    window and completed, rates and goodput those of them whose last token came within it.

    Formula: `due` are the requests that were due before `measure.duration_s` was over, or all;
    `ended` of them had their last token within the window of the throughput, `good` of these meet
    every objective, and `steady` of them ended within the steady window. `served_s` is the time
    from the first arrival until the last of `due` had ended.
    Example: a and b are due, and both end within the window: 2, 2; with slo.ttft_ms=2000 good is 1,
    and a alone ends within the steady window: 1. The last token comes after 5 s.
    """

    name = "counted"
    unit = "requests, s"

    def measure(self, run: Run) -> RequestCounts:
        ends = [trace.token_times[-1] for trace in run.traces]
        last_s = max(ends, default=run.last_end_s)
        started = run.first_arrival_s is not None and last_s is not None
        return RequestCounts(
            due=run.requests,
            ended=len(run.ended_in(run.whole)),
            good=good_requests(run),
            steady=len(run.ended_in(run.steady)) if run.steady else None,
            served_s=(last_s or 0.0) - (run.first_arrival_s or 0.0) if started else None,
        )


METRICS: tuple[Metric, ...] = (
    TTFT(),
    TTFO(),
    ITL(),
    TPOT(),
    E2E(),
    Queue(),
    OutputThroughput(),
    TotalThroughput(),
    RequestThroughput(),
    Goodput(),
    GoodTokens(),
    Attained(),
    Duration(),
    NumRequests(),
    InputTokens(),
    OutputTokens(),
    ReasoningTokens(),
    Steady(),
    Counted(),
)


def compute(
    traces: Sequence[RequestTrace],
    slo: Mapping[str, float | None],
    max_running: int,
    own: Mapping[str, Metric] | None = None,
    until_s: float | None = None,
    sessions: Mapping[str, str] | None = None,
) -> Metrics:
    """All metrics of one measurement.

    Args:
        traces: one a request, as the driver returns them.
        slo: limits in milliseconds by `ttft_ms`, `tpot_ms`, `e2e_ms`; None or missing is not set.
        max_running: most requests that can run at once (`driver.full_batch`).
        own: metrics of the user's own, by their names in the record's `metrics.own`.
        until_s: clock seconds at which the measurement ended by time: requests that were due later
            are not measured, and rates count what came up to there. None: the workload ended it.
        sessions: the conversation or session of each request that is one of several calls.
    """
    measured = [trace for trace in traces if until_s is None or trace.scheduled_s < until_s]
    completed = [trace for trace in measured if trace.completed]
    first_arrival = min((trace.scheduled_s for trace in traces), default=None)
    last_end = max((trace.ended_s for trace in traces if trace.ended_s is not None), default=None)
    run = Run(
        *(completed, first_arrival, last_end, max_running, slo, len(measured), until_s),
        sent=[trace for trace in traces if trace.completed],
        sessions=sessions or {},
    )
    values = {metric.name: metric.measure(run) for metric in METRICS}
    return Metrics(**values, own={name: one.measure(run) for name, one in (own or {}).items()})


TRANSFER = ("kv_bytes_handed_over", "kv_ms_given", "kv_ms_taken")  # columns of a KV transfer
NOT_MOVED = (None, None, None)


def request_rows(traces: Sequence[RequestTrace], origin_s: float = 0.0) -> list[dict[str, Any]]:
    """A row a request, failed ones too, for requests.parquet; times are seconds after
    `origin_s`."""

    def since(time_s: float | None) -> float | None:
        return None if time_s is None else time_s - origin_s

    def one(metric: Distribution, trace: RequestTrace) -> float | None:
        samples = metric.samples(trace) if trace.completed else []
        return samples[0] if samples else None

    thoughts: dict[str, Callable[[RequestTrace], float | int | None]] = {
        "ttfo_ms": lambda trace: one(TTFO(), trace),
        "reasoning_tokens": lambda trace: trace.reasoning_tokens,
    }
    if not any(trace.reasoning_tokens for trace in traces):
        thoughts = {}
    moved = any(trace.kv_transfer for trace in traces)
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
            "cached_tokens": trace.cached_tokens,
            "finish_reason": trace.finish_reason,
            "status": trace.status,
            "error": trace.error,
            "ttft_ms": one(TTFT(), trace),
            "tpot_ms": one(TPOT(), trace),
            "e2e_ms": one(E2E(), trace),
            "queue_ms": one(Queue(), trace),
            **{name: read(trace) for name, read in thoughts.items()},
            **(dict(zip(TRANSFER, trace.kv_transfer or NOT_MOVED, strict=True)) if moved else {}),
        }
        for trace in traces
    ]
