"""How figures look: two sizes of one canvas, what stands beside and below its axes, and the files
of it."""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from minivllm.report.figures.palette import EDGE, GRID, INK, VERMILION

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

DPI = 144
WIDEST_TICK = 0.8  # inches of an axis for one of its figures and the room beside it
ABOVE_CHARACTERS = 11.3  # an inch of a name above its row
LEGEND_CHARACTERS = 12.8  # an inch of a line below a figure
NEAR = 2  # a logarithmic axis of a smaller range has hardly a figure of one digit
MAX_FOLDED = 16  # rows that are high enough for two lines
# Behind words, so that no line crosses them.
BACKED: dict[str, Any] = {"facecolor": "white", "edgecolor": "none", "pad": 0.8}
MAX_BARS = 48  # cells in one bar plot: more than this cannot be read; the table has them all


@dataclass(frozen=True)
class Sheet:
    """The size of a figure.

    Args:
        width: inches.
        narrow: whether names stand above their bars, and panels below one another.
    """

    width: float
    narrow: bool = False

    @property
    def bar(self) -> float:
        """Height of a bar, as a share of its row."""
        return 0.4 if self.narrow else 0.62

    def margin(self, share: float) -> float:
        """How far an axis goes on after its greatest value, so that words beside a bar have
        room."""
        return 1 + share * (2.2 if self.narrow else 1)

    def height(self, n: int, extra: float = 1.0) -> float:
        """Inches of one panel with `n` horizontal rows."""
        each = 0.5 if self.narrow else 0.34 if n <= MAX_FOLDED else 0.24
        return extra + max(2, n) * each


WIDE, NARROW = Sheet(8.6), Sheet(4.1, narrow=True)  # shown at about 830 and 360 CSS pixels
BESIDE = Sheet(6.2)  # beside the answer of a page, at about 600 CSS pixels
BESIDE_LONG = Sheet(6.2, narrow=True)  # with names above their rows
LONGEST = 24  # characters of a name that has room beside its row there


@dataclass(frozen=True)
class Drawing:
    """A figure that matplotlib alone draws, and the page shows as SVG: what a `Chart` cannot
    describe, such as bars.

    Another process may draw it where `draw` is a `partial` of a module's function and plain data.
    """

    name: str  # file name without .png
    title: str
    alt: str
    caption: str
    draw: Callable[[Sheet], Figure]


