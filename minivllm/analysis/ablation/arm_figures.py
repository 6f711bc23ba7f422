"""The figures of an ablation's arms, block by block."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np

from minivllm.analysis import statistics
from minivllm.analysis.ablation.design import AGAIN, Chosen, Contrast
from minivllm.analysis.cell import Cell
from minivllm.analysis.interleaving import apart, pairable, untested
from minivllm.analysis.liveness import liveness
from minivllm.analysis.metric import MetricRef, logarithms
from minivllm.analysis.rows import Block


@dataclass(frozen=True)
class ArmFigures:
    """What each arm has of a metric, as logarithms by block.

    Args:
        cells: one an arm, the A/A arm included.
    """

    cells: list[Cell]

    @cached_property
    def arms(self) -> dict[Chosen, Cell]:
        """The cell of each set of optimisations, without the A/A arm."""
        return {frozenset(c.first("ablation.on") or ()): c for c in self.cells if c.arm != AGAIN}

    def measured(
        self, contrast: Contrast, metric: MetricRef
    ) -> tuple[list[tuple[Chosen, Chosen]], np.ndarray[Any, Any]]:
        """The pairs of which both arms have figures, and a mean log-ratio for each block that has
        them all."""
        pairs = [
            pair for pair in contrast.pairs if all(self.logs(chosen, metric) for chosen in pair)
        ]
        return pairs, self.by_block(
            [chosen for pair in pairs for chosen in pair],
            metric,
            lambda log: float(np.mean([log[with_] - log[without] for with_, without in pairs])),
        )

    def by_block(
        self,
        arms: Sequence[Chosen],
        metric: MetricRef,
        value: Callable[[dict[Chosen, float]], float],
    ) -> np.ndarray[Any, Any]:
        """`value` of the logarithms of the arms' figures, for each block in which all of them have
        one and took turns; of arms that were measured apart, for each block."""
        logs = {chosen: self.logs(chosen, metric) for chosen in arms}
        common = set.intersection(*map(set, logs.values())) if logs else set()
        cells = [self.arms[chosen] for chosen in logs if logs[chosen]]
        blocks = pairable(common, *cells) if common else []
        return np.array(
            [value({chosen: by[block] for chosen, by in logs.items()}) for block in blocks],
            float,
        )

    def logs(self, chosen: Chosen, metric: MetricRef) -> dict[Block, float]:
        """The logarithms of an arm's figures by block; empty where it has none."""
        cell = self.arms.get(chosen)
        return {} if cell is None else logarithms(cell, metric)

    def live(self, pairs: Sequence[tuple[Chosen, Chosen]]) -> bool:
        """Whether in any pair some counter of what was changed differs, or nothing counts it."""
        for with_, without in pairs:
            cells = self.arms[without], self.arms[with_]
            if cells[0].cell_id == cells[1].cell_id:
                continue  # no knob differs at all
            verdicts = liveness(list(cells))
            if not verdicts or any(item.verdict != "not live" for item in verdicts):
                return True
        return False

    def estimate(
        self,
        arms: Iterable[Chosen],
        logs: np.ndarray[Any, Any],
        of: Callable[[np.ndarray[Any, Any]], statistics.Estimate] = statistics.paired,
    ) -> statistics.Estimate | None:
        """The ratio of what `by_block` gave of the arms; without an interval and a test where they
        were measured apart, None where it gave nothing."""
        if not len(logs):
            return None
        return untested(of(logs)) if self.apart(arms) else of(logs)

    def apart(self, arms: Iterable[Chosen]) -> bool:
        """Whether the arms did not take turns, so that the ratio has in it what drifted in
        between."""
        return apart(*(self.arms[chosen] for chosen in dict.fromkeys(arms)))

    def lacking(
        self, arms: Collection[Chosen], metric: MetricRef
    ) -> Literal["failed", "not measured"]:
        """Whether some arm failed, or all that lacks is still to be measured."""
        there = [cell for chosen in arms if (cell := self.arms.get(chosen)) is not None]
        return "failed" if any(not logarithms(cell, metric) for cell in there) else "not measured"
