"""What a search found: its trials by what they are worth, and the best of those within the limits."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from minivllm.analysis.cells import Cell, name_columns, names_of, started, varying_columns
from minivllm.analysis.findings import Goal
from minivllm.analysis.format import count, listing, sig
from minivllm.analysis.ranking import LATENCIES, NAMES, Ranking, keeps_up, rank
from minivllm.analysis.rows import Row, below, number
from minivllm.report import tables
from minivllm.report.figures.chart import Chart, Panel, Series
from minivllm.report.figures.palette import BETTER, INK, WORSE
from minivllm.report.figures.render import finish
from minivllm.report.figures.style import Plot, short
from minivllm.report.sections import MAX_ROWS, place_of, unshown
from minivllm.report.studies import precision
from minivllm.report.tables import Column, entries, searched, text
from minivllm.report.terminal import rich_table
from minivllm.report.verdict import Verdict, remarks

if TYPE_CHECKING:
    from pathlib import Path

    from rich.table import Table

KNOWN = {c.key: c for c in (*precision.COLUMNS, *tables.COLUMNS, tables.COST, tables.WINDOW) if c.per is None}
UNITS = (("_per_s", "per s"), ("_ms", "ms"), ("_s", "s"))  # endings of a number's name
MOST_KNOBS, MOST_VALUES = 4, 12  # of the figure of values: more cannot be read


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
        """Whether the load sets the objective, so that it says little of the engine and nothing is best by it."""
        return self.ranking.sets(self.goal.objective)

    @cached_property
    def ranked(self) -> list[Trial]:
        """Best first: those within the limits by their objective, then by how far they miss them."""
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
        """How a trial ended: within the limits or not, or its failure; and whether other processes were at work."""
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
    ending, unit = next(((end, unit) for end, unit in UNITS if named.endswith(end)), ("", ""))
    if group == "memory" and not ending:
        unit = "GB"
    short_name = named.removesuffix(ending).replace("_", " ")
    title = short_name.upper() if group == "metrics" and unit == "ms" else short_name
    words = [figure, title] if last else [title]
    text_of = " ".join([*words, *parts])
    return Column(name, text_of[:1].upper() + text_of[1:], unit, 1e-9 if unit == "GB" else 1.0)


def find(rows: list[Row], cells: list[Cell], goal: Goal | None = None) -> Tuning | None:
    """The search that these records are of; None where they are of none, or of more than one sweep.

    Args:
        goal: of a search that has just ended; else that of the newest record, which may have been made for another one.
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
    return Goal(newest["config.sweep.objective"], newest.get("config.sweep.direction") != "minimize", limits)


def _trial(cell: Cell, n: int, index: int, goal: Goal) -> Trial:
    figures = {name: cell.mean(name) for name in (goal.objective, *goal.limits)}
    known = {name: value for name, value in figures.items() if value is not None}
    whole = not cell.failed and len(known) == len(figures)
    excess = goal.excess(known.__getitem__) if whole else math.inf
    return Trial(cell, n, index, excess, figures[goal.objective])


# ---- words


def verdict(tuning: Tuning, cells: list[Cell]) -> Verdict:
    """The best trial within the limits, or the nearest to them, and how far to trust it."""
    headline, *lines = sentences(tuning)
    return Verdict(headline, [*lines, *remarks(cells)])


def sentences(tuning: Tuning) -> list[str]:
    """What the terminal says of it."""
    return _best(tuning) if tuning.kept else _nearest(tuning)


def _best(tuning: Tuning) -> list[str]:
    if tuning.paced:
        return _paced(tuning)
    (best, *others), objective = tuning.kept, tuning.columns[0]
    within = " within the limits" if tuning.goal.limits else ""
    headline = f"Best{within}, {_figure(best, objective)}: {best.cell.label}"
    equals = [trial for trial in others if text(trial.cell, objective) == text(best.cell, objective)]
    if equals:
        headline += f"; the same in {listing([trial.cell.label for trial in equals], 2)}"
    lines = [f"{headline}.", _asked(tuning)]
    if figures := [_figure(best, column) for column in tuning.columns[1:]]:
        lines.append(f"Its limited figures: {listing(figures)}.")
    # What is simulated has no noise, and quality none that matters.
    exact = tuning.goal.objective.startswith("quality.") or best.cell.simulated
    if others and not exact:
        lines.append(
            f"It was chosen of {len(tuning.kept)} for looking best, and so looks better than it is: measure it again, beside "
            "the default, before believing the gain."
        )
    return lines


