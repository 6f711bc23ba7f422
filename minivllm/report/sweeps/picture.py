"""The picture beside the headline of a plain sweep."""

from __future__ import annotations

from collections.abc import Sequence

from minivllm.analysis.cell import Cell, Summary
from minivllm.analysis.metric import MetricRef, find_metric
from minivllm.analysis.ranking import NAMES, rank
from minivllm.report.figures.chart import Chart
from minivllm.report.figures.opening import (
    MOST_ROWS,
    ForestRow,
    LoadLine,
    LoadPoint,
    forest,
    over_loads,
)
from minivllm.report.figures.palette import BLUE, GREY, ORANGE
from minivllm.report.figures.plots import THROUGHPUT, time_unit
from minivllm.report.sweeps.levels import Levels, levels_of, runs
from minivllm.report.sweeps.loads import LoadSweep, load_sweep

BLOCKS = "least and greatest block"


def of_ranking(cells: Sequence[Cell]) -> Chart | None:
    """The best at each level, throughput and latency against the load, or a row a cell; None for a
    lone cell, and where no cell has a figure."""
    done = [cell for cell in cells if cell.summary(THROUGHPUT)]
    if len(done) < 2:
        return None
    levels = levels_of(cells)
    if levels is not None and (levels.is_load or len(runs(levels)) > 1):
        return by_level(levels)
    if (loads := load_sweep(cells)) is not None:
        return against_load(loads)
    return by_cell(done, cells[0])


def by_level(found: Levels, costs: dict[str, str] | None = None) -> Chart | None:
    """How far each option is from the first one, at each level.

    Args:
        costs: words beside options in the legend, by their names.
    """
    options = found.options
    numbers = [level.value for level in found.levels]
    as_numbers = found.is_load and None not in numbers
    lines = []
    for index, option in enumerate(options):
        points, wins = [], set()
        for place, level in enumerate(found.levels):
            x = (level.value or 0.0) if as_numbers else float(place)
            base = next((s for c, s in level.ranked if found.named(c) == options[0]), None)
            own = next(((c, s) for c, s in level.ranked if found.named(c) == option), None)
            if base is None or own is None:
                continue
            cell, stat = own
            points.append(_relative(x, stat, base, found.metric))
            if cell in level.best:
                wins.add(x)
        words = (costs or {}).get(option, "")
        label = f"{option}: {words}" if words else option
        lines.append(LoadLine.numbered(index, label, points, wins=frozenset(wins)))
    y_label = f"{NAMES[found.metric.name]}, {options[0]} = 1"
    better = "higher" if found.metric.better > 0 else "lower"
    return over_loads(
        f"Which {found.option} at which {'load' if found.is_load else found.of}?",
        [("", y_label, lines)],
        found.of,
        f"{y_label}: {better} is better.",
        ticks=() if as_numbers else [level.name for level in found.levels],
        even=1.0,
        span=BLOCKS,
    )


def _relative(x: float, stat: Summary, base: Summary, metric: MetricRef) -> LoadPoint:
    low, high = (stat.low / base.mean, stat.high / base.mean) if stat.spread else (None, None)
    return LoadPoint(x, stat.mean / base.mean, low, high)


def against_load(found: LoadSweep) -> Chart | None:
    """Throughput and latency against the load."""
    panels = [("", "output tokens/s", [_line(found, THROUGHPUT, 1.0, BLUE)])]
    if (metric := found.latency) is not None:
        key = f"metrics.{metric}"
        scale, unit = time_unit([cell.mean(key) or 0.0 for _, cell in found.cells])
        panels.append(("", f"{NAMES[metric]}, {unit}", [_line(found, key, scale, ORANGE)]))
    return over_loads("What does the load change?", panels, found.title, "", span=BLOCKS)


def _line(found: LoadSweep, key: str, scale: float, colour: str) -> LoadLine:
    points = []
    for load, cell in found.cells:
        if (stat := cell.summary(key)) is not None:
            points.append(LoadPoint(load, stat.mean * scale, *stat.ends(scale)))
    return LoadLine("", colour, points)


def by_cell(done: Sequence[Cell], base: Cell) -> Chart | None:
    """A row a cell, the best first: what ranks them."""
    metric = find_metric(rank(list(done)).metrics[0])
    known = [(cell, stat) for cell in done if (stat := cell.summary(metric.column))]
    known.sort(key=lambda pair: -metric.better * pair[1].mean)
    if not known:
        return None
    if (first := next((pair for pair in known[MOST_ROWS:] if pair[0] is base), None)) is not None:
        known = [*known[: MOST_ROWS - 1], first]
    scale, unit = (1.0, "") if metric.better > 0 else time_unit([known[0][1].mean])
    rest = f" Shown: {len(known)} of {len(done)} cells." if len(known) < len(done) else ""
    rows = []
    for cell, stat in known:
        (low, high), colour = stat.ends(scale), GREY if cell is base else BLUE
        rows.append(ForestRow(cell.label, stat.mean * scale, low, high, colour))
    noun, better = NAMES[metric.name], "right" if metric.better > 0 else "left"
    return forest(
        "How do they compare?",
        rows,
        f"{noun}{', ' * bool(unit)}{unit}",
        f"Further to the {better} is better; the first cell is grey.{rest}",
        span=BLOCKS,
    )
