"""One figure of a cell that two runs share: its ratio, and the verdict on it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from minivllm.analysis import statistics
from minivllm.analysis.cell import DEVICE, Cell, like_for_like
from minivllm.analysis.format import count, p_value
from minivllm.analysis.interleaving import took_turns
from minivllm.analysis.metric import MetricRef, gaps, logarithms

ChangeVerdict = Literal["slower", "faster", "none", "undecided", "failed", "not comparable"]


@dataclass(frozen=True)
class Compared:
    """One figure of a cell in both runs. Ratios are after / before: above 1 it has grown, whichever
    way is better."""

    label: str
    cell_id: str
    before: float | None  # arithmetic means over blocks, as in every table
    after: float | None
    blocks: tuple[int, int]  # with figures, before and after
    method: Literal["paired", "two samples"] | None  # None: there is nothing to test
    ratio: float | None
    low: float | None
    high: float | None
    p_value: float | None
    p_holm: float | None  # corrected for the number of cells
    # "slower" is worse, "undecided" that it may be much worse, "failed" that only the second run
    # has no figures, or failures
    verdict: ChangeVerdict
    # the greatest that the interval does not exclude, a fraction of before
    loss: float | None = None
    reason: str = ""  # why, where the figures alone do not say
    metric: str = ""
    direction: Literal["higher", "lower"] = "higher"  # which is better


@dataclass
class Draft:
    """A cell of both runs on the way to a verdict."""

    first: Cell
    second: Cell
    metric: MetricRef

    def __post_init__(self) -> None:
        self.before, self.after = (
            logarithms(cell, self.metric) for cell in (self.first, self.second)
        )
        self.method: Literal["paired", "two samples"] = (
            "paired" if took_turns(self.first, self.second) else "two samples"
        )
        self.problem: str | None = None
        self.needed = statistics.FEWEST  # blocks
        if not self.before:
            self.problem = (
                f"the first run has no {self.metric.name} of it ({_why(self.first, self.metric)})"
            )
        elif not self._is_comparable():
            self.problem = "other devices or other requests; compare runs of one machine"
        self.is_comparable = self.problem is None  # so that at most the blocks are too few

    def _is_comparable(self) -> bool:
        """Whether both are of one machine and the same requests, as far as a run that has no
        figures can say."""
        if self.after:
            return like_for_like(self.first, self.second)
        return len({cell.first(DEVICE) for cell in (self.first, self.second)} - {None}) < 2

    @property
    def broken(self) -> bool:
        """Whether only the second run failed."""
        return self.problem is None and not self.after

    def estimate(self, tests: int) -> statistics.Estimate | None:
        """The ratio; sets `problem` where so few blocks could not give a verdict."""
        if self.problem is not None or self.broken:
            return None
        n, m = len(self.before), len(self.after)
        if self.method == "paired":
            shared = sorted(self.before.keys() & self.after.keys())
            needed, enough = (
                statistics.blocks_needed(tests),
                len(shared) >= statistics.blocks_needed(tests),
            )
            estimate = statistics.paired(
                [self.after[block] - self.before[block] for block in shared]
            )
        else:
            needed = statistics.repeats_needed(tests)
            enough = 2 / math.comb(n + m, n) <= statistics.ALPHA / tests
            estimate = statistics.two_sample([*self.before.values()], [*self.after.values()])
        if not enough:
            self.problem = (
                f"{n} and {m} blocks are too few for a verdict: use measure.repeats={needed} in "
                "both"
            )
        self.needed = max(self.needed, needed)
        return estimate

    def _loss(self, estimate: statistics.Estimate | None) -> float | None:
        """The greatest loss within the interval, as a fraction of before; 0 where it holds none."""
        if estimate is None or estimate.low is None or estimate.high is None:
            return None
        return max(0.0, 1 - estimate.low if self.metric.better > 0 else estimate.high - 1)

    def compared(
        self,
        estimate: statistics.Estimate | None,
        p_holm: float | None,
        threshold: float,
        margin: float,
    ) -> Compared:
        """The comparison with its verdict, from an estimate of the ratio and its p-value among all
        that is tested."""
        loss = self._loss(estimate)
        verdict, reason = self._found(estimate, p_holm, threshold)
        if verdict == "none" and (loss is None or loss > margin):
            verdict, reason = "undecided", self._not_excluded(loss)
        newly = self.second.crashed and not self.first.crashed
        if self.is_comparable and self.after and newly and verdict != "slower":
            verdict, reason = (
                "failed",
                f"{count(self.second.crashed, 'block')} failed, in the second run only",
            )
        return Compared(
            label=self.first.label,
            cell_id=self.first.cell_id,
            before=_mean(self.before),
            after=_mean(self.after),
            metric=self.metric.name,
            direction=self.metric.direction,
            blocks=(len(self.before), len(self.after)),
            method=self.method if estimate else None,
            ratio=estimate.ratio if estimate else None,
            low=estimate.low if estimate else None,
            high=estimate.high if estimate else None,
            p_value=estimate.p_value if estimate else None,
            p_holm=p_holm,
            verdict=verdict,
            loss=loss,
            reason=reason,
        )

    def _found(
        self, estimate: statistics.Estimate | None, p_holm: float | None, threshold: float
    ) -> tuple[ChangeVerdict, str]:
        """What the two runs show, and why it is no more than that."""
        if self.broken:
            why = _why(self.second, self.metric)
            return "failed", f"the second run has no {self.metric.name} of it ({why})"
        if self.problem is not None:
            return "not comparable", self.problem
        if estimate is None or p_holm is None:
            return "none", ""
        if p_holm <= statistics.ALPHA:
            change = estimate.ratio - 1
            if abs(change) > threshold:
                return "faster" if change * self.metric.better > 0 else "slower", ""
            return "none", f"found, but of no more than task.threshold, {100 * threshold:g} %"
        if (estimate.p_value or 0) <= statistics.ALPHA:
            return "none", (
                f"p is {p_value(estimate.p_value)} by itself and {p_value(p_holm)} among all "
                "that is tested (Holm); the interval is for it alone"
            )
        return "none", ""

    def _not_excluded(self, loss: float | None) -> str:
        """Why a loss may be there that was not found."""
        if loss is None:
            return (
                f"{len(self.before)} and {len(self.after)} blocks give no interval, so no loss "
                f"is excluded: use measure.repeats={self.needed} in both"
            )
        return (
            f"a loss of {percent(loss, math.floor)} is not excluded: "
            "use a quieter machine or more blocks (measure.repeats)"
        )


def _why(cell: Cell, metric: MetricRef) -> str:
    """Why a cell has no figure."""
    why = gaps(cell, metric).why
    zeros = why.get("zero", 0)
    if zeros or why.get("negative"):
        what, number = ("0", zeros) if zeros else ("negative", why["negative"])
        return f"it is {what} in {count(number, 'block')}, and nothing can be divided by that"
    return "it is in no record" if cell.timed else cell.status_text


def percent(share: float, towards: Callable[[float], int]) -> str:
    """A share to two digits, rounded up or down, so that no more is claimed of it than is so."""
    if not share:
        return "0 %"
    step = 10.0 ** (math.floor(math.log10(100 * share)) - 1)
    nearest = round(100 * share / step, 6)  # 5.1 is no 5.2 for the sake of its last bit
    return f"{towards(nearest) * step:.6g} %"


def _mean(logs: dict[Any, float]) -> float | None:
    return math.fsum(map(math.exp, logs.values())) / len(logs) if logs else None
