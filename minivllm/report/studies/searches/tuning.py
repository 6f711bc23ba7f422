"""What a search found: the best of the trials within its limits, all trials in a table, and how the
search went."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minivllm.analysis.cells import name_columns, names_of, varying_columns
from minivllm.analysis.format import count, listing, sig
from minivllm.analysis.ranking import LATENCIES, NAMES, keeps_up
from minivllm.report import tables
from minivllm.report.figures.chart import Chart, Panel, Series
from minivllm.report.figures.opening import ForestRow, forest
from minivllm.report.figures.palette import BETTER, INK, WORSE
from minivllm.report.figures.render import Described, Plot
from minivllm.report.figures.style import short
from minivllm.report.html import Conclusion
from minivllm.report.inputs import ReportInputs
from minivllm.report.sections import MAX_ROWS, place_of, unshown
from minivllm.report.studies.base import Study
from minivllm.report.studies.searches.trials import Trial, Tuning, find
from minivllm.report.tables import Column, page_row, text
from minivllm.report.terminal import rich_table
from minivllm.report.verdict import remarks

if TYPE_CHECKING:
    from rich.table import Table

MOST_KNOBS, MOST_VALUES = 4, 12  # of the figure of values: more cannot be read


class TuningStudy(Study[Tuning]):
    """What a search found."""

    name = "tuning"
    title = "What did the search find?"
    leads = True
    template = "tuning"
    figure_names = ("tuning", "tuning_values")

    def find(self, inputs: ReportInputs) -> Tuning | None:
        return find(inputs.rows, inputs.cells, inputs.goal)

    def question(self, result: Tuning, inputs: ReportInputs) -> str:
        """Names the knobs, where any differ."""
        return "Which {knobs} are best for {model}?" if inputs.cells[0].varying else ""

    def conclusion(self, result: Tuning, inputs: ReportInputs) -> Conclusion:
        """The best trial within the limits, or the nearest to them, and how far to trust it."""
        headline, *lines = sentences(result)
        return Conclusion(headline, [*lines, *remarks(inputs.cells)])

    def picture(self, result: Tuning, inputs: ReportInputs) -> Chart | None:
        """The best trials within the limits, or where none is, all in their order."""
        objective = result.columns[0]
        trials = [one for one in result.kept or result.trials if one.objective is not None]
        rows = [ForestRow(one.cell.label, _scaled(one, objective)) for one in trials]
        caption = "Means over blocks, those within the limits first."
        return forest("What did the trials reach?", rows, objective.heading, caption)

    def statements(self, result: Tuning, inputs: ReportInputs) -> list[str]:
        return sentences(result)

    def tables(self, result: Tuning, inputs: ReportInputs) -> list[Table]:
        """The trials, best first."""
        return [table(result)]

    def replaces_summary(self, result: Tuning, inputs: ReportInputs) -> bool:
        """Always: its columns are those that the search is about."""
        return True

    def figures(self, result: Tuning, inputs: ReportInputs) -> list[Described | None]:
        """How the search went, and what came of each value that it tried."""
        return figures(result)

    def section(
        self, result: Tuning, inputs: ReportInputs, plots: list[Plot], out_dir: Path
    ) -> dict[str, Any]:
        names = name_columns([trial.cell for trial in result.trials])
        return {
            "names": names,
            "limited": bool(result.goal.limits),
            "columns": [{"title": c.title, "unit": _unit(result, c)} for c in result.columns],
            "rows": [
                page_row(
                    trial.cell, names, result.columns, place_of(trial.cell, trial.index, out_dir)
                )
                | {"number": trial.number, "status": result.status(trial), "tone": trial.tone}
                for trial in result.ranked[:MAX_ROWS]
            ],
            "unshown": unshown(result.trials, "table.csv"),
            "plots": plots,
        }


def sentences(tuning: Tuning) -> list[str]:
    """What the terminal says of it."""
    return _best(tuning) if tuning.kept else _nearest(tuning)


def _best(tuning: Tuning) -> list[str]:
    if tuning.paced:
        return _paced(tuning)
    (best, *others), objective = tuning.kept, tuning.columns[0]
    within = " within the limits" if tuning.goal.limits else ""
    headline = f"Best{within}, {_figure(best, objective)}: {best.cell.label}"
    equals = [
        trial for trial in others if text(trial.cell, objective) == text(best.cell, objective)
    ]
    if equals:
        headline += f"; the same in {listing([trial.cell.label for trial in equals], 2)}"
    lines = [f"{headline}.", _aim(tuning)]
    if figures := [_figure(best, column) for column in tuning.columns[1:]]:
        lines.append(f"Its limited figures: {listing(figures)}.")
    # What is simulated has no noise, and quality none that matters.
    exact = tuning.goal.objective.startswith("quality.") or best.cell.simulated
    if others and not exact:
        lines.append(
            f"It was chosen of {len(tuning.kept)} for looking best, and so looks better than it "
            "is: measure it again, beside the default, before believing the gain."
        )
    return lines


def _paced(tuning: Tuning) -> list[str]:
    """That the load sets what was searched for, and which trial leads by what the engine sets."""
    kept, objective = tuning.kept, tuning.columns[0]
    well = [trial for trial in kept if keeps_up(trial.cell)]
    within = " within the limits" if tuning.goal.limits else ""
    lines = [
        f"No trial is best by {objective.title}: {len(well)} of {len(kept)}{within} kept up with "
        "the pace at which requests came, so the load sets it.",
        _aim(tuning),
    ]
    for metric in LATENCIES:
        known = [
            (value, trial)
            for trial in well
            if (value := trial.cell.mean(f"metrics.{metric}")) is not None
        ]
        if known:
            value, least = min(known, key=lambda item: item[0])
            lines.append(
                f"Of these {NAMES[metric]} is lowest, {sig(value)} ms, in {least.cell.label}."
            )
            break
    lines.append(
        "To search by what the engine sets: sweep.direction=minimize "
        f"sweep.objective=metrics.{LATENCIES[0]}, or arrival=concurrency."
    )
    return lines


def _nearest(tuning: Tuning) -> list[str]:
    nearest = tuning.ranked[0]
    if not math.isfinite(nearest.excess):
        return ["No trial has the figures that the search is about.", _aim(tuning)]
    over = [
        f"{_figure(nearest, column)} against {limit:,g}"
        for column in tuning.columns
        if (limit := tuning.limit(column)) is not None
        and (value := column.mean(nearest.cell)) is not None
        and value * column.scale > limit
    ]
    return [
        f"No trial is within the limits; the nearest, {listing(over)}: {nearest.cell.label}.",
        _aim(tuning),
    ]


def _aim(tuning: Tuning) -> str:
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


def table(tuning: Tuning) -> Table:
    """The trials for the terminal, best first."""
    from rich.text import Text

    names = name_columns([trial.cell for trial in tuning.trials])
    rows_table = rich_table(
        ["trial", *names],
        [(c.title, _unit(tuning, c)) for c in tuning.columns],
        status="limits" if tuning.goal.limits else "status",
    )
    for trial in tuning.ranked:
        words = [str(trial.number), *names_of(trial.cell, names)]
        figures = [text(trial.cell, column) for column in tuning.columns]
        status = Text(tuning.status(trial), style=tables.STYLES[trial.tone])
        rows_table.add_row(*map(Text, words), status, *map(Text, figures))
    return rows_table


def _unit(tuning: Tuning, column: Column) -> str:
    limit = tuning.limit(column)
    return column.unit if limit is None else f"{column.unit} ≤ {limit:,g}".strip()


def figures(tuning: Tuning) -> list[Described | None]:
    """How the search went, and what came of each value that it tried."""
    drawn = [
        trial for trial in tuning.trials if trial.objective is not None and not trial.cell.failed
    ]
    return [_history(tuning, drawn), _values(tuning, drawn)]


def _history(tuning: Tuning, drawn: list[Trial]) -> Chart | None:
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
    headline = sentences(tuning)[0]
    alt = f"{objective.heading} of {count(len(drawn), 'trial')} in their order. {headline}"
    caption = "A point a trial, mean over blocks."
    if tuning.goal.limits:
        caption += " Only those within the limits can be the best."
    caption += _left_out(tuning, drawn)
    panel = Panel("", "trial", objective.heading, series)
    return Chart("tuning", "How did the search go?", alt, caption, [("", [panel])])


def _values(tuning: Tuning, drawn: list[Trial]) -> Chart | None:
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
                (_scaled(trial, objective), float(values.index(trial.cell.varying[knob])))
                for trial in drawn
            ]
            series = _points(tuning, drawn, places)
            panels.append(
                Panel(knob.rpartition(".")[2], objective.heading, "", series, rows=values)
            )
    if not panels:
        return None
    alt = (
        f"{objective.heading} of {count(len(drawn), 'trial')} by the value of "
        f"{listing([p.title for p in panels])}."
    )
    caption = (
        "The same trials by what each knob was set to. A search tries promising values more "
        "often, so a value with few points is not known to be bad."
    )
    if missing:
        caption += (
            f" Not drawn: {listing(missing)}, of too many values or beyond {MOST_KNOBS} knobs."
        )
    caption += _left_out(tuning, drawn)
    return Chart(
        "tuning_values", "Which values of each knob did well?", alt, caption, [("", panels)]
    )


def _left_out(tuning: Tuning, drawn: Sequence[Trial]) -> str:
    missing = len(tuning.trials) - len(drawn)
    return (
        f" {count(missing, 'trial')} failed or {'has' if missing == 1 else 'have'} no figure."
        if missing
        else ""
    )


def _points(
    tuning: Tuning, drawn: Sequence[Trial], places: Sequence[tuple[float, float]]
) -> list[Series]:
    """Trials within the limits full, the others hollow."""
    points = []
    for kept, label, colour in ((True, "within the limits", BETTER), (False, "outside", WORSE)):
        chosen = [(t, at) for t, at in zip(drawn, places, strict=True) if t.within is kept]
        if chosen:
            names = [_words(tuning, trial) for trial, _ in chosen]
            xs, ys = [x for _, (x, _) in chosen], [y for _, (_, y) in chosen]
            points.append(
                Series(
                    label if tuning.goal.limits else "trial",
                    colour,
                    xs,
                    ys,
                    hollow=not kept,
                    names=names,
                )
            )
    return points


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
