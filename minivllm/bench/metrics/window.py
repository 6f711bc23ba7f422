"""The spans of time over which throughput is counted."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from minivllm.bench.metrics.request_trace import RequestTrace

PASSED_BY = 2  # ends of others while a request waits, from which on it waited in the queue


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
    requests: int = 0  # requests that are measured, the failed ones too
    until_s: float | None = None  # when the measurement ended by time
    sent: Sequence[RequestTrace] = ()  # completed ones, those that only kept up the load among them
    # of each request that is one of several calls of a conversation or session, which one
    sessions: Mapping[str, str] = field(default_factory=dict)

    @cached_property
    def whole(self) -> Span | None:
        """From the first arrival to the last token, or to when the last request was shed, if that
        is later; or to when the measurement ended by time."""
        if self.first_arrival_s is None or self.last_end_s is None:
            return None
        end_s = self.last_end_s if self.until_s is None else self.until_s
        span = Span(self.first_arrival_s, end_s)
        return span if span.duration_s > 0 else None

    def ended_in(self, span: Span | None) -> list[RequestTrace]:
        """The measured requests whose last token came within the span: those that rates count."""
        if span is None:
            return []
        return [trace for trace in self.traces if trace.token_times[-1] in span]

    @cached_property
    def steady(self) -> Span | None:
        """From when the batch first is full to when both the queue last is empty and the batch last
        is full; at most to the last start of a request, and to the end of the measurement.

        A conversation or session takes its place from its first start to its last token, so that
        think time and tools do not empty the batch.

        None if the batch never is full, if it fills only with the last request, or if the engine
        does not say when requests start.
        """
        starts = [trace.started_s for trace in self.sent if trace.started_s is not None]
        if not starts or len(starts) < len(self.sent):
            return None
        places: dict[str, tuple[float, float]] = {}
        for trace, start_s in zip(self.sent, starts, strict=True):
            name, end_s = (
                self.sessions.get(trace.request_id, trace.request_id),
                trace.token_times[-1],
            )
            first_s, last_s = places.get(name, (start_s, end_s))
            places[name] = min(first_s, start_s), max(last_s, end_s)
        filled = _filled(list(places.values()), min(self.max_running, len(places)))
        if filled is None:
            return None
        until_s = math.inf if self.until_s is None else self.until_s
        end_s = min(max(filled[1], self._last_queued_s()), max(starts), until_s)
        return Span(filled[0], end_s) if end_s > filled[0] else None

    def _last_queued_s(self) -> float:
        """The last start of a request that waited in the queue: others had ended, and the engine
        began further steps without it. One that comes during a step waits for no more than one
        end."""
        ends = sorted({trace.token_times[-1] for trace in self.sent})
        return max(
            (
                start_s
                for trace in self.sent
                if (start_s := trace.started_s) is not None
                and bisect_right(ends, start_s) - bisect_right(ends, trace.scheduled_s) >= PASSED_BY
            ),
            default=-math.inf,
        )


def _filled(places: Sequence[tuple[float, float]], full: int) -> tuple[float, float] | None:
    """When `full` places first are taken, and when they last are; each is from a start to an
    end."""
    # A request that ends at the moment another starts has made room for it.
    changes = sorted([(start_s, 1) for start_s, _ in places] + [(end_s, -1) for _, end_s in places])
    running, first_s, last_s = 0, None, 0.0
    for time_s, change in changes:
        if change < 0 and running >= full:
            last_s = time_s
        running += change
        if first_s is None and running >= full:
            first_s = time_s
    return None if first_s is None else (first_s, last_s)