def canvas(
    rows: int = 1, columns: int = 1, height: float = 3.0, sheet: Sheet = WIDE, **options: Any
) -> tuple[Figure, Any]:
    """A white figure with plain axes; no pyplot, so nothing global is kept open.

    On a narrow sheet the panels of a single row stand below one another, each of the whole height.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    if sheet.narrow and rows == 1:
        rows, columns, height = columns, 1, height * columns
    with plain_settings():
        figure = Figure(
            figsize=(sheet.width, height), dpi=DPI, facecolor="white", layout="constrained"
        )
        FigureCanvasAgg(figure)
        axes = figure.subplots(rows, columns, **options)
    for ax in figure.axes:
        # As many figures as fit beside one another, also those of thousands.
        fitting = min(9, max(3, round(sheet.width / columns / WIDEST_TICK)))
        ax.xaxis.set_major_locator(MaxNLocator(fitting, steps=[1, 2, 2.5, 5, 10]))
        _separate_thousands(ax.xaxis)
        _separate_thousands(ax.yaxis)
    return figure, axes


@contextmanager
def plain_settings(**more: Any) -> Iterator[None]:
    """Settings of every figure; a name with dollar signs is a name, and one in a script without
    glyphs no warning."""
    import matplotlib

    style: dict[Any, Any] = {
        "font.size": 9.5,
        "font.family": "sans-serif",
        "font.sans-serif": ["DejaVu Sans"],
        "text.parse_math": False,
        "axes.labelcolor": INK,
        "axes.edgecolor": EDGE,
        "axes.axisbelow": True,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "grid.color": GRID,
        "xtick.color": INK,
        "ytick.color": INK,
        "text.color": INK,
    }
    with matplotlib.rc_context(style | more), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        yield


def _separate_thousands(axis: Axis) -> None:
    """Write 40000 as 40,000, as tables do; what an axis is given later takes its place."""
    from matplotlib.ticker import ScalarFormatter

    class Separated(ScalarFormatter):
        def __call__(self, x: float, pos: int | None = None) -> str:
            return re.sub(
                r"^(\D?)(\d+)",
                lambda match: f"{match[1]}{int(match[2]):,}",
                super().__call__(x, pos),
            )

    axis.set_major_formatter(Separated())


def rows_axis(ax: Axes, names: Sequence[str], sheet: Sheet = WIDE, *, labels: bool = True) -> None:
    """Put the rows on the y axis, the first on top; on a narrow sheet each name above its row."""
    above = sheet.narrow
    if above:
        limit = int(ABOVE_CHARACTERS * sheet.width)
        ax.set_yticks([])
        for y, name in enumerate(names):
            place = ax.get_yaxis_transform()
            beside_axis = {"xycoords": place, "xytext": (3, 0), "textcoords": "offset points"}
            looks: dict[str, Any] = {**beside_axis, "va": "bottom", "fontsize": 8.5, "bbox": BACKED}
            ax.annotate(short(name, limit), (0, y - 0.26), **looks)
    elif labels:
        ax.set_yticks(range(len(names)), row_labels(names))
    else:
        ax.tick_params(labelleft=False)
    ax.set_ylim(len(names) - 0.4, -0.75 if above else -0.6)
    ax.tick_params(axis="y", length=0)
    ax.grid(axis="x")


def short(label: str, limit: int = 44) -> str:
    """A label that fits beside a bar: without the groups of knobs if need be, then without the ends
    of their names, whose values tell labels apart, then without its middle."""
    if len(label) > limit:
        label = re.sub(r"\b\w+\.(?=\w+=)", "", label)
    for most in (12, 8, 5):
        if len(label) > limit:
            label = re.sub(rf"\b(\w{{{most}}})[\w…]+=", r"\1…=", label)
    if len(label) <= limit:
        return label
    # Labels of one report begin with the same words as often as they end with them.
    tail = limit // 2
    return f"{label[: limit - 1 - tail]}…{label[-tail:]}"


def row_labels(labels: Sequence[str]) -> list[str]:
    """What stands beside the rows of a plot: long ones in two lines where there is room for
    them."""
    return [_folded(label) if len(labels) <= MAX_FOLDED else short(label) for label in labels]


def _folded(label: str, limit: int = 44) -> str:
    """A label in two lines if one is too short for it, broken between its parts."""
    if len(label) <= limit:
        return label
    breaks = [match.end() for match in re.finditer(r"( · |, | )(?=\S)", label)]
    at = min(breaks, key=lambda end: abs(end - len(label) / 2), default=0)
    parts = (label[:at].rstrip(" ·"), label[at:])
    return "\n".join(short(part, limit) for part in parts) if at else short(label, limit)


def beside(
    ax: Axes, x: float, y: float, text: str, gap: float = 4, *, backed: bool = False
) -> None:
    """Words to the right of a bar's end, so many points from it; `backed` ones hide what is behind
    them."""
    looks: dict[str, Any] = {"fontsize": 9, "bbox": BACKED if backed else None}
    ax.annotate(text, (x, y), xytext=(gap, 0), textcoords="offset points", va="center", **looks)


def mark_failure(ax: Axes, y: float, status: str, sheet: Sheet, *, right: float) -> None:
    """A hatched stub with the status: a failed cell is a row like any other."""
    ax.barh(
        y,
        right * 0.06,
        height=sheet.bar,
        color="white",
        edgecolor=VERMILION,
        hatch="////",
        linewidth=0.8,
    )
    ax.text(right * 0.07, y, status, va="center", ha="left", color=VERMILION, fontsize=9)


def plain_ticks(axis: Axis) -> None:
    """Write the figures of a logarithmic axis as numbers, not as powers of ten.

    Between these 2 and 5 are written too where there is room for them, all within one decade, and
    within a factor of NEAR as many evenly spaced ones as on another axis.
    """
    from matplotlib.ticker import LogLocator, MaxNLocator

    class Near(LogLocator):
        def tick_values(self, vmin: float, vmax: float) -> Any:
            if vmax < NEAR * vmin:
                return MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]).tick_values(vmin, vmax)
            return super().tick_values(vmin, vmax)

    def plain(value: float, _: float = 0.0) -> str:
        return f"{value:,.10g}" if 1e-3 <= value < 1e9 else f"{value:g}"

    def between(value: float, _: float = 0.0) -> str:
        low, high = axis.get_view_interval()
        marked = NEAR * low <= high < 10 * low or (f"{value:e}"[0] in "25" and room(low, high))
        return plain(value) if marked else ""

    def room(low: float, high: float) -> bool:
        box, along_x = axis.axes.bbox, axis is axis.axes.xaxis
        inches = (box.width if along_x else box.height) / axis.axes.figure.dpi
        decades = range(math.floor(math.log10(low)), math.floor(math.log10(high)) + 1)
        widest = max(
            len(plain(figure * 10.0**decade)) for decade in decades for figure in (1, 2, 5)
        )
        needed = 0.1 + 0.07 * widest if along_x else 0.3
        return high >= NEAR * low and math.log10(2) / math.log10(high / low) * inches > needed

    axis.set_major_locator(Near())
    axis.set_major_formatter(plain)
    axis.set_minor_formatter(between)
    # at the height of the others, whose ticks are longer
    axis.set_tick_params(which="minor", pad=5.0)


def heading(ax: Axes, text: str) -> None:
    """A bold title over the left edge of the axes."""
    ax.set_title(text, loc="left", fontsize=10, fontweight="bold", color=INK)


def legend_below(figure: Figure, entries: list[tuple[Any, str]]) -> None:
    """Lines of handles and names under all axes, out of the data's way; nothing for no entries."""
    if not entries:
        return
    longest = max(len(name) for _, name in entries)
    room = LEGEND_CHARACTERS * figure.get_figwidth()
    lines = math.ceil(len(entries) / max(1, min(7, int(room // (4 + longest)))))
    columns = math.ceil(len(entries) / lines)
    # matplotlib fills column after column, and people read line after line.
    handles, names = zip(
        *(entry for i in range(columns) for entry in entries[i::columns]), strict=True
    )
    figure.legend(
        handles,
        names,
        loc="outside lower center",
        ncols=columns,
        fontsize=8.5,
        frameon=False,
        handlelength=1.1,
        handletextpad=0.5,
        columnspacing=1.6,
    )


def patch(colour: str, *, outline: bool = False) -> Any:
    """A legend's handle for a bar, or for the outline of one."""
    from matplotlib.patches import Patch

    return Patch(facecolor="none" if outline else colour, edgecolor=colour)


def mark(marker: str, colour: str) -> Any:
    """A legend's handle for a point."""
    from matplotlib.lines import Line2D

    return Line2D(
        [], [], marker=marker, color=colour, ls="", ms=6.5, mew=1.6 if marker == "|" else 0.6
    )
