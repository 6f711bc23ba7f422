"""How long a device idled while steps were traced: between steps, which the host can cause, and
within them."""

from __future__ import annotations

import re
from bisect import bisect
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from typing import Any

from minivllm.bench.metrics.roofline import decodes

Interval = tuple[float, float]  # begin and end
# The phase that a step which computes something has exactly once, before it launches anything.
STEP = "prepare"
# How calls of a device's runtime and driver begin; torch's have "::".
LAUNCH = re.compile("(cuda|cu|hip)[A-Z]")
COPIES = ("Memcpy", "Memset")  # what is no kernel of all that a device does


@dataclass(frozen=True)
class Idle:
    """How much of a trace the device computed and copied nothing in."""

    steps: int
    requests: int  # most of them in a step
    span_ms: float
    share: float  # of the span


@dataclass(frozen=True)
class Decoding:
    """Where the time of like steps goes. A step is from the begin of its first kernel to that of
    the next one's."""

    steps: int
    requests: int  # of each step
    span_ms: float  # of all of them
    # Share of the span from the end of a step's last kernel to the begin of the next one's first.
    between: float
    within: float  # share of it in which, inside steps, the device computed and copied nothing


@dataclass(frozen=True)
class Idleness:
    """The idleness of a whole trace, from the first kernel's begin to the last one's end, and of
    what decodes in it."""

    whole: Idle
    # See `decoding_run`; None where there are too few such steps, or what they launched is not
    # known.
    decoding: Decoding | None


def merged(intervals: Iterable[Interval]) -> list[Interval]:
    """The same times as intervals that neither touch nor overlap, in order; those of no length are
    left out."""
    union: list[Interval] = []
    for begin, end in sorted(interval for interval in intervals if interval[0] < interval[1]):
        if union and begin <= union[-1][1]:
            union[-1] = (union[-1][0], max(end, union[-1][1]))
        else:
            union.append((begin, end))
    return union


def idle_share(busy: Iterable[Interval], begin: float, end: float) -> float | None:
    """The share of the time from `begin` to `end` that no interval covers; None where that is no
    time."""
    if end <= begin:
        return None
    inside = ((max(begin, first), min(end, last)) for first, last in busy)
    return 1 - sum(last - first for first, last in merged(inside)) / (end - begin)


def decoding_run(steps: Sequence[dict[str, Any]]) -> range:
    """The longest run of steps that only decode and have as many requests, by their numbers; the
    first of equals."""
    longest, position = range(0), 0
    for (only_decodes, _), members in groupby(
        steps, lambda step: (decodes(step), int(step["num_requests"]))
    ):
        run = range(position, position := position + len(list(members)))
        if only_decodes and len(run) > len(longest):
            longest = run
    return longest


def idleness(events: Iterable[Any], steps: Sequence[dict[str, Any]]) -> Idleness | None:
    """How long the device of a profile idled; None where no device is in it.

    A kernel belongs to the step within which the host launched it, however late it runs: it has the
    number of its launch (all kernels of a graph that of the graph's). So steps may overlap. One
    whose launch is not in the trace belongs to none, which can make the time between steps longer,
    but not shorter.

    Args:
        events: the profile's `events()`, those of the host and of the device; their times are
            microseconds of one clock.
        steps: `BenchEngine.steps()` of what was profiled.
    """
    from torch.autograd import DeviceType  # type: ignore[attr-defined]  # not in its __all__

    busy: list[Interval] = []
    kernels: list[tuple[int, Interval]] = []  # with the number of the launch
    prepared: list[float] = []
    launched: dict[int, float] = {}
    for event in events:
        times = event.time_range.start, event.time_range.end
        if event.device_type == DeviceType.CPU:
            if event.is_user_annotation and event.name == STEP:
                prepared.append(times[0])
            elif LAUNCH.match(event.name):
                launched[event.id] = times[0]
        elif not event.is_user_annotation:  # a range is there a second time, as long as its kernels
            busy.append(times)
            if not event.name.startswith(COPIES):
                kernels.append((event.id, times))
    busy = merged(busy)
    share = idle_share(busy, busy[0][0], busy[-1][1]) if busy else None
    if share is None:
        return None
    most = max((int(step["num_requests"]) for step in steps), default=0)
    whole = Idle(len(steps), most, (busy[-1][1] - busy[0][0]) / 1e3, share)
    run = decoding_run(steps)
    if len(run) < 2 or len(prepared) < len(steps):
        return Idleness(whole, None)
    prepared.sort()
    owned = [
        (bisect(prepared, launched[number]) - 1, times)
        for number, times in kernels
        if number in launched
    ]
    spans = {
        step: (min(times[0] for _, times in own), max(times[1] for _, times in own))
        for step, members in groupby(sorted(owned), lambda one: one[0])
        if (own := list(members))
    }
    if any(step not in spans for step in run):
        return Idleness(whole, None)
    return Idleness(
        whole, _decoding(busy, [spans[step] for step in run], int(steps[run[0]]["num_requests"]))
    )


def _decoding(
    busy: Sequence[Interval], spans: Sequence[Interval], requests: int
) -> Decoding | None:
    """Of steps that follow each other, whose kernels take these times; the last one only ends the
    one before it."""
    begin, end = spans[0][0], spans[-1][0]
    ended = accumulate((last for _, last in spans), max)
    gaps = merged((last, first) for last, (first, _) in zip(ended, spans[1:], strict=False))
    elsewhere, within = idle_share(gaps, begin, end), idle_share([*busy, *gaps], begin, end)
    if elsewhere is None or within is None:
        return None
    return Decoding(len(spans) - 1, requests, (end - begin) / 1e3, 1 - elsewhere, within)


def sentence(idleness: Idleness) -> str:
    """Sentences for people."""
    whole, decoding = idleness.whole, idleness.decoding
    sentences = (
        f"The device was idle for {whole.share:.1%} of the {whole.span_ms:.1f} ms from its first "
        "kernel to the end of its last one."
    )
    if decoding is not None:
        sentences += (
            f" Of the {decoding.span_ms:.1f} ms of {decoding.steps} steps in which "
            f"{decoding.requests} requests only decoded, {decoding.between:.1%} lay between a "
            f"step's last kernel and the next one's first, and for {decoding.within:.1%} it was "
            "idle within steps."
        )
    return sentences
