"""Which figure of a record is compared, and which way is better."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, Literal

from minivllm.analysis.ablation.findings import Gaps
from minivllm.analysis.cell import Cell
from minivllm.analysis.ranking import THROUGHPUT
from minivllm.analysis.rows import Block, Row, block_of, number, status_of
from minivllm.bench.metrics import metrics
from minivllm.bench.records.figures import Metrics
from minivllm.errors import BadInput

USUAL = THROUGHPUT
ENERGY = "energy.joules_per_output_token"
OTHERS = (USUAL, "ttft_ms.p50", "itl_ms.p50", ENERGY)  # reported beside the first


@dataclass(frozen=True)
class MetricRef:
    """One figure of a record.

    Args:
        name: as in `ablation.metric`: a field below `metrics`, or below `energy` with that word
            before it.
        column: of a row of `load_records`.
        direction: which is better.
    """

    name: str
    column: str
    direction: Literal["higher", "lower"]

    @property
    def better(self) -> int:
        """Sign of the logarithm of a ratio that is an improvement."""
        return 1 if self.direction == "higher" else -1


def figures(cell: Cell, metric: MetricRef) -> list[tuple[Row, float]]:
    """The figure of each block that has one; none of any where one is zero or negative.

    Ratios are compared, and what is divided by zero has none: to leave such a block out would
    flatter the others. Blocks that are left out are counted by `gaps`.
    """
    values = _recorded(cell, metric)
    return [] if any(value <= 0 for _, value in values) else values


def logarithms(cell: Cell, metric: MetricRef) -> dict[Block, float]:
    """Those of the `figures`, by host and block."""
    return {block_of(row): math.log(value) for row, value in figures(cell, metric)}


def gaps(cell: Cell, metric: MetricRef) -> Gaps:
    """The blocks of a cell that have no figure to compare."""
    why = Counter(status_of(row) for row in cell.failed)
    for row in cell.timed:
        value = number(row.get(metric.column))
        if value is None:
            why["no figure"] += 1
        elif value <= 0:
            why["negative" if value else "zero"] += 1
    return Gaps(cell.label, cell.tried, dict(why))


def _recorded(cell: Cell, metric: MetricRef) -> list[tuple[Row, float]]:
    values = ((row, number(row.get(metric.column))) for row in cell.timed)
    return [(row, value) for row, value in values if value is not None]


def find_metric(name: str, knob: str = "metric") -> MetricRef:
    """The metric of this name, which `knob` asks for.

    Raises:
        BadInput: no record has such a figure, or neither way is better.
    """
    if name == ENERGY:
        return MetricRef(name, name, "lower")
    group, _, part = name.partition(".")
    known = {metric.name: metric for metric in metrics.METRICS}
    parts = _parts(getattr(Metrics(), group, None))
    if group not in known or (part not in parts if parts else bool(part)):
        names = [
            ".".join([m.name, *_parts(getattr(Metrics(), m.name))[:1]])
            for m in metrics.METRICS
            if m.direction
        ]
        raise BadInput(
            f"{knob}={name}: no such figure in a record; choose from {', '.join([*names, ENERGY])}"
        )
    direction = known[group].direction
    if direction is None:
        raise BadInput(
            f"{knob}={name}: neither more nor less of it is better, so there is nothing to find"
        )
    return MetricRef(name, f"metrics.{name}", direction)


def _parts(value: Any) -> list[str]:
    """Fields of a nested figure, those that are not counts, the usual one first."""
    names = [f.name for f in fields(value) if f.name != "n"] if is_dataclass(value) else []
    usual = ("p50", "output_tokens_per_s")
    return sorted(names, key=lambda name: name not in usual)
