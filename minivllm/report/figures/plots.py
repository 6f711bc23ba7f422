"""Bars and ranges that compare cells: throughput and latency."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from minivllm.analysis.cell import Cell, Summary
from minivllm.analysis.format import count, sig
from minivllm.report.figures.cell_styles import CellStyles
from minivllm.report.figures.palette import INK, RULE, VERMILION
from minivllm.report.figures.style import (
    MAX_BARS,
    Drawing,
    Sheet,
    beside,
    canvas,
    heading,
    legend_below,
    mark,
    mark_failure,
    patch,
    plain_ticks,
    rows_axis,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

THROUGHPUT = "metrics.output_tokens_per_s"
LEVELS = {"p50": "o", "p90": "|", "p95": "d", "p99": "D"}  # percentiles and their marks
LATENCIES = {
    "metrics.ttft_ms": "TTFT (time to first token)",
    "metrics.itl_ms": "ITL (between tokens)",
}


def cut(cells: list[Cell]) -> tuple[list[Cell], str]:
    """The cells that a plot of rows has room for, and a sentence on the others."""
    if len(cells) <= MAX_BARS:
        return cells, ""
    return cells[
        :MAX_BARS
    ], f" The first {MAX_BARS} of {len(cells):,} cells; table.csv has them all."


def failures_note(shown: list[Cell]) -> str:
    """That rows without a bar failed."""
    failed = sum(not cell.ok for cell in shown)
    return (
        f" {count(failed, 'cell')} failed and {'is' if failed == 1 else 'are'} hatched."
        if failed
        else ""
    )


@dataclass(frozen=True)
class _Bar:
    """A row of `throughput`."""

    name: str
    colour: str
    stat: Summary | None
    status: str


def throughput(cells: list[Cell], styles: CellStyles) -> Drawing | None:
    """Output tokens/s by cell, with the range over blocks; None for a lone cell, whose bar would
    say nothing."""
    if len(cells) < 2:
        return None
    shown, rest = cut(cells)
    figures = [cell.summary(THROUGHPUT) for cell in shown]
    top = max((f.high for f in figures if f), default=0.0)
    if top <= 0 and not any(not cell.ok for cell in shown):
        return None
    bars = [
        _Bar(styles[cell.label].name, styles[cell.label].colour, stat, cell.status_text)
        for cell, stat in zip(shown, figures, strict=True)
    ]
    legend = {f"{styles.column}={value}": colour for value, colour in styles.colours.items()}
    best = max(
        (c for c in shown if c.mean(THROUGHPUT)),
        key=lambda c: c.mean(THROUGHPUT) or 0.0,
        default=None,
    )
    alt = f"Horizontal bars of output tokens per second for {count(len(shown), 'cell')}."
    alt += (
        f" The longest is {best.label} at {sig(best.mean(THROUGHPUT))}."
        if best
        else " None has a figure."
    )
    whiskers = (
        " Whiskers: least and greatest block." if any(f and f.spread for f in figures) else ""
    )
    note = failures_note(shown)
    caption = (
        "Output tokens per second, from first arrival to last "
        f"token.{whiskers}{note}{styles.note}{rest}"
    )
    return Drawing(
        "throughput",
        "How many tokens a second does each give?",
        alt + note,
        caption,
        partial(_draw_throughput, bars, legend, top),
    )


def _draw_throughput(
    bars: Sequence[_Bar], legend: dict[str, str], top: float, sheet: Sheet
) -> Figure:
    figure, ax = canvas(height=sheet.height(len(bars)), sheet=sheet)
    right = top or 1.0
    for y, bar in enumerate(bars):
        if (stat := bar.stat) is None:
            mark_failure(ax, y, bar.status, sheet, right=right)
            continue
        ax.barh(y, stat.mean, height=sheet.bar, color=bar.colour)
        if stat.spread:
            ax.plot([stat.low, stat.high], [y, y], color=INK, lw=1.4, marker="|", ms=6)
        beside(ax, stat.high, y, sig(stat.mean))
    rows_axis(ax, [bar.name for bar in bars], sheet)
    ax.set_xlim(0, right * sheet.margin(0.12))
    ax.set_xlabel("output tokens/s (longer is faster)" if top else "no cell has a figure")
    ax.tick_params(labelbottom=bool(top))
    legend_below(figure, [(patch(colour), label) for label, colour in legend.items()])
    return figure


def latency(cells: list[Cell], styles: CellStyles) -> Drawing | None:
    """TTFT and ITL: median to p99 by cell."""
    shown, rest = cut(cells)
    if not any(cell.mean(f"{key}.p50") is not None for cell in shown for key in LATENCIES):
        return None

    rows = [
        (styles[cell.label].name, styles[cell.label].colour, "" if cell.ok else cell.status_text)
        for cell in shown
    ]
    panels = [_panel(cells, shown, key) for key in LATENCIES]
    alt = (
        "Dot ranges from the median to the 99th percentile of TTFT and ITL for "
        f"{count(len(shown), 'cell')}."
    )
    caption = (
        "Each block's percentiles, averaged over blocks, in the colour of the cell. TTFT counts "
        "from the scheduled arrival, queueing included. A percentile with too few samples is "
        f"left out.{styles.note}{rest}"
    )
    return Drawing(
        "latency",
        "How long do requests wait?",
        alt + failures_note(shown),
        caption,
        partial(_draw_latency, rows, panels),
    )


@dataclass(frozen=True)
class _Panel:
    """One latency, in `unit`: the percentiles of each cell, by their names."""

    title: str
    unit: str
    points: list[dict[str, float]]


def _panel(cells: list[Cell], shown: list[Cell], key: str) -> _Panel:
    scale, unit = latency_unit(cells, key)
    points = [
        {p: v * scale for p in LEVELS if (v := cell.mean(f"{key}.{p}")) is not None}
        for cell in shown
    ]
    return _Panel(LATENCIES[key], unit, points)


def _draw_latency(
    rows: Sequence[tuple[str, str, str]], panels: Sequence[_Panel], sheet: Sheet
) -> Figure:
    """A row a cell, of its name, its colour and how it failed, if it did."""
    figure, axes = canvas(1, 2, height=sheet.height(len(rows), 1.15), sheet=sheet, sharey=True)
    for index, (ax, panel) in enumerate(zip(axes, panels, strict=True)):
        _ranges(ax, rows, panel)
        rows_axis(ax, [name for name, _, _ in rows], sheet, labels=index == 0)
        heading(ax, panel.title)
    legend_below(figure, [(mark(marker, INK), p) for p, marker in LEVELS.items()])
    return figure


def _ranges(ax: Axes, rows: Sequence[tuple[str, str, str]], panel: _Panel) -> None:
    values = [v for row in panel.points for v in row.values() if v > 0]
    logarithmic = bool(values) and max(values) > 30 * min(values)
    if logarithmic:
        ax.set_xscale("log")
        plain_ticks(ax.xaxis)
    else:
        ax.set_xlim(0, max(values, default=1.0) * 1.08)
    for y, ((_, colour, failure), row) in enumerate(zip(rows, panel.points, strict=True)):
        if failure:
            place = ax.get_yaxis_transform()
            ax.text(0.02, y, failure, transform=place, va="center", color=VERMILION, fontsize=9)
        if row:
            ax.plot([min(row.values()), max(row.values())], [y, y], color=RULE, lw=2, zorder=1)
        for p, value in row.items():
            bar = LEVELS[p] == "|"
            size, edge = (8, 1.6) if bar else (6, 0.6)
            ax.plot(value, y, LEVELS[p], color=colour, ms=size, mew=edge, zorder=2)
    name = panel.unit
    ax.set_xlabel(f"{name}, log scale" if logarithmic else f"{name} (shorter is better)")


def latency_unit(cells: list[Cell], key: str) -> tuple[float, str]:
    """The unit of a latency such as "metrics.ttft_ms" in every figure of a page, whatever part of
    it one shows."""
    return time_unit([median for cell in cells if (median := cell.mean(f"{key}.p50")) is not None])


def time_unit(milliseconds: list[float]) -> tuple[float, str]:
    """Factor and unit in which times are short to write."""
    return (1e-3, "s") if milliseconds and max(milliseconds) >= 10_000 else (1.0, "ms")
