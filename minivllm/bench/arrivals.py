"""Arrival processes: when each request of a workload is due."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from minivllm.bench.workloads import WorkloadRequest
from minivllm.errors import BadInput

ARRIVAL_STREAM = 0xA331  # keeps arrival noise apart from workload noise drawn with the same seed


class Arrival:
    """An arrival process.

    Open loop (`concurrency` is None): `schedule` says when each request is due, whatever the engine does.
    Closed loop: at most `concurrency` requests are in flight, and a request is due the moment its slot
    becomes free; the schedule is then not used.
    """

    concurrency: int | None = None

    def schedule(self, n: int, seed: int) -> list[float]:
        """Seconds after the start at which each of `n` requests is due, ascending; all at once by default."""
        return [0.0] * n

    def due(self, requests: Sequence[WorkloadRequest], seed: int) -> list[float]:
        """The same for the very requests; a process that goes by them overrides this one."""
        return self.schedule(len(requests), seed)


class Offline(Arrival):
    """Every request is there at the start."""


class Concurrency(Arrival):
    """Closed loop: `concurrency` clients, each sending its next request when its last one has ended.

    Args:
        concurrency: requests in flight.

    Raises:
        BadInput: it is not a whole number of at least 1.
    """

    def __init__(self, concurrency: int = 8) -> None:
        if isinstance(concurrency, bool) or not isinstance(concurrency, int) or concurrency < 1:
            raise BadInput(f"arrival.concurrency={concurrency!r} must be a whole number of at least 1")
        self.concurrency = concurrency


class Poisson(Arrival):
    """Open loop: independent users, so exponential gaps between arrivals; the first request comes at 0.

    Args:
        rate: mean arrivals per second.

    Raises:
        BadInput: the rate is not a finite number above 0.
    """

    def __init__(self, rate: float = 2.0) -> None:
        if isinstance(rate, bool) or not isinstance(rate, int | float) or not 0 < rate < math.inf:
            raise BadInput(f"arrival.rate={rate!r} must be a finite number of requests per second above 0")
        self.rate = float(rate)

    def schedule(self, n: int, seed: int) -> list[float]:
        """Arrival times in seconds; the same seed gives the same times."""
        gaps = np.random.default_rng([ARRIVAL_STREAM, seed]).exponential(1 / self.rate, size=n)
        gaps[:1] = 0.0
        return [float(time) for time in np.cumsum(gaps)]


class Replay(Arrival):
    """Open loop: the times of the workload's own requests, as a trace has them.

    Args:
        rate_scale: how many times faster than they came.

    Raises:
        BadInput: the factor is not a finite number above 0.
    """

    replays = True  # needs a workload with times of its own

    def __init__(self, rate_scale: float = 1.0) -> None:
        if (
            isinstance(rate_scale, bool)
            or not isinstance(rate_scale, int | float)
            or not 0 < rate_scale < math.inf
        ):
            raise BadInput(f"arrival.rate_scale={rate_scale!r} must be a finite number above 0")
        self.rate_scale = float(rate_scale)

    def due(self, requests: Sequence[WorkloadRequest], seed: int) -> list[float]:
        """The requests' times, divided by the factor.

        Raises:
            BadInput: a request has no time of its own.
        """
        times = [request.due_s for request in requests if request.due_s is not None]
        if len(times) < len(requests):
            raise BadInput(NO_TIMES)
        return [time / self.rate_scale for time in times]


NO_TIMES = "arrival=replay needs a workload whose requests have times of their own: use workload=trace"


def check_times(arrival: object, workload: object) -> None:
    """Fail early, before any engine is built, on a replay of a workload that has no times.

    Raises:
        BadInput: it has none.
    """
    if getattr(arrival, "replays", False) and not getattr(workload, "timed", False):
        raise BadInput(NO_TIMES)
