"""The one picture beside the answer of a page: a row for each thing compared, or a line for each
over the loads; and the figure of all ratios that are compared, whose rows are the same."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self, TypeVar

from minivllm.analysis.format import cut, sig
from minivllm.report.figures.chart import Chart, Panel, Series
from minivllm.report.figures.palette import BLUE, FAINT, MARKERS, PALETTE, UNDECIDED

NAME = "opening"  # of its file
MOST_ROWS = 8  # that a first screen has room for
MOST_LINES = len(PALETTE)
FAR_APART = 4  # the same of ratios
TOO_FAR = 20  # a logarithmic axis where the greatest is so many times the least


@dataclass(frozen=True)
class ForestRow:
    """One row: a value with its interval, or with the range of its blocks.

    `low` and `high` are None where there is none; rows of one `label` share an entry of the legend.
    """

    name: str
    value: float
    low: float | None = None
    high: float | None = None
    colour: str = BLUE
    label: str = ""
    words: str = ""  # beside it; "": the value


class JudgedRatio(Protocol):
    """A ratio with its interval, None where there is none, and a verdict."""

    @property
    def ratio(self) -> float | None: ...
    @property
    def low(self) -> float | None: ...
    @property
    def high(self) -> float | None: ...
    @property
    def verdict(self) -> str: ...


Judged = TypeVar("Judged", bound=JudgedRatio)


def ratio_rows(
    ratios: Iterable[Judged],
    name: Callable[[Judged], str],
    words: Callable[[Judged], str],
    colours: Mapping[str, str],
) -> list[ForestRow]:
    """A row for each ratio that there is, in the colour of its verdict.

    Args:
        ratios: from the top.
        name, words: of a ratio's row, and beside it.
        colours: by verdict; any other is undecided.
    """
    rows = []
    for one in ratios:
        if one.ratio is not None:
            low, high = (None if end is None else cut([end])[0] for end in (one.low, one.high))
            colour = colours.get(one.verdict, UNDECIDED)
            rows.append(ForestRow(name(one), one.ratio, low, high, colour, one.verdict, words(one)))
    return rows


def greatest_first(rows: Iterable[ForestRow]) -> list[ForestRow]:
    """Rows of ratios, the one that is farthest from 1 first."""
    return sorted(rows, key=lambda row: -abs(math.log(row.value)))


@dataclass(frozen=True)
class LoadPoint:
    """One point of a line, and the ends of its interval if it has one."""

    x: float
    y: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class LoadLine:
    """A line over the loads. Where `wins` is given, the points at these x are drawn full, the
    others hollow."""

    label: str
    colour: str
    points: Sequence[LoadPoint]
    marker: str = "o"
    dashed: bool = False
    wins: frozenset[float] | None = None

    @classmethod
    def numbered(cls, index: int, label: str, points: Sequence[LoadPoint], **others: Any) -> Self:
        """The line of a number among others, in a colour and with a marker of its own."""
        marker = MARKERS[index % len(MARKERS)]
        return cls(label, PALETTE[index % len(PALETTE)], points, marker, **others)


def forest(
    title: str,
    rows: Sequence[ForestRow],
    x_label: str,
    caption: str,
    even: float | None = None,
    span: str = "",
) -> Chart | None:
    """A row for each thing compared, the first MOST_ROWS; None without rows.

    Args:
        title: a question or what is shown.
        rows: from the top.
        x_label: of the axis.
        caption: what a mark is.
        even: where nothing differs, a dashed line.
        span: what a line through a mark is, for the caption where a row has one.
    """
    if not rows:
        return None
    shown = list(rows[:MOST_ROWS])
    far = _is_far([row.value for row in shown], TOO_FAR if even is None else FAR_APART)
    series: list[Series] = []
    if even is not None:
        ends = [-0.6, len(shown) - 0.4]
        series.append(Series("", FAINT, [even, even], ends, "line", dashed=True))
    series += _marks(shown)
    panel = Panel(
        "",
        x_label + " (log scale)" * far,
        "",
        series,
        log_x=far,
        x_from_zero=even is None,
        named=True,
        rows=[row.name for row in shown],
    )
    if span and any(row.low is not None for row in shown):
        caption += f" A line through a mark: {span}."
    if len(rows) > len(shown):
        caption += f" The first {len(shown)} of {len(rows)}."
    alt = "; ".join(f"{row.name}: {row.words or sig(row.value)}" for row in shown)
    return Chart(NAME, title, f"{title} {alt}.", caption.strip(), [("", [panel])])


def ratio_panel(rows: Sequence[ForestRow], x_label: str, band: Series | None = None) -> Panel:
    """All ratios on a logarithmic axis, over the line where nothing differs and a band around it;
    see `ratio_rows`."""
    line = Series("", FAINT, [1.0, 1.0], [-0.6, len(rows) - 0.4], "line")
    series = [*([] if band is None else [band]), line, *_marks(rows)]
    return Panel("", x_label, "", series, log_x=True, rows=[row.name for row in rows])


def _marks(rows: Sequence[ForestRow]) -> list[Series]:
    """The rows' values with their intervals: a series for each label in its colour."""
    series = []
    for label, colour in dict.fromkeys((row.label, row.colour) for row in rows):
        members = [
            (float(place), row)
            for place, row in enumerate(rows)
            if (row.label, row.colour) == (label, colour)
        ]
        series.append(
            Series(
                label,
                colour,
                [row.value for _, row in members],
                [place for place, _ in members],
                names=[row.words or sig(row.value) for _, row in members],
                low=[row.value if row.low is None else row.low for _, row in members],
                high=[row.value if row.high is None else row.high for _, row in members],
            )
        )
    return series


