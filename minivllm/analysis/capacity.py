"""Goodput capacity: the highest rate at which enough requests meet their objectives, searched for
and described.

The search is a function of what was measured so far, so that it resumes from records; a report that
has them can say what came of it without having been there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from statistics import fmean, variance
from typing import Any

TASK = "minivllm.tasks.capacity.run"
# Knobs of arrival processes in which a rate can be searched for, and what they count.
UNITS = {"rate": "requests/s", "rate_scale": "times the trace's rate"}
# After which share of `max_blocks` a rate's interval is drawn, and which share of 1 - confidence it
# may miss by. Early ones are strict: shares of runs pile up at one, and a few runs may have met no
# long queue. What is left of the whole is for that skewness; docs/reference/statistics.md has the
# coverage.
LOOKS = ((0.3125, 0.002), (0.625, 0.02), (1.0, 0.5))
ANYTIME = 0.25  # share of 1 - confidence of the bound that holds after any number of runs
FEWEST_RUNS = 2  # that have a spread
FEWEST_BLOCKS = 8  # of `max_blocks`, with which the interval was looked at
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
        attainment: share of the requests of a run that must meet all their objectives, on average.
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
    max_blocks: int = 32
    tolerance: float = 0.05
    max_rates: int = 16

    @property
    def bisections(self) -> int:
        """Rates that it takes, or thereabouts, once the capacity is known to within GROWTH."""
        return max(0, math.ceil(math.log2(math.log(GROWTH) / math.log1p(self.tolerance))))

    @property
    def looks(self) -> tuple[tuple[int, float], ...]:
        """After how many measurements of a rate its interval is drawn, and the chance of each that
        it misses the truth."""
        parts = ((math.ceil(self.max_blocks * part), error) for part, error in LOOKS)
        return tuple((blocks, error * (1 - self.confidence)) for blocks, error in parts)

    @property
    def least_requests(self) -> int:
        """So many must have met their objectives, and all, before a rate can hold."""
        z = _student(*self.looks[-1])
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
    def shares(self) -> list[float]:
        """Of the requests of each measurement that met their objectives."""
        return _shares(self.blocks)

    @property
    def share(self) -> float:
        """The mean of them."""
        return fmean(self.shares)

    def interval(self, criterion: Criterion) -> tuple[float, float]:
        """Of the share that runs of this length have on average.

        Requests of one run wait in one queue, which may remember longer than the run lasts, so that
        no part of a run says how far they depend on each other. Runs with other seeds are
        independent, and their spread says it. Until `Criterion.looks` there is only a bound from
        above, which holds after any number of runs (see `_at_most`).

        A search stops early because its lower end is high, as it is by chance where no run met a
        long queue. So a look before the last says whether the share is above `attainment`, and not
        how far: its lower end lies there at most.
        """
        low, high = 0.0, _at_most(self.shares, ANYTIME * (1 - criterion.confidence))
        seen = [look for look in criterion.looks if FEWEST_RUNS <= look[0] <= len(self.blocks)]
        if seen:
            blocks, error = seen[-1]
            last = blocks == criterion.max_blocks
            low, highest = _wilson(self.blocks if last else self.blocks[:blocks], error)
            low, high = low if last else min(low, criterion.attainment), min(high, highest)
        return low, high

    def verdict(self, criterion: Criterion) -> str:
        """holds | fails | undecided."""
        low, high = self.interval(criterion)
        if low >= criterion.attainment:
            return "holds"
        return "fails" if high < criterion.attainment else "undecided"


def _shares(blocks: Outcomes) -> list[float]:
    return [sum(block) / len(block) for block in blocks]


def _wilson(blocks: Outcomes, error: float) -> tuple[float, float]:
    """Wilson's score interval (1927) of the mean share of runs, with Student's quantile, over as
    many requests as the runs are worth: where their shares vary more than those of independent
    requests would, the number is divided by that factor (the design effect, Kish 1965)."""
    shares = _shares(blocks)
    share, n = fmean(shares), float(sum(map(len, blocks)))
    if 0 < share < 1:
        independent = share * (1 - share) / n * len(blocks)
        n /= max(1.0, variance(shares) / independent)
    z = _student(len(blocks), error)
    middle = (share + z * z / (2 * n)) / (1 + z * z / n)
    half_width = z / (1 + z * z / n) * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    low = middle - half_width if share > 0 else 0.0  # which rounding would miss
    high = middle + half_width if share < 1 else 1.0
    return max(0.0, low), min(1.0, high)


def _at_most(shares: Sequence[float], error: float) -> float:
    """A mean of runs that is exceeded with a chance of at most `error`, however their shares are
    distributed and whenever one stops (Markov's inequality; Ville 1939).

    Were the mean m, the product of (1 - share) / (1 - m) over the runs would be 1 on average.
    """
    most, product = 1.0, 1.0
    for runs, share in enumerate(shares, 1):
        product *= 1 - share
        most = min(most, 1 - (error * product) ** (1 / runs))
    return most


@cache
def _student(runs: int, error: float) -> float:
    """Student's two-sided quantile of the mean of so many runs."""
    from scipy.stats import t

    return float(t.ppf(1 - error / 2, max(1, runs - 1)))


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

    @property
    def unfinished(self) -> Probe | None:
        """The rate at which the search ended before it was decided, or had all its runs."""
        most = self.criterion.max_blocks
        undecided = (p for p in self.probes if p.verdict(self.criterion) == "undecided")
        return next((probe for probe in undecided if len(probe.blocks) < most), None)

    def sentence(self) -> str:
        """The result in words."""
        if (probe := self.unfinished) is None:
            return self._found()
        runs = f"{len(probe.blocks)} of at most {self.criterion.max_blocks} runs"
        left = (
            f"the search ended at {probe.rate:g} {self.unit} after {runs}, in which "
            f"{100 * probe.share:.3g} % of the requests met their objectives; the same command "
            "goes on"
        )
        return (
            f"capacity: not known yet, since {left}"
            if self.holds is None
            else (f"{self._found()}; {left}")
        )

    def _found(self) -> str:
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
                "low": probe.interval(self.criterion)[0],
                "high": probe.interval(self.criterion)[1],
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

    A rate whose interval spans the attainment is measured again, with other seeds, up to
    `max_blocks` times, and then counts as one that does not hold, so that what is found is on the
    safe side.

    Args:
        measure: a rate and the number of its block to whether each request met its objectives, in
            the order in which they came; at least one request.
        criterion: see there.
        start_rate: the first rate tried.
        min_rate: no lower one is tried.
        on_probe: called with each rate once it is decided.
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
