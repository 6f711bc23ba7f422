"""Whether the cells of a sweep differ: all pairs of them, held to the error of an ablation."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property
from typing import Literal

from minivllm.analysis import statistics
from minivllm.analysis.cell import Cell
from minivllm.analysis.interleaving import SEVERAL, apart, in_turns
from minivllm.analysis.rows import Block, block_of, number

# "once": a cell has one block, whose scatter nobody knows.
Separation = Literal["separated", "not separated", "apart", "once"]


class Separations:
    """Whether a figure of two cells differs, of which both were chosen after looking at all.

    The interval of their ratio is that of one of all pairs (Bonferroni, see `statistics.contrast`),
    from the blocks in which all cells took turns; where these are too few, in which the two did.
    What differs by less than `statistics.SMALLEST` is the same.

    Args:
        cells: those that were ranked and did the same work.
        key: the figure's field.
    """

    def __init__(self, cells: Sequence[Cell], key: str) -> None:
        self.cells, self.key = list(cells), key

    @cached_property
    def _blocks(self) -> list[Block]:
        """Those in which all cells took turns and have the figure."""
        return self._shared(self.cells)

    def _shared(self, cells: Sequence[Cell]) -> list[Block]:
        logs = [self._logs[id(cell)] for cell in cells]
        turns = in_turns(*cells) if cells else []
        return [block for block in turns if all(block in known for known in logs)]

    @cached_property
    def _logs(self) -> dict[int, dict[Block, float]]:
        """Logarithms of the figure of each cell by block."""
        return {
            id(cell): {
                block_of(row): math.log(value)
                for row in cell.timed
                if (value := number(row.get(self.key))) is not None and value > 0
            }
            for cell in self.cells
        }

    def between(self, first: Cell, second: Cell) -> Separation:
        """Whether the two differ; both are among the cells."""
        if min(len(first.timed), len(second.timed)) < SEVERAL:
            return "once"
        if apart(first, second):
            return "apart"
        cells, blocks = self.cells, self._blocks
        if len(blocks) < SEVERAL:
            cells = [first, second]
            blocks = self._shared(cells)
        if len(blocks) < SEVERAL:
            return "not separated"
        groups = [[self._logs[id(cell)][block] for block in blocks] for cell in cells]
        signs = [(cell is first) - (cell is second) for cell in cells]
        tests = math.comb(len(self.cells), 2)
        found = statistics.contrast(groups, signs, tests, blocked=True)
        if found.low is None or found.high is None or found.low <= 1 <= found.high:
            return "not separated"
        return "separated" if abs(found.ratio - 1) >= statistics.SMALLEST else "not separated"
