"""How long a device idled while steps were traced: what its kernels and copies leave of the time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from minivllm.bench.roofline import decodes

Interval = tuple[float, float]  # begin and end
STEP = "prepare"  # the phase that a step which computes something has exactly once


@dataclass(frozen=True)
class Idle:
    """How much of a stretch of a trace the device computed and copied nothing in."""

    steps: int
    requests: int  # most of them in a step
    span_ms: float
    share: float  # of the span


@dataclass(frozen=True)
class Idleness:
    """The idleness of a whole trace, from the first kernel's begin to the last one's end, and of what decodes in it."""

    whole: Idle
    decoding: Idle | None  # see `decoding_run`; None where there are too few such steps


def merged(intervals: Iterable[Interval]) -> list[Interval]:
    """The same times as intervals that neither touch nor overlap, in order; those of no length are left out."""
    found: list[Interval] = []
    for begin, end in sorted(interval for interval in intervals if interval[0] < interval[1]):
        if found and begin <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((begin, end))
    return found


def idle_share(busy: Iterable[Interval], begin: float, end: float) -> float | None:
    """The share of the time from `begin` to `end` that no interval covers; None where that is no time."""
    if end <= begin:
        return None
    inside = ((max(begin, first), min(end, last)) for first, last in busy)
    return 1 - sum(last - first for first, last in merged(inside)) / (end - begin)


def decoding_run(steps: Sequence[dict[str, Any]]) -> range:
    """The longest run of steps that only decode and have as many requests, by their numbers; the first of equals."""
    longest, position = range(0), 0
    for (only_decodes, _), members in groupby(steps, lambda step: (decodes(step), int(step["num_requests"]))):
        run = range(position, position := position + len(list(members)))
        if only_decodes and len(run) > len(longest):
            longest = run
    return longest


def idleness(events: Iterable[Any], steps: Sequence[dict[str, Any]]) -> Idleness | None:
    """How long the device of a profile idled; None where no device is in it.

    A run of decoding steps counts from where the host prepares its second step to where it prepares its last: by then
    whatever came before the run is done, also where steps overlap, and nothing that comes after it has begun.

    Args:
        events: the profile's `events()`, those of the host and of the device; their times are microseconds of one clock.
        steps: `BenchEngine.steps()` of what was profiled.
    """
    from torch.autograd import DeviceType  # type: ignore[attr-defined]  # not in its __all__

    busy, prepared = [], []
    for event in events:
        times = event.time_range.start, event.time_range.end
        if event.device_type == DeviceType.CPU:
            if event.is_user_annotation and event.name == STEP:
                prepared.append(times[0])
        elif not event.is_user_annotation:  # a range is there a second time, as long as its kernels
            busy.append(times)
    busy = merged(busy)

    def of(part: Sequence[dict[str, Any]], begin: float, end: float) -> Idle | None:
        share = idle_share(busy, begin, end)
        most = max((int(step["num_requests"]) for step in part), default=0)
        return None if share is None else Idle(len(part), most, (end - begin) / 1e3, share)

    whole = of(steps, busy[0][0], busy[-1][1]) if busy else None
    if whole is None:
        return None
    run, decoding = decoding_run(steps), None
    if len(run) > 2 and len(prepared) >= len(steps):
        prepared.sort()
        second, last = run[1], run[-1]
        decoding = of(steps[second:last], prepared[second], prepared[last])
    return Idleness(whole, decoding)


def told(idleness: Idleness) -> str:
    """A sentence for people."""
    whole, decoding = idleness.whole, idleness.decoding
    sentence = (
        f"The device was idle for {whole.share:.1%} of the {whole.span_ms:.1f} ms from its first kernel to the end of its "
        "last one"
    )
    if decoding is not None:
        sentence += (
            f", and for {decoding.share:.1%} of the {decoding.span_ms:.1f} ms of {decoding.steps} steps in which "
            f"{decoding.requests} requests only decoded"
        )
    return f"{sentence}."