def _paced(tuning: Tuning) -> list[str]:
    """That the load sets what was searched for, and which trial leads by what the engine sets."""
    kept, objective = tuning.kept, tuning.columns[0]
    well = [trial for trial in kept if keeps_up(trial.cell)]
    within = " within the limits" if tuning.goal.limits else ""
    lines = [
        f"No trial is best by {objective.title}: {len(well)} of {len(kept)}{within} kept up with the pace at which requests "
        "came, so the load sets it.",
        _asked(tuning),
    ]
    for metric in LATENCIES:
        known = [
            (value, trial) for trial in well if (value := trial.cell.mean(f"metrics.{metric}")) is not None
        ]
        if known:
            value, least = min(known, key=lambda item: item[0])
            lines.append(f"Of these {NAMES[metric]} is lowest, {sig(value)} ms, in {least.cell.label}.")
            break
    lines.append(
        f"To search by what the engine sets: sweep.direction=minimize sweep.objective=metrics.{LATENCIES[0]}, or "
        "arrival=concurrency."
    )
    return lines


def _nearest(tuning: Tuning) -> list[str]:
    nearest = tuning.ranked[0]
    if not math.isfinite(nearest.excess):
        return ["No trial has the figures that the search is about.", _asked(tuning)]
    over = [
        f"{_figure(nearest, column)} against {limit:,g}"
        for column in tuning.columns
        if (limit := tuning.limit(column)) is not None
        and (value := column.mean(nearest.cell)) is not None
        and value * column.scale > limit
    ]
    return [
        f"No trial is within the limits; the nearest, {listing(over)}: {nearest.cell.label}.",
        _asked(tuning),
    ]


def _asked(tuning: Tuning) -> str:
    objective, limits = tuning.columns[0], []
    for column in tuning.columns:
        if (limit := tuning.limit(column)) is not None:
            limits.append(f"{column.title} ≤ {limit:,g} {column.unit}".rstrip())
    what = f"Searched for: the {'most' if tuning.goal.maximize else 'least'} {objective.heading}"
    if not limits:
        return f"{what}, in {count(len(tuning.trials), 'trial')}."
    kept = f"{len(tuning.kept)} of {count(len(tuning.trials), 'trial')}"
    return f"{what} with {listing(limits)}: {kept} kept within these limits."


def _figure(trial: Trial, column: Column) -> str:
    return f"{column.title} {text(trial.cell, column)} {column.unit}".rstrip()


# ---- tables and figures


def table(tuning: Tuning) -> Table:
    """The trials for the terminal, best first."""
    from rich.text import Text

    names = name_columns([trial.cell for trial in tuning.trials])
    found = rich_table(
        ["trial", *names],
        [(c.title, _unit(tuning, c)) for c in tuning.columns],
        status="limits" if tuning.goal.limits else "status",
    )
    for trial in tuning.ranked:
        words = [str(trial.number), *names_of(trial.cell, names)]
        figures = [text(trial.cell, column) for column in tuning.columns]
        status = Text(tuning.status(trial), style=tables.STYLES[trial.tone])
        found.add_row(*map(Text, words), status, *map(Text, figures))
    return found


def _unit(tuning: Tuning, column: Column) -> str:
    limit = tuning.limit(column)
    return column.unit if limit is None else f"{column.unit} ≤ {limit:,g}".strip()


def section(tuning: Tuning | None, plots: list[Plot], out_dir: Path) -> dict[str, Any] | None:
    """The section as plain data for its template."""
    if tuning is None:
        return None
    names = name_columns([trial.cell for trial in tuning.trials])
    return {
        "names": names,
        "limited": bool(tuning.goal.limits),
        "columns": [{"title": c.title, "unit": _unit(tuning, c)} for c in tuning.columns],
        "rows": [
            {
                "number": trial.number,
                "names": names_of(trial.cell, names),
                "status": tuning.status(trial),
                "tone": trial.tone,
                "href": place_of(trial.cell, trial.index, out_dir),
                "figures": entries(trial.cell, tuning.columns),
            }
            for trial in tuning.ranked[:MAX_ROWS]
        ],
        "unshown": unshown(tuning.trials, "table.csv"),
        "plots": plots,
    }


