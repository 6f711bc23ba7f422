"""A search with all of its trials: which of them keep within its limits, and which is the best."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from functools import cached_property

from minivllm.analysis.ablation.findings import Goal
from minivllm.analysis.cell import Cell
from minivllm.analysis.ranking import Ranking, rank
from minivllm.analysis.rows import Row, below, number, started
from minivllm.report import tables
from minivllm.report.studies import precision
from minivllm.report.tables import Column, searched

KNOWN = {
    c.key: c
    for c in (*precision.COLUMNS, *tables.COLUMNS, tables.COST, tables.WINDOW)
    if c.per is None
}
ENDINGS = ("_per_s", "_ms", "_s")  # of a number's name, by its unit


@dataclass(frozen=True)
class Trial:
    """One cell of a search.

    Args:
        number: from 1, in the order of the trials.
        index: of the cell on the page.
        excess: see `Goal.excess`; infinite where the cell failed, or has not the figures.
    """

    cell: Cell
    number: int
    index: int
    excess: float
    objective: float | None

    @property
    def within(self) -> bool:
        """Whether it kept within the limits, and so may be the best."""
        return self.excess == 0

    @property
    def tone(self) -> str:
        """How a table shows how it ended."""
        return self.cell.tone if self.within or self.cell.failed else "failed"


@dataclass(frozen=True)
class Tuning:
    """A search with all of its trials."""

    goal: Goal
    trials: tuple[Trial, ...]  # in their order

    @cached_property
    def ranking(self) -> Ranking:
        """What ranks the trials that could be the best."""
        done = [trial.cell for trial in self.kept]
        return rank(done or [trial.cell for trial in self.trials if trial.cell.ok])

    @property
    def paced(self) -> bool:
        """Whether the load sets the objective, so that it says little of the engine and nothing is
        best by it."""
        return self.ranking.sets(self.goal.objective)

    @cached_property
    def ranked(self) -> list[Trial]:
        """Best first: those within the limits by their objective, then by how far they miss
        them."""
        return sorted(self.trials, key=lambda trial: (trial.excess, self.loss(trial)))

    @property
    def kept(self) -> list[Trial]:
        """Those within the limits, best first."""
        return [trial for trial in self.ranked if trial.within]

    @cached_property
    def columns(self) -> list[Column]:
        """The objective, then the limits."""
        return [heading(name) for name in dict.fromkeys((self.goal.objective, *self.goal.limits))]

    def limit(self, column: Column) -> float | None:
        """The most that a column may be, in its unit."""
        limit = self.goal.limits.get(column.key)
        return None if limit is None else limit * column.scale

    def status(self, trial: Trial) -> str:
        """How a trial ended: within the limits or not, or its failure; and whether other processes
        were at work."""
        if trial.cell.failed:
            return trial.cell.marked_status
        well = "within" if self.goal.limits else "ok"
        ended = well if trial.within else "outside" if math.isfinite(trial.excess) else "no figure"
        return ended + ", busy" * trial.cell.busy

    def loss(self, trial: Trial) -> float:
        """The less the better; of a trial without an objective infinite."""
        if trial.objective is None:
            return math.inf
        return -trial.objective if self.goal.maximize else trial.objective


def heading(name: str) -> Column:
    """A number of the record as a column; of one that no table has, the name says what it is."""
    if name in KNOWN:
        return KNOWN[name]
    group, _, rest = name.partition(".")
    figure, *parts = (rest or group).split(".")
    last = parts.pop() if parts and not re.match(r"p\d|mean|n$", parts[-1]) else None
    named = last or figure
    ending = next((end for end in ENDINGS if named.endswith(end)), "")
    short_name = named.removesuffix(ending).replace("_", " ")
    title = short_name.upper() if group == "metrics" and ending == "_ms" else short_name
    words = [figure, title] if last else [title]
    text_of = " ".join([*words, *parts])
    return Column(
        name, text_of[:1].upper() + text_of[1:], "per s" if ending == ENDINGS[0] else None
    )


def find(rows: list[Row], cells: list[Cell], goal: Goal | None = None) -> Tuning | None:
    """The search that these records are of; None where they are of none, or of more than one sweep.

    Args:
        goal: of a search that has just ended; else that of the newest record, which may have been
            made for another one.
    """
    if goal is None and not searched(cells):
        return None
    goal = goal or _recorded(rows)
    # As they were measured: of a search that was gone on with, positions begin again.
    order = sorted(enumerate(cells), key=lambda item: (min(map(started, item[1].rows)), item[0]))
    return Tuning(goal, tuple(_trial(cell, n, i, goal) for n, (i, cell) in enumerate(order, 1)))


def _recorded(rows: list[Row]) -> Goal:
    newest = max((row for row in rows if row.get("config.sweep.objective")), key=started)
    limits = {
        name: most
        for name, value in below(newest, "config.sweep.limits").items()
        if (most := number(value)) is not None
    }
    return Goal(
        newest["config.sweep.objective"], newest.get("config.sweep.direction") != "minimize", limits
    )


def _trial(cell: Cell, n: int, index: int, goal: Goal) -> Trial:
    figures = {name: cell.mean(name) for name in (goal.objective, *goal.limits)}
    known = {name: value for name, value in figures.items() if value is not None}
    whole = not cell.failed and len(known) == len(figures)
    excess = goal.excess(known.__getitem__) if whole else math.inf
    return Trial(cell, n, index, excess, figures[goal.objective])
