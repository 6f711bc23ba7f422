"""Whether the blocks of a cell lie on one level: one that lies apart from the others, or two
levels, whose mean is none of its states."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from minivllm.analysis.cell import Cell
from minivllm.analysis.format import sig
from minivllm.analysis.ranking import rank
from minivllm.analysis.rows import number, started

FEWEST_BLOCKS = 3  # of which one may lie apart from the others
# The gap between two levels: at least this share of the median, and so many times the range within
# either; fewer times for the first block, which is the one that may not be warm.
GAP, RANGES, RANGES_OF_FIRST = 0.15, 3.0, 1.0
NAMED = 3  # cells


def levels(values: Sequence[float]) -> tuple[list[int], list[int]] | None:
    """The places of the fewer and of the more values, where they lie on two levels.

    Args:
        values: in the order in which they were measured.

    Returns:
        None where the greatest gap between neighbours is no larger than chance makes it, or there
        are too few values to say.
    """
    order = sorted(range(len(values)), key=values.__getitem__)
    if len(order) < FEWEST_BLOCKS:
        return None
    ranked = [values[i] for i in order]
    gap, cut = max((b - a, i) for i, (a, b) in enumerate(pairwise(ranked), 1))
    within = max(ranked[cut - 1] - ranked[0], ranked[-1] - ranked[cut])
    few, many = sorted((sorted(order[:cut]), sorted(order[cut:])), key=len)
    times = RANGES_OF_FIRST if few == [0] else RANGES
    least = max(GAP * abs(ranked[len(ranked) // 2]), times * within)
    return None if gap < least else (few, many)


def apart(cells: Sequence[Cell]) -> list[str]:
    """A sentence on each cell whose blocks lie on two levels, in the order in which they were
    measured; of simulated ones none."""
    lines = [line for cell in cells if not cell.simulated and (line := _apart(cell))]
    more = len(lines) - NAMED
    if more > 0:
        lines[NAMED:] = [f"Blocks lie apart in {more} more cell{'s' * (more > 1)}."]
    return lines


def _apart(cell: Cell) -> str | None:
    metric = rank([cell]).metrics[0]
    rows = sorted(cell.timed, key=started)
    known = [value for row in rows if (value := number(row.get(f"metrics.{metric}"))) is not None]
    if (found := levels(known)) is None:
        return None
    few, many = ([known[i] for i in places] for places in found)
    unit = "output tokens/s" if metric.endswith("tokens_per_s") else "ms (E2E p50)"
    against = f"{_range(few)} against {_range(many)} {unit}"
    count = len(few)
    if found[0] == [0]:
        which = "the first block lies apart from the others"
    elif found[0] == list(range(count)):
        which = f"the first {count} of {len(known)} blocks lie apart from the others"
    elif count == 1:
        which = f"block {found[0][0] + 1} of {len(known)} lies apart from the others"
    else:
        which = f"its {len(known)} blocks lie on two levels, apart from each other"
    return f"{cell.mention}: {which}, {against}; the mean over all is none of these states."


def _range(values: Sequence[float]) -> str:
    low, high = sig(min(values)), sig(max(values))
    return low if low == high else f"{low} to {high}"
