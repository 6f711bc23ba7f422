"""Figures of points and lines, defined once: drawn by matplotlib as the file, by uPlot as what the
page shows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from textwrap import fill
from typing import TYPE_CHECKING, Literal

from minivllm.report.figures.palette import FAINT, GRID
from minivllm.report.figures.style import (
    WIDE,
    Sheet,
    beside,
    canvas,
    heading,
    legend_below,
    plain_ticks,
    rows_axis,
    short,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PANEL_HEIGHT = 3.9  # inches, of a figure of one row
NARROW_PANEL = 2.9  # of each panel of one on a narrow sheet, where panels stand below one another
KEY_HEIGHT = 0.17  # of each of its legend's keys, which have about a line each there
TICK = 14  # characters of a line of a tick's name
LINE = 42  # characters of a line of a title on a narrow sheet, which has up to two
ROW_HEIGHT = 1.45  # of each row of several
# how far an axis that begins at zero goes on after the greatest value
BEYOND_X, BEYOND_Y = 1.05, 1.08
MAX_NAMED = 16  # points with their names beside them
GLYPHS = {
    "o": "●○",
    "s": "■□",
    "D": "◆◇",
    "^": "▲△",
    "v": "▼▽",
    "P": "✚✚",
    "X": "✖✖",
}  # of a legend's keys: full, hollow


@dataclass(frozen=True)
class Series:
    """Points, a line through them, steps, or a band over the whole height (x: its two ends)."""

    label: str  # its entry in the legend, which several series may share; "" has none
    colour: str
    x: Sequence[float]
    y: Sequence[float]
    kind: Literal["points", "line", "steps", "band"] = "points"
    marker: str = "o"  # matplotlib's letter
    dashed: bool = False
    hollow: bool = False
    names: Sequence[str] = ()  # what the pointer shows of each point
    low: Sequence[float] = ()  # of a horizontal interval through each point
    high: Sequence[float] = ()


@dataclass(frozen=True)
class Panel:
    """One pair of axes."""

    title: str
    x_label: str
    y_label: str
    series: Sequence[Series]
    log_x: bool = False
    log_y: bool = False
    x_from_zero: bool = True
    y_from_zero: bool = True
    # the names of points stand beside them in the file; the page has the pointer
    named: bool = False
    rows: Sequence[str] = ()  # names of y = 0, 1, ... from the top, in place of numbers
    ticks: Sequence[str] = ()  # names of x = 0, 1, ..., in the file alone

    @property
    def foot(self) -> float:
        """How far an axis that begins at zero goes below it, as a share of its greatest: a mark
        there would be cut."""
        marks = (y for series in self.series if series.kind == "points" for y in series.y)
        return 0.03 if any(y <= 0 for y in marks) else 0.0

    @property
    def empty(self) -> bool:
        """Whether there is nothing to draw: the file says so, and the page leaves it out."""
        return not any(len(series.x) for series in self.series if series.kind != "band")


@dataclass(frozen=True)
class Chart:
    """Panels in rows; the panels of a titled row are over one range of x, and rows of theirs share
    each y axis in the file."""

    name: str  # file name without .png
    title: str
    alt: str
    caption: str
    rows: Sequence[tuple[str, Sequence[Panel]]] = field(default_factory=tuple)

    @property
    def legend(self) -> dict[str, Series]:
        """Labels in order of appearance, with the first series of each."""
        entries: dict[str, Series] = {}
        for _, panels in self.rows:
            for panel in panels:
                for series in panel.series:
                    if series.label:
                        entries.setdefault(series.label, series)
        return entries


def keys(chart: Chart) -> list[dict[str, str | bool]]:
    """The page's legend: a key that shows and hides its series."""
    return [
        {
            "label": label,
            "colour": series.colour,
            "glyph": _glyph(series),
            "dashed": series.dashed,
        }
        for label, series in chart.legend.items()
    ]


def _glyph(series: Series) -> str:
    if series.kind == "band":
        return GLYPHS["s"][0]
    return "" if series.kind in ("line", "steps") else GLYPHS[series.marker][series.hollow]


