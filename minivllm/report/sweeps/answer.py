"""The answer of a plain sweep: its headline, and the picture beside it."""

from __future__ import annotations

from collections.abc import Sequence

from minivllm.analysis.cell import Cell
from minivllm.report.figures.chart import Chart
from minivllm.report.sweeps import levels, loads, precisions
from minivllm.report.sweeps.picture import of_ranking


def headline(cells: Sequence[Cell]) -> tuple[str, bool] | None:
    """Which precision, which option for which load, or what the load changes, and whether a ranking
    of all cells says something besides; None where that is the answer."""
    if (found := precisions.precisions(cells)) is not None:
        return precisions.sentence(found), False
    of_levels = levels.levels_of(cells)
    if of_levels is not None and (of_levels.is_load or len(levels.runs(of_levels)) > 1):
        return levels.sentence(of_levels), not of_levels.is_load
    if (of_load := loads.load_sweep(cells)) is not None and (text := loads.sentence(of_load)):
        return text, False
    return None


def picture(cells: Sequence[Cell]) -> Chart | None:
    """What the headline says, drawn; None for a lone cell, and where no cell has a figure."""
    if (found := precisions.precisions(cells)) is not None:
        return precisions.picture(found)
    return of_ranking(cells)
