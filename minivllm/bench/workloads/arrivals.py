"""Arrival processes: when each request of a workload is due."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from minivllm.bench.workloads.lengths import MOST_REQUESTS
from minivllm.bench.workloads.options import (
    ConcurrencyOptions,
    GammaOptions,
    RampOptions,
    RateOptions,
    ReplayOptions,
)
from minivllm.bench.workloads.workload import WorkloadRequest
from minivllm.errors import BadInput

ARRIVAL_STREAM = 0xA331  # keeps arrival noise apart from workload noise drawn with the same seed


class Arrival:
    """An arrival process, of requests that follow no other: of a conversation, its first turn.

    Open loop (`concurrency` is None): `schedule` says when each request is due, whatever the engine
    does. Closed loop: at most `concurrency` requests are in flight, and a request is due the moment
    its slot becomes free; the schedule is then not used. A conversation keeps its slot while
    its user thinks. An open loop with `max_concurrency` has so many slots as well: what is due
    while none is free waits for one, and stays due since then.
    """

    concurrency: int | None = None
    max_concurrency: int | None = None

    @property
    def slots(self) -> int | None:
        """Most requests, or conversations, in flight; None is no limit."""
        return self.concurrency or self.max_concurrency

    def schedule(self, n: int, seed: int) -> list[float]:
        """Seconds after the start at which each of `n` requests is due, ascending; all at once by
        default."""
        return [0.0] * n

    def due(self, requests: Sequence[WorkloadRequest], seed: int) -> list[float]:
        """The same for the very requests; a process that goes by them overrides this one."""
        return self.schedule(len(requests), seed)


class Offline(Arrival):
    """Every request is there at the start."""


class Concurrency(ConcurrencyOptions, Arrival):  # type: ignore[misc]  # an option cannot be set again
    """Closed loop: `concurrency` clients, each with one request, or conversation, at a time."""


class Constant(RateOptions, Arrival):
    """Open loop: requests at equal distances, the first at 0."""

    def schedule(self, n: int, seed: int) -> list[float]:
        """Arrival times in seconds."""
        return [i / self.rate for i in range(n)]


class Poisson(RateOptions, Arrival):
    """Open loop: independent users, so exponential gaps between arrivals; the first request comes
    at 0."""

    def schedule(self, n: int, seed: int) -> list[float]:
        """Arrival times in seconds; the same seed gives the same times."""
        return _after(_generator(seed).exponential(1 / self.rate, size=n))


class Gamma(GammaOptions, Arrival):
    """Open loop: gamma-distributed gaps, which may come in bursts; the first request comes at 0."""

    def schedule(self, n: int, seed: int) -> list[float]:
        """Arrival times in seconds; the same seed gives the same times."""
        scale = 1 / (self.rate * self.burstiness)
        return _after(_generator(seed).gamma(self.burstiness, scale, size=n))


class Ramp(RampOptions, Arrival):
    """Open loop: a Poisson process whose rate goes in a straight line from one value to another.

    A process of rate 1 with its time stretched (Cinlar 1975): its k-th arrival, at S_k, comes here
    when the rate has added up to S_k.

    """

    def schedule(self, n: int, seed: int) -> list[float]:
        """Arrival times in seconds; the same seed gives the same times."""
        mean_rate = (self.start_rate + self.end_rate) / 2
        duration_s = n / mean_rate if self.duration_s is None else self.duration_s
        expected = mean_rate * duration_s  # arrivals within the ramp
        slope = (self.end_rate - self.start_rate) / duration_s if n else 0.0
        times = []
        for count in _after(_generator(seed).exponential(size=n)):
            if count > expected:
                times.append(duration_s + (count - expected) / self.end_rate)
            else:  # the time t at which start_rate t + slope t² / 2 reaches count
                root = math.sqrt(max(0.0, self.start_rate**2 + 2 * slope * count))
                times.append(2 * count / (self.start_rate + root))
        return times


class Replay(ReplayOptions, Arrival):
    """Open loop: the times of the workload's own requests, as a trace has them."""

    replays = True  # needs a workload with times of its own

    def due(self, requests: Sequence[WorkloadRequest], seed: int) -> list[float]:
        """The requests' times, divided by the factor.

        Raises:
            BadInput: a request has no time of its own.
        """
        times = [request.due_s for request in requests if request.due_s is not None]
        if len(times) < len(requests):
            raise BadInput(NO_TIMES)
        return [time / self.rate_scale for time in times]


def _generator(seed: int) -> np.random.Generator:
    return np.random.default_rng([ARRIVAL_STREAM, seed])


def _after(gaps: NDArray[np.float64]) -> list[float]:
    """Times from the gaps before them; the first request comes at 0."""
    gaps[:1] = 0.0
    return [float(time) for time in np.cumsum(gaps)]


NO_TIMES = (
    "arrival=replay needs a workload whose requests have times of their own: use workload=trace"
)


def check_times(arrival: object, workload: object) -> None:
    """Fail early, before any engine is built, on a replay of a workload that has no times.

    Raises:
        BadInput: it has none.
    """
    if getattr(arrival, "replays", False) and not getattr(workload, "timed", False):
        raise BadInput(NO_TIMES)


def check_span(
    arrival: Arrival,
    num_requests: object,
    seed: int,
    timeout_s: float,
    sent_s: float | None = None,
) -> None:
    """Fail early where the last request would be due after the measurement has timed out.

    Args:
        arrival: of the measurement.
        num_requests: of the workload; None where that is not known yet.
        seed: of the arrivals.
        timeout_s: of the measurement.
        sent_s: seconds after which nothing more is sent; None is no end.

    Raises:
        BadInput: it would.
    """
    if sent_s is not None:
        if sent_s > timeout_s:
            raise BadInput(
                f"measure.duration_s and measure.cooldown_s are {sent_s:g} s together, and a "
                f"measurement has measure.timeout_s={timeout_s:g}; raise that"
            )
        return
    if (
        not isinstance(num_requests, int)
        or getattr(arrival, "replays", False)
        or num_requests > MOST_REQUESTS
    ):
        return  # the workload says itself that so many are too many
    last_s = max(arrival.schedule(num_requests, seed), default=0.0)
    if not last_s <= timeout_s:
        raise BadInput(
            f"arrival: the last of {num_requests:,} requests is due {last_s:,.6g} s after the "
            f"start, and a measurement has measure.timeout_s={timeout_s:g}; set a higher rate or "
            "ask for fewer"
        )