def over_loads(
    title: str,
    panels: Sequence[tuple[str, str, Sequence[LoadLine]]],
    x_label: str,
    caption: str,
    ticks: Sequence[str] = (),
    even: float | None = None,
    span: str = "",
) -> Chart | None:
    """Lines over the loads, the first MOST_LINES of each panel; None without a point.

    Args:
        title: a question or what is shown.
        panels: title, label of the y axis, and lines of each.
        x_label: of all.
        caption: what lines and points are.
        ticks: names of the loads, where x counts them from 0.
        even: height of a dashed line across, where nothing differs.
        span: what a line through a point is, for the caption where a point has one.
    """
    points = [point for _, _, lines in panels for line in lines for point in line.points]
    if not points:
        return None
    xs = sorted({point.x for point in points})
    far = not ticks and _is_far(xs)
    drawn = [
        Panel(
            name,
            x_label + " (log scale)" * far,
            y_label,
            [*_even(even, xs), *(one for line in lines[:MOST_LINES] for one in _line(line))],
            log_x=far,
            x_from_zero=not ticks,
            y_from_zero=even is None,
            ticks=ticks,
        )
        for name, y_label, lines in panels
    ]
    if span and any(point.low is not None for point in points):
        caption += f" A line through a point: {span}."
    if any(len(lines) > MOST_LINES for _, _, lines in panels):
        caption += f" The first {MOST_LINES} lines."
    if any(line.wins is not None for _, _, lines in panels for line in lines):
        caption += " Full: the best there."
    named = ", ".join(dict.fromkeys(line.label for _, _, lines in panels for line in lines))
    alt = f"{title} Lines over {x_label}: {named}."
    return Chart(NAME, title, alt, caption.strip(), [("", drawn)])


def _even(even: float | None, xs: Sequence[float]) -> list[Series]:
    if even is None:
        return []
    return [Series("", FAINT, [xs[0], xs[-1]], [even, even], "line", dashed=True)]


def _line(line: LoadLine) -> list[Series]:
    """The line, its points, and the interval of each."""
    xs, ys = [point.x for point in line.points], [point.y for point in line.points]
    several = len(xs) > 1
    series = [Series(line.label, line.colour, xs, ys, "line", dashed=line.dashed)] * several
    for point in line.points:
        if point.low is not None and point.high is not None:
            ends = [point.low, point.high]
            series.append(Series("", line.colour, [point.x] * 2, ends, "line"))
    for full in (True, False):
        kept = [p for p in line.points if (line.wins is None or p.x in line.wins) is full]
        if kept:
            label = "" if several else line.label
            at = [point.x for point in kept], [point.y for point in kept]
            series.append(Series(label, line.colour, *at, marker=line.marker, hollow=not full))
    return series


def _is_far(values: Sequence[float], times: float = TOO_FAR) -> bool:
    """Whether values lie so far apart that an axis has to be logarithmic."""
    return min(values) > 0 and max(values) > times * min(values)
