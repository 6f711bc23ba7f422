"""Two sides timed in turn, so that whatever else the machine does meets both."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from minivllm.bench.hardware.readings import Roofline
from minivllm.bench.microbench.case import Case, Side

WARM_UP = 2  # calls of each side that do not count; the first compiles


@torch.inference_mode()
def measure(
    case: Case, limits: Roofline, repeats: int, sample_s: float, synchronise: Callable[[], object]
) -> dict[str, Any]:
    """Check a case, then time it: a row of the record.

    A sample is as many calls as take `sample_s`, one after another over the copies of the inputs,
    and one wait for the device. Sides take turns at who is first.

    Args:
        case: what to measure.
        limits: bandwidth and matrix rate, of which the floor is made.
        repeats: samples of each side.
        sample_s: least seconds of a sample.
        synchronise: waits for the device.
    """
    difference = check(case)
    sides = [case.ours] if case.theirs is None else [case.ours, case.theirs]
    clocks = [_Sampler(side, sample_s, synchronise) for side in sides]
    times: list[list[float]] = [[] for _ in sides]
    for repeat in range(repeats):
        order = range(len(sides)) if repeat % 2 == 0 else reversed(range(len(sides)))
        for index in order:
            times[index].append(clocks[index].sample())
    memory_s = case.bytes / limits.bandwidth_bytes_per_s if limits.bandwidth_bytes_per_s else None
    matrix_s = case.operations / limits.matrix_flops_per_s if limits.matrix_flops_per_s else None
    floor = max((s for s in (memory_s, matrix_s) if s is not None), default=None)
    ours = median(times[0])
    theirs = None if case.theirs is None else median(times[1])
    return {
        "kernel": case.kernel,
        "part": case.part,
        "rows": case.rows,
        "implementation": case.ours.name,
        "reference": None if case.theirs is None else case.theirs.name,
        "bytes": case.bytes,
        "operations": case.operations,
        "copies": case.copies,
        "seconds": ours,
        "reference_seconds": theirs,
        "speedup": None
        if theirs is None
        else median([b / a for a, b in zip(times[0], times[1], strict=True)]),
        "floor_s": floor,
        "bound": None if floor is None else "memory" if floor == memory_s else "matrix",
        "of_floor": None if floor is None else floor / ours["median"],
        "difference": difference,
        "tolerance": case.tolerance,
        "ok": difference is None or difference <= case.tolerance,
    }


def check(case: Case) -> float | None:
    """Relative difference of the two outputs, for the first copy of the inputs; None where there is
    one side only."""
    if case.theirs is None:
        return None
    ours = case.seen(0, case.ours.call(0)).clone().double()
    theirs = case.seen(0, case.theirs.call(0)).double()
    if not bool(ours.isfinite().all()):
        return math.inf
    return float((ours - theirs).norm() / theirs.norm().clamp(min=1e-30))


class _Sampler:
    """Seconds of one call of a side, a sample at a time."""

    def __init__(self, side: Side, sample_s: float, synchronise: Callable[[], object]) -> None:
        self.call: Callable[[int], Tensor] = side.call
        self.synchronise, self.next, self.count = synchronise, 0, WARM_UP
        self.sample()
        self.count = 1
        while (taken := self.sample() * self.count) < sample_s:
            self.count = max(
                self.count + 1, min(10 * self.count, math.ceil(self.count * sample_s / taken))
            )

    def sample(self) -> float:
        call, start = self.call, self.next
        self.next += self.count
        self.synchronise()
        begin = time.perf_counter()
        for i in range(start, self.next):
            call(i)
        self.synchronise()
        return (time.perf_counter() - begin) / self.count


def median(values: Sequence[float]) -> dict[str, Any]:
    """The median and its distribution-free 95 % interval, of order statistics (Conover 1999,
    section 3.2).

    Args:
        values: samples, at least one.

    Returns:
        "median", "low", "high" and "n"; the interval is None for fewer than 6 samples.
    """
    x, n = sorted(values), len(values)
    middle = (x[(n - 1) // 2] + x[n // 2]) / 2
    below, outside = 0.0, -1
    while (below := below + math.comb(n, outside + 1) * 0.5**n) <= 0.025:
        outside += 1
    known = outside >= 0
    return {
        "median": middle,
        "low": x[outside] if known else None,
        "high": x[n - 1 - outside] if known else None,
        "n": n,
    }
