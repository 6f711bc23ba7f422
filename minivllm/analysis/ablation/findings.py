"""What an ablation found and what a search is for: the types that tables, plots and pages are drawn
from."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

EffectVerdict = Literal[
    "faster", "slower", "none", "not live", "apart", "failed", "not measured", "too few blocks"
]
Togetherness = Literal[
    "more together", "less together", "none", "apart", "failed", "not measured", "too few blocks"
]

# What the records of an ablation are to be read as, by run_id: fields of `ablation` as a sweep has
# them now. A record that was there already says what it was made for, which may have been another
# ablation.
Planned = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class Effect:
    """What one optimisation does to one metric, in an arm with it against an arm without it.

    A `ratio` is with / without, in the typical block: above 1 the metric is larger with it,
    whichever way is better. Figures are None where there are too few blocks for them, or none.
    """

    name: str  # of the optimisation
    metric: str  # "output_tokens_per_s", "ttft_ms.p50", ...
    arm: str  # with it; in a factorial, the first of the pairs that are averaged
    against: str  # without it
    pairs: int  # of arms that are averaged: 1, or more in a factorial
    ratio: float | None
    low: float | None  # confidence interval of the ratio
    high: float | None
    p_value: float | None  # signed-rank test over blocks
    p_holm: float | None  # corrected for the number of optimisations
    blocks: int  # with figures of all arms
    # fraction that would be found with power 0.8; never below the A/A arm's
    minimum_detectable: float | None
    verdict: EffectVerdict  # "faster" is better: less time, more tokens, fewer joules
    log_ratios: tuple[float, ...] = ()  # a block each
    # share of the requests whose output is the same with it and without it
    same_tokens: float | None = None
    reason: str = ""  # why `none`, where p-value or interval seem to say otherwise
    spikes: int = 0  # blocks so far from the others that they are no part of their scatter
    busy: int = 0  # blocks in which one of the arms met other processes

    @property
    def width(self) -> float | None:
        """Of the interval, relative: high / low - 1."""
        return None if self.low is None or self.high is None else self.high / self.low - 1


@dataclass(frozen=True)
class Interaction:
    """Whether two optimisations together give more or less than the product of what each gives
    alone."""

    first: str
    second: str
    metric: str
    # (both / second) / (first / neither): above 1, together more than the product
    ratio: float | None
    low: float | None
    high: float | None
    p_value: float | None
    p_holm: float | None  # corrected for the number of interactions
    blocks: int
    verdict: Togetherness
    reason: str = ""  # why `none`, where p-value or interval seem to say otherwise
    joint: float | None = None  # both / neither, in the typical block


@dataclass(frozen=True)
class Gaps:
    """Blocks of an arm that have no figure to compare, and why."""

    arm: str
    blocks: int  # of the arm, with a figure or without
    why: Mapping[str, int]  # a status, "no figure", "zero" or "negative", and how many blocks

    @property
    def missing(self) -> int:
        """How many blocks."""
        return sum(self.why.values())


@dataclass(frozen=True)
class Factor:
    """An optimisation's share of the whole change, averaged over the orders of switching all on."""

    name: str
    ratio: float
    low: float | None
    high: float | None


@dataclass(frozen=True)
class Attribution:
    """Shapley values of a factorial, as factors of geometric means: their product is `total`, all
    on against all off."""

    metric: str
    factors: tuple[Factor, ...]
    total: float
    low: float | None
    high: float | None
    blocks: int


@dataclass(frozen=True)
class Analysis:
    """All findings of an ablation."""

    design: str  # "leave_one_out" | "add_one_in" | "pairs" | "factorial"
    sweep: str
    baseline: str  # name of the arm that the others are changed from
    metric: str  # of `effects`
    direction: Literal["higher", "lower"]  # which is better
    effects: tuple[Effect, ...]  # one an optimisation, in order
    # the same and `noise` of further metrics, where the records have them
    others: tuple[Effect, ...]
    noise: Effect | None  # the A/A arm against the baseline, of which it is a copy
    interactions: tuple[Interaction, ...]  # of pairs and factorial
    attribution: Attribution | None  # of a factorial whose arms all have figures
    blocks: int  # of the baseline, those that are ok
    blocks_needed: int  # for a verdict over so many optimisations
    notes: tuple[str, ...]  # sentences
    gaps: tuple[Gaps, ...] = ()  # of the arms in which blocks have no figure


@dataclass(frozen=True)
class Goal:
    """What is searched for.

    Args:
        objective: a number of the record by its dotted name, e.g. "metrics.output_tokens_per_s".
        maximize: whether more of it is better.
        limits: numbers of the record, and the most that they may be.
    """

    objective: str
    maximize: bool = True
    limits: Mapping[str, float] = field(default_factory=dict)

    def excess(self, figure: Callable[[str], float]) -> float:
        """By how much a cell misses the limits, relative to them, summed; 0 within them.

        Args:
            figure: a number of the cell by its dotted name, averaged over blocks.
        """
        return sum(max(0.0, figure(name) / limit - 1) for name, limit in self.limits.items())
