"""The spans of time over which throughput is counted."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from minivllm.bench.metrics.request_trace import RequestTrace


@dataclass(frozen=True)
class Span:
    """A stretch of time, its start left out and its end included, in clock seconds."""

    start_s: float
    end_s: float

    @property
    def duration_s(self) -> float:
        """Its length in seconds."""
        return self.end_s - self.start_s

    def __contains__(self, time_s: float) -> bool:
        return self.start_s < time_s <= self.end_s

    def count(self, times: Sequence[float]) -> int:
        """How many of the ascending times lie in it."""
        return bisect_right(times, self.end_s) - bisect_right(times, self.start_s)


@dataclass(frozen=True)
class Run:
    """What the metrics are computed from."""

    traces: Sequence[RequestTrace]  # the completed ones that are measured
    first_arrival_s: float | None  # over all requests, the failed ones too
    last_end_s: float | None  # over those that completed or were shed
    max_running: int
    slo: Mapping[str, float | None]
    asked: int = 0  # requests that are measured, the failed ones too
    # completed ones that kept up the load after the measured ones, whose tokens count in spans
    others: Sequence[RequestTrace] = ()
    until_s: float | None = None  # when the measurement ended by time

    @cached_property
    def present(self) -> Sequence[RequestTrace]:
        """All completed requests of the load."""
        return [*self.traces, *self.others] if self.others else self.traces

    @cached_property
    def whole(self) -> Span | None:
        """From the first arrival to the last token, or to when the last request was shed, if that
        is later; or to when the measurement ended by time."""
        if self.first_arrival_s is None or self.last_end_s is None:
            return None
        end_s = self.last_end_s if self.until_s is None else self.until_s
        span = Span(self.first_arrival_s, end_s)
        return span if span.duration_s > 0 else None

    @cached_property
    def steady(self) -> Span | None:
        """From when the batch first is full to when the queue last is empty: the last start of a
        request.

        None if the batch never is full, if it fills only with the last request, or if the engine
        does not say when requests start.
        """
        starts = [trace.started_s for trace in self.present if trace.started_s is not None]
        if not starts or len(starts) < len(self.present):
            return None
        # A request that ends at the moment another starts has made room for it.
        changes = sorted(
            [(start, 1) for start in starts]
            + [(trace.token_times[-1], -1) for trace in self.present]
        )
        running, full = 0, min(self.max_running, len(self.present))
        for time_s, change in changes:
            running += change
            if running >= full:
                return Span(time_s, max(starts)) if max(starts) > time_s else None
        return None
