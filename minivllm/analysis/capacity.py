"""Goodput capacity: the highest rate at which enough requests meet their objectives, searched for
and told.

The search is a function of what was measured so far, so that it resumes from records; a report that
has them can say what came of it without having been there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import NormalDist, fmean, variance
from typing import Any

TASK = "minivllm.tasks.capacity.run"
# Knobs of arrival processes in which a rate can be searched for, and what they count.
UNITS = {"rate": "requests/s", "rate_scale": "times the trace's rate"}
# into which a measurement's requests are cut, to see how far they depend on each other
STRETCHES = 10
GROWTH = 2.0  # from one rate to the next while only one side of the capacity is known
BURST_S = 1.0  # requests that come within it ask for no rate that lasts
DIGITS = 3  # of a rate: the same search asks for the same rates again

Outcomes = Sequence[
    Sequence[bool]
]  # of each measurement, whether each request met its objectives, as they came
Measure = Callable[[float, int], Sequence[bool]]


@dataclass(frozen=True)
class Criterion:
    """When a rate holds, and how long to search.

    Args:
        attainment: share of the requests that must meet all their objectives.
        confidence: with which that must be known: a rate holds if the interval of this confidence
            lies above `attainment`, and fails if it lies below.
        min_blocks: least measurements of a rate.
        max_blocks: most of them, while its interval spans `attainment`.
        tolerance: search until the lowest rate that does not hold is so much above the highest that
            does.
        max_rates: most rates tried.
    """

    attainment: float = 0.9
    confidence: float = 0.95
    min_blocks: int = 1
    max_blocks: int = 3
    tolerance: float = 0.05
    max_rates: int = 16

    @property
    def bisections(self) -> int:
        """Rates that it takes, or thereabouts, once the capacity is known to within GROWTH."""
        return max(0, math.ceil(math.log2(math.log(GROWTH) / math.log1p(self.tolerance))))

    @property
    def least_requests(self) -> int:
        """So many must have met their objectives, and all, before a rate can hold."""
        z = NormalDist().inv_cdf(0.5 + self.confidence / 2)
        return math.ceil(self.attainment / (1 - self.attainment) * z * z)


@dataclass(frozen=True)
class Probe:
    """What was seen at one rate."""

    rate: float
    blocks: Outcomes

    @property
    def num_requests(self) -> int:
        """Over all measurements."""
        return sum(map(len, self.blocks))

    @property
    def share(self) -> float:
        """Of the requests that met their objectives."""
        return sum(map(sum, self.blocks)) / self.num_requests

    def interval(self, confidence: float) -> tuple[float, float]:
        """Wilson's score interval (1927) of the share, over as many requests as the data are worth.

        Neighbours wait in one queue, so they meet or miss their objectives together. Each
        measurement is cut into stretches; where their shares vary more than those of independent
        requests would, the number of requests is divided by that factor (batch means, Law and
        Kelton; the design effect, Kish 1965).
        """
        share, n = self.share, float(self.num_requests)
        stretches = [s for block in self.blocks for s in _cut(block)]
        if 0 < share < 1 and len(stretches) > 1:
            independent = share * (1 - share) / (n - 1) * len(stretches)  # their variance, unbiased
            n /= max(1.0, variance(map(fmean, stretches)) / independent)
        z = NormalDist().inv_cdf(0.5 + confidence / 2)
        middle = (share + z * z / (2 * n)) / (1 + z * z / n)
        half_width = z / (1 + z * z / n) * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
        low = middle - half_width if share > 0 else 0.0  # which rounding would miss
        high = middle + half_width if share < 1 else 1.0
        return max(0.0, low), min(1.0, high)

    def verdict(self, criterion: Criterion) -> str:
        """holds | fails | undecided."""
        low, high = self.interval(criterion.confidence)
        if low >= criterion.attainment:
            return "holds"
        return "fails" if high < criterion.attainment else "undecided"


def _cut(block: Sequence[bool]) -> list[Sequence[bool]]:
    """Up to STRETCHES neighbouring pieces of about the same length."""
    count = min(STRETCHES, len(block))
    ends = [round(i * len(block) / count) for i in range(count + 1)]
    return [block[a:b] for a, b in pairwise(ends)]


@dataclass(frozen=True)
class Capacity:
    """What a search has found: the rates tried, ascending."""

    probes: tuple[Probe, ...]
    criterion: Criterion
    unit: str = UNITS["rate"]

    @property
    def beyond(self) -> Probe | None:
        """The lowest rate that is not known to hold."""
        return next((p for p in self.probes if p.verdict(self.criterion) != "holds"), None)

    @property
    def holds(self) -> Probe | None:
        """The highest rate that holds, of those below `beyond`."""
        below = [p for p in self.probes if self.beyond is None or p.rate < self.beyond.rate]
        return below[-1] if below else None

    @property
    def fails(self) -> Probe | None:
        """The lowest rate that fails."""
        return next((p for p in self.probes if p.verdict(self.criterion) == "fails"), None)

    @property
    def stopped(self) -> bool:
        """Whether as many rates were tried as may be."""
        return len(self.probes) >= self.criterion.max_rates

    def sentence(self) -> str:
        """The result in words."""
        unit = self.unit
        goal = f"{100 * self.criterion.attainment:g} % of the requests meeting their objectives"
        if self.holds is None:
            least, verdicts = self.probes[0], [p.verdict(self.criterion) for p in self.probes]
            shares = [
                f"{100 * probe.share:.3g} % at {probe.rate:g} ({verdict})"
                for probe, verdict in zip(self.probes, verdicts, strict=True)
                if probe is least or verdict == "undecided"
            ]
            end = f"it is {', '.join(shares)}"
            if ("fails", "undecided") in pairwise(verdicts):
                end += "; a lower rate did worse than a higher one"
            if self.stopped:
                end += f"; the search ended at task.max_rates={self.criterion.max_rates}"
            return (
                f"capacity: no rate tried from {least.rate:g} {unit} up holds, with {goal}; {end}"
            )
        goal += f" ({100 * self.criterion.confidence:g} % confidence)"
        beyond, fails = self.beyond, self.fails
        doubt = [f"{beyond.rate:g} is undecided"] if beyond is not None and beyond != fails else []
        if fails is None:
            end = ", ".join(["no rate that was tried failed", *doubt])
            count = len(self.holds.blocks[0])
            if unit == UNITS["rate"] and (span_s := count / self.holds.rate) < BURST_S:
                end += (
                    f"; its {count} requests come within {span_s:.2g} s, a burst: raise "
                    "workload.num_requests"
                )
            return f"capacity: at least {self.holds.rate:g} {unit}, with {goal}; {end}"
        end = ", ".join([*doubt, f"{fails.rate:g} fails"])
        return (
            f"capacity: {self.holds.rate:g} {unit} is the highest rate tried that holds, with "
            f"{goal}; {end}"
        )

    def rows(self) -> list[dict[str, Any]]:
        """A row a rate, for tables: rate, blocks, requests, share, low, high, verdict."""
        return [
            {
                "rate": probe.rate,
                "blocks": len(probe.blocks),
                "requests": probe.num_requests,
                "share": probe.share,
                "low": probe.interval(self.criterion.confidence)[0],
                "high": probe.interval(self.criterion.confidence)[1],
                "verdict": probe.verdict(self.criterion),
            }
            for probe in self.probes
        ]


def search(
    measure: Measure,
    criterion: Criterion,
    start_rate: float,
    min_rate: float = 0.0,
    on_probe: Callable[[Probe], None] = lambda probe: None,
) -> Capacity:
    """CapacityRun for the highest rate that holds: doubling or halving until it is enclosed, then
    bisection of its logarithm.

    A rate whose interval spans the attainment is measured again, up to `max_blocks` times, and then
    counts as one that does not hold, so that what is found is on the safe side.

    Args:
        measure: a rate and the number of its block to whether each request met its objectives, in
            the order in which they came; at least one request.
        criterion: see there.
        start_rate: the first rate tried.
        min_rate: no lower one is tried.
        on_probe: told of each rate when it is done with.
    """
    capacity = Capacity((), criterion)
    while len(capacity.probes) < criterion.max_rates:
        if (rate := _next_rate(capacity, start_rate, min_rate)) is None:
            break
        probe = Probe(rate, [measure(rate, block) for block in range(criterion.min_blocks)])
        while probe.verdict(criterion) == "undecided" and len(probe.blocks) < criterion.max_blocks:
            probe = Probe(rate, [*probe.blocks, measure(rate, len(probe.blocks))])
        on_probe(probe)
        capacity = Capacity(
            tuple(sorted((*capacity.probes, probe), key=lambda p: p.rate)), criterion
        )
    return capacity


def _next_rate(capacity: Capacity, start_rate: float, min_rate: float) -> float | None:
    """The rate to try next; None once the capacity is known well enough, or to be below
    `min_rate`."""
    low, high = capacity.holds, capacity.beyond
    if low is None and high is None:
        return _rounded(start_rate)
    if high is None:
        assert low is not None
        return _rounded(low.rate * GROWTH)
    if low is None:
        least = _rounded(min_rate)
        return max(_rounded(high.rate / GROWTH), least) if high.rate > least else None
    middle = _rounded(math.sqrt(low.rate * high.rate))
    if (
        high.rate / low.rate <= 1 + capacity.criterion.tolerance
        or not low.rate < middle < high.rate
    ):
        return None
    return middle


def _rounded(rate: float) -> float:
    return float(f"{rate:.{DIGITS}g}")
