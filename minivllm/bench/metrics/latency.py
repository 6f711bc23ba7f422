"""What a metric is, and the latencies of requests: one class each."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import numpy as np

from minivllm.bench.metrics.request_trace import RequestTrace
from minivllm.bench.metrics.window import Run
from minivllm.bench.records.figures import Percentiles


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

    def measure(self, run: Run) -> Percentiles | None:
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


class TTFO(Distribution):
    """Time to the first token of the answer, of requests that think before it; null where none
    does. TTFT is that of the first token of any kind.

    Formula: 1000 (first token after the thinking block - scheduled), a sample a request that has
    a thinking block before its answer, as a server's chat or responses API tells them apart.
    Example: if a's tokens at 101 and 102 s are a thinking block: 103 - 100 s: 3000 ms; b has none.
    """

    name = "ttfo_ms"

    def samples(self, trace: RequestTrace) -> list[float]:
        return [] if trace.answer_s is None else [1e3 * (trace.answer_s - trace.scheduled_s)]

    def measure(self, run: Run) -> Percentiles | None:
        return super().measure(run) if any(map(self.samples, run.traces)) else None


class ITL(Distribution):
    """Inter-token latency: how evenly tokens flow. Tokens that arrive together share the wait for
    them; those of the first chunk were waited for by TTFT and give no sample.

    Formula: k tokens that arrive together at t, the previous chunk at t', give k samples of 1000 (t
    - t') / k. Pooled over requests: a request of n tokens, k of them in its first chunk, gives n -
    k samples with the sum 1000 (t_n - t_1), and one that came in one chunk none.
    Example: a's two tokens at 102 share the second since 101: 500 and 500 ms, then 1000; b 1000:
    mean 750.
    """

    name = "itl_ms"

    def samples(self, trace: RequestTrace) -> list[float]:
        return token_gaps(trace.token_times)


class TPOT(Distribution):
    """Time per output token after the first chunk, one figure a request; null for one that came in
    one chunk.

    Formula: 1000 (t_n - t_1) / (n - k), with k tokens in the first chunk; with one, (E2E - TTFT) /
    (n - 1).
    Example: a 2000 / 3 = 666.7 ms, b 1000 / 1: mean 833.333.
    """

    name = "tpot_ms"

    def samples(self, trace: RequestTrace) -> list[float]:
        times = trace.token_times
        later = len(times) - bundled(times)
        return [1e3 * (times[-1] - times[0]) / later] if later else []


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


def token_gaps(times: Sequence[float]) -> list[float]:
    """ITL samples of one request in milliseconds, from the ascending times of its tokens."""
    gaps: list[float] = []
    last, start = times[0], bundled(times)
    while start < len(times):
        end = start + 1
        while end < len(times) and times[end] == times[start]:
            end += 1
        gaps.extend([1e3 * (times[start] - last) / (end - start)] * (end - start))
        last, start = times[start], end
    return gaps


def bundled(times: Sequence[float]) -> int:
    """Tokens that arrived in a request's first chunk, by the ascending times of all of them."""
    return bisect_right(times, times[0])


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