def draw(chart: Chart, sheet: Sheet) -> Figure:
    """The chart by matplotlib; on a narrow sheet all panels below one another."""
    several = len(chart.rows) > 1
    placed = [(panel, title, panels) for title, panels in chart.rows for panel in panels]
    columns = 1 if sheet.narrow else max(len(panels) for _, panels in chart.rows)
    count = len(placed) if sheet.narrow else len(chart.rows)
    shared = "col" if several and not sheet.narrow else False
    figure, grid = canvas(
        count, columns, _height(chart, sheet, count), sheet, squeeze=False, sharey=shared
    )
    if sheet.narrow:
        places = grid.ravel().tolist()
    else:
        places = [
            ax
            for axes, (_, panels) in zip(grid, chart.rows, strict=True)
            for ax in axes[: len(panels)]
        ]
    for ax in set(figure.axes) - set(places):
        ax.set_axis_off()
    handles: dict[str, object] = {}
    for ax, (panel, _, _) in zip(places, placed, strict=True):
        for series in panel.series:
            handle = _series(ax, series)
            if series.label:
                handles.setdefault(series.label, handle)
    # Only now: a limit that is set ends the scaling of shared axes, and later rows would be cut.
    for ax, (panel, title, panels) in zip(places, placed, strict=True):
        lowest = panel is panels[-1] if sheet.narrow else panels is chart.rows[-1][1]
        _axes(ax, panel, sheet, bottom=lowest or not several)
        if panel.empty:
            ax.text(0.5, 0.5, "not recorded", transform=ax.transAxes, ha="center", color=FAINT)
        if not title or panel is panels[0]:
            words = title or panel.title
            if sheet.narrow:
                words = fill(short(words, 2 * LINE), LINE, max_lines=2, placeholder="…")
            heading(ax, words)
    legend_below(figure, [(handle, label) for label, handle in handles.items()])
    return figure


def _height(chart: Chart, sheet: Sheet, count: int) -> float:
    """Inches of the figure, whose panels stand in so many rows."""
    tallest = max((len(panel.rows) for _, panels in chart.rows for panel in panels), default=0)
    if len(chart.rows) > 1:
        return 0.8 + ROW_HEIGHT * count
    if tallest:
        return count * sheet.height(max(3, tallest), 1.3)
    keys = KEY_HEIGHT * len(chart.legend)
    return NARROW_PANEL * count + keys if sheet.narrow else PANEL_HEIGHT


def _axes(ax: Axes, panel: Panel, sheet: Sheet = WIDE, *, bottom: bool) -> None:
    if panel.log_x:
        ax.set_xscale("log")
        plain_ticks(ax.xaxis)
    elif panel.x_from_zero:
        # the margins are of the data's range
        ax.set_xlim(0, max(ax.get_xlim()[1], BEYOND_X * ax.dataLim.x1))
    if panel.log_y:
        ax.set_yscale("log")
        plain_ticks(ax.yaxis)
    elif panel.rows:
        rows_axis(ax, panel.rows, sheet)
    elif panel.y_from_zero:
        top = max(ax.get_ylim()[1], BEYOND_Y * ax.dataLim.y1)
        ax.set_ylim(-panel.foot * top, top)
    if panel.ticks:
        names = [fill(name, TICK, break_long_words=False) for name in panel.ticks]
        ax.set_xticks(range(len(names)), names)
        ax.set_xlim(-0.3, len(panel.ticks) - 0.7)
    if bottom:
        ax.set_xlabel(panel.x_label)
    ax.set_ylabel(panel.y_label)
    ax.grid(True, axis="x" if panel.rows else "both")
    if panel.named and panel.rows:
        for series in panel.series:
            for x, high, y, name in zip(
                series.x, series.high or series.x, series.y, series.names, strict=False
            ):
                beside(ax, max(x, high), y, name, gap=7, backed=True)
    elif panel.named and sum(len(s.names) for s in panel.series) <= MAX_NAMED:
        for series in panel.series:
            for x, y, name in zip(series.x, series.y, series.names, strict=bool(series.names)):
                ax.annotate(
                    name.split(": ")[0],
                    (x, y),
                    xytext=(6, 4),
                    textcoords="offset points",
                    fontsize=8,
                )


def _series(ax: Axes, series: Series) -> object:
    """Draw one series; returns the legend's handle."""
    ax.margins(0.08)
    if series.kind == "band":
        return ax.axvspan(
            series.x[0], series.x[1], color=series.colour or GRID, alpha=0.35, lw=0, zorder=0
        )
    if series.kind == "points":
        for low, high, y in zip(series.low, series.high, series.y, strict=bool(series.low)):
            ax.plot([low, high], [y, y], color=series.colour, lw=2, solid_capstyle="butt", zorder=2)
        (line,) = ax.plot(
            series.x,
            series.y,
            series.marker,
            color=series.colour,
            ms=7,
            mfc="white" if series.hollow else series.colour,
            mew=1.5 if series.hollow else 0.6,
            zorder=3,
        )
        return line
    (line,) = ax.plot(
        series.x,
        series.y,
        color=series.colour,
        lw=1.4,
        ls=(0, (4, 2)) if series.dashed else "-",
        drawstyle="steps-post" if series.kind == "steps" else "default",
        zorder=2,
    )
    return line