def figures(tuning: Tuning | None) -> list[Plot]:
    """How the search went, and what came of each value that it tried."""
    if tuning is None:
        return []
    drawn = [trial for trial in tuning.trials if trial.objective is not None and not trial.cell.failed]
    return [plot for draw in (_history, _values) if (plot := draw(tuning, drawn)) is not None]


def _history(tuning: Tuning, drawn: list[Trial]) -> Plot | None:
    """The objective trial by trial, and the best so far."""
    if len(drawn) < 2:
        return None
    objective = tuning.columns[0]
    points = [(float(trial.number), _scaled(trial, objective)) for trial in drawn]
    series = _points(tuning, drawn, points)
    best: list[Trial] = []
    for trial in drawn:
        if trial.within and (not best or tuning.loss(trial) < tuning.loss(best[-1])):
            best.append(trial)
    if best and not tuning.paced:
        xs = [float(number) for number in (*(trial.number for trial in best), len(tuning.trials))]
        ys = [_scaled(trial, objective) for trial in (*best, best[-1])]
        series.insert(0, Series("best so far", INK, xs, ys, "steps"))
    said = sentences(tuning)[0]
    alt = f"{objective.heading} of {count(len(drawn), 'trial')} in their order. {said}"
    caption = "A point a trial, mean over blocks."
    if tuning.goal.limits:
        caption += " Only those within the limits can be the best."
    caption += _left_out(tuning, drawn)
    panel = Panel("", "trial", objective.heading, series)
    return finish(Chart("tuning", "How did the search go?", alt, caption, [("", [panel])]))


def _values(tuning: Tuning, drawn: list[Trial]) -> Plot | None:
    """The objective by the value of each knob, a panel a knob."""
    objective = tuning.columns[0]
    panels: list[Panel] = []
    missing: list[str] = []
    columns = varying_columns([trial.cell for trial in tuning.trials])
    knobs = [title for key, title in columns.items() if key.startswith(("choices.", "config."))]
    for knob in knobs:
        values = sorted({trial.cell.varying[knob] for trial in drawn}, key=_rank)
        if len(values) > MOST_VALUES or len(panels) == MOST_KNOBS:
            missing.append(knob)
        elif len(values) > 1:
            places = [
                (_scaled(trial, objective), float(values.index(trial.cell.varying[knob]))) for trial in drawn
            ]
            series = _points(tuning, drawn, places)
            panels.append(Panel(knob.rpartition(".")[2], objective.heading, "", series, rows=values))
    if not panels:
        return None
    alt = f"{objective.heading} of {count(len(drawn), 'trial')} by the value of {listing([p.title for p in panels])}."
    caption = (
        "The same trials by what each knob was set to. A search tries promising values more often, so a value with few "
        "points is not known to be bad."
    )
    if missing:
        caption += f" Not drawn: {listing(missing)}, of too many values or beyond {MOST_KNOBS} knobs."
    caption += _left_out(tuning, drawn)
    return finish(Chart("tuning_values", "Which values of each knob did well?", alt, caption, [("", panels)]))


def _left_out(tuning: Tuning, drawn: Sequence[Trial]) -> str:
    missing = len(tuning.trials) - len(drawn)
    return (
        f" {count(missing, 'trial')} failed or {'has' if missing == 1 else 'have'} no figure."
        if missing
        else ""
    )


def _points(tuning: Tuning, drawn: Sequence[Trial], places: Sequence[tuple[float, float]]) -> list[Series]:
    """Trials within the limits full, the others hollow."""
    found = []
    for kept, label, colour in ((True, "within the limits", BETTER), (False, "outside", WORSE)):
        chosen = [(t, at) for t, at in zip(drawn, places, strict=True) if t.within is kept]
        if chosen:
            names = [_words(tuning, trial) for trial, _ in chosen]
            xs, ys = [x for _, (x, _) in chosen], [y for _, (_, y) in chosen]
            found.append(
                Series(label if tuning.goal.limits else "trial", colour, xs, ys, hollow=not kept, names=names)
            )
    return found


def _scaled(trial: Trial, objective: Column) -> float:
    return (trial.objective or 0.0) * objective.scale


def _words(tuning: Tuning, trial: Trial) -> str:
    """What the pointer shows of a trial."""
    figures = ", ".join(_figure(trial, column) for column in tuning.columns)
    return f"{trial.number}: {short(trial.cell.label, 60)}: {figures}"


def _rank(value: str) -> tuple[bool, float, str]:
    """Numbers in their order, before words."""
    try:
        return False, float(value), value
    except ValueError:
        return True, 0.0, value
