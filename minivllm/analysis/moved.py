"""Counters that show an effective setting, and changed although nobody changed a knob of their
group: the effect of a cell's own knobs is then not theirs alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from minivllm.analysis.cell import Cell, set_load
from minivllm.analysis.format import in_cells, listing, show
from minivllm.analysis.liveness import LIVE_GROUPS
from minivllm.analysis.rows import differing, distinct, number

# Counters that are the same whatever the time steps take, where nobody changes them.
SETTINGS = (
    *("quant.dtype", "quant.layers_quantised", "attention.kernel"),
    *("cache.block_size", "cache.kv_dtype", "parallel.ranks", "parallel.replicas"),
    "runtime.compiled",
)
# Counters that a load makes larger or smaller: none against some, or so many times as much, in
# every block.
WORK = ("batching.largest_batch", "speculative.drafts", "runtime.graph_replays")
MANY_TIMES = 2.0


@dataclass(frozen=True)
class Moved:
    """A counter that differs from the first cell's in a group that was set the same."""

    cell: Cell
    counter: str
    mine: str
    theirs: str

    def __str__(self) -> str:
        return f"{self.counter} is {self.mine} against {self.theirs}"


def moved(cells: Sequence[Cell]) -> list[Moved]:
    """What changed besides the groups that were set, in cells that differ from the first in knobs
    of the engine alone and have the same load."""
    if not cells or not cells[0].timed:
        return []
    base, found = cells[0], []
    for cell in cells[1:]:
        if not cell.timed or set_load(base) is not None or set_load(cell) is not None:
            continue
        fields = differing([base.timed[0], cell.timed[0]], ("config.", "choices."))
        changed = {field.split(".")[1] for field in fields} - {"measure", "sweep"}
        if not changed or not changed <= {*LIVE_GROUPS}:
            continue
        for counter in (*SETTINGS, *WORK):
            if counter.partition(".")[0] not in changed:
                mine, theirs = (distinct(c.timed, f"liveness.{counter}") for c in (cell, base))
                if mine and theirs and _differs(counter, mine, theirs):
                    found.append(Moved(cell, counter, *map(_words, (mine, theirs))))
    return found


def sentences(cells: Sequence[Cell]) -> list[str]:
    """A line on what moved, for a report."""
    where: dict[str, list[str]] = {}
    for one in moved(cells):
        where.setdefault(str(one), []).append(one.cell.mention)
    if not where:
        return []
    return [
        f"Moved although nobody set it: {in_cells(where)}; what differs there is not the effect of "
        "its own knobs alone."
    ]


def changed_weights(cells: Sequence[Cell]) -> list[str]:
    """A sentence on cells whose blocks were measured with weights of different bytes; their
    fingerprint looks at the beginning of each tensor alone."""
    several = [c.mention for c in cells if len(distinct(c.timed, "provenance.weights_digest")) > 1]
    if not several:
        return []
    return [
        f"The weights changed between blocks of {listing(several, 4)}: their files have other "
        "bytes (provenance.weights_digest), so these blocks are not of one model."
    ]


def _differs(counter: str, mine: list[Any], theirs: list[Any]) -> bool:
    """Whether no block of one cell has what a block of the other has."""
    if counter in SETTINGS:
        return not {*map(str, mine)} & {*map(str, theirs)}
    low, high = sorted(([float(number(v) or 0) for v in each] for each in (mine, theirs)), key=max)
    return max(low) < min(high) and max(low) * MANY_TIMES <= min(high)


def _words(values: list[Any]) -> str:
    return " or ".join(show(value) for value in values[:3])
