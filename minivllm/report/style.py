"""How figures look: one palette, one canvas, safe for colour-blind readers, light and dark."""

from __future__ import annotations

import io
import math
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from minivllm.report.cells import Cell

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

# Okabe and Ito (2008), without yellow (too faint on white) and with a grey.
BLUE, ORANGE, GREEN, VERMILION, PURPLE, SKY, GREY, BLACK = (
    "#0072B2",
    "#E69F00",
    "#009E73",
    "#D55E00",
    "#CC79A7",
    "#56B4E9",
    "#999999",
    "#222222",
)
PALETTE = (BLUE, ORANGE, GREEN, PURPLE, SKY, VERMILION, BLACK)
MARKERS = "osD^vPX"
INK, FAINT, LIGHT, GRID = "#333333", "#777777", "#cfcfcf", "#e6e6e6"
DPI = 144
WIDTH = 8.6  # inches; shown at about 830 CSS pixels
PAPER = "#fefefe"  # not quite white, which Bokeh takes for its default and leaves out
# Colours that are not data, and what they become on a dark page.
ON_DARK = {
    "#ffffff": "#14171a",
    PAPER: "#14171a",
    INK: "#dde1e5",
    FAINT: "#98a1aa",
    LIGHT: "#4a525a",
    GRID: "#2c3238",
    BLACK: "#e8eaec",
    "#bbbbbb": "#59616a",
    "#b5b5b5": "#59616a",
}
LEGEND_CHARACTERS = 110  # in a line below a figure
MAX_FOLDED = 16  # rows that are high enough for two lines
MAX_BARS = 48  # cells in one bar plot: more than this cannot be read; the table has them all


@dataclass(frozen=True)
class Plot:
    """A finished figure for the page."""

    name: str  # file name without .png
    title: str
    alt: str
    caption: str
    png: bytes
    svg: bytes = b""  # what the page shows, unless it shows `live`
    live: list[dict[str, Any]] = field(default_factory=list)  # Bokeh's items, each with a title
    legend: list[dict[str, Any]] = field(default_factory=list)  # keys of the live items' series


def canvas(rows: int = 1, columns: int = 1, height: float = 3.0, **options: Any) -> tuple[Figure, Any]:
    """A white figure with plain axes; no pyplot, so nothing global is kept open."""
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    style: dict[Any, Any] = {
        "font.size": 9.5,
        "font.family": "sans-serif",
        "font.sans-serif": ["DejaVu Sans"],
        "axes.labelcolor": INK,
        "axes.edgecolor": "#bbbbbb",
        "axes.axisbelow": True,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "grid.color": GRID,
        "xtick.color": INK,
        "ytick.color": INK,
        "text.color": INK,
    }
    with matplotlib.rc_context(style):
        figure = Figure(figsize=(WIDTH, height), dpi=DPI, facecolor="white", layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.subplots(rows, columns, **options)
    for ax in figure.axes:
        _separate_thousands(ax.xaxis)
        _separate_thousands(ax.yaxis)
    return figure, axes


def _separate_thousands(axis: Axis) -> None:
    """Write 40000 as 40,000, as tables do; what an axis is given later takes its place."""
    from matplotlib.ticker import ScalarFormatter

    class Separated(ScalarFormatter):
        def __call__(self, x: float, pos: int | None = None) -> str:
            return re.sub(
                r"^(\D?)(\d+)", lambda found: f"{found[1]}{int(found[2]):,}", super().__call__(x, pos)
            )

    axis.set_major_formatter(Separated())


def plot(name: str, title: str, alt: str, caption: str, figure: Figure) -> Plot:
    """A figure that the page shows as it is drawn."""
    return Plot(name, title, alt, caption, png(figure), svg(figure, name))


def svg(figure: Figure, name: str) -> bytes:
    """The figure as an SVG that follows the reader's colour scheme; the same figure gives the same bytes.

    Nothing is painted behind it, so that the page's paper and the shadows at the edges of its card show through.
    """
    import matplotlib

    out = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
        figure.savefig(
            out,
            format="svg",
            transparent=True,
            metadata={"Date": None, "Creator": None, "Format": None, "Type": None},
        )
    text = out.getvalue()
    text = re.sub("|".join(ON_DARK), lambda found: f"var(--c{found[0][1:]})", text)
    text = text.replace("'DejaVu Sans'", "system-ui, 'DejaVu Sans'")

    def scheme(colours: dict[str, str]) -> str:
        return ":root {" + " ".join(f"--c{key[1:]}: {value};" for key, value in colours.items()) + "}"

    style = (
        f"{scheme({key: key for key in ON_DARK})} @media (prefers-color-scheme: dark) {{ {scheme(ON_DARK)} }}"
    )
    style += f" text {{ fill: var(--c{INK[1:]}); }}"
    return re.sub(r"(<svg[^>]*>)", rf"\1<style>{style}</style>", text, count=1).encode()


def png(figure: Figure) -> bytes:
    """The figure as PNG; the same figure gives the same bytes."""
    out = io.BytesIO()
    figure.savefig(out, format="png", dpi=DPI, metadata={"Software": "minivllm"})
    return out.getvalue()


def bar_height(n: int, extra: float = 1.0) -> float:
    """Height in inches of a plot with `n` horizontal rows."""
    return extra + max(2, n) * (0.34 if n <= MAX_FOLDED else 0.24)


def rows_axis(ax: Axes, cells: list[Cell], *, labels: bool = True) -> None:
    """Put the cells on the y axis, first on top."""
    if labels:
        ax.set_yticks(range(len(cells)), row_labels([cell.label for cell in cells]))
    else:
        ax.tick_params(labelleft=False)
    ax.set_ylim(len(cells) - 0.4, -0.6)
    ax.tick_params(axis="y", length=0)
    ax.grid(axis="x")


def short(label: str, limit: int = 44) -> str:
    """A label that fits beside a bar: without the groups of knobs if need be, then without its middle."""
    if len(label) > limit:
        label = re.sub(r"\b\w+\.(?=\w+=)", "", label)
    if len(label) <= limit:
        return label
    tail = limit // 2  # labels of one report begin alike as often as they end alike
    return f"{label[: limit - 1 - tail]}…{label[-tail:]}"


def row_labels(labels: list[str]) -> list[str]:
    """What stands beside the rows of a plot of `bar_height`: long ones in two lines where there is room for them."""
    return [_folded(label) if len(labels) <= MAX_FOLDED else short(label) for label in labels]


def _folded(label: str, limit: int = 44) -> str:
    """A label in two lines if one is too short for it, broken between its parts."""
    if len(label) <= limit:
        return label
    breaks = [found.end() for found in re.finditer(r"( · |, | )(?=\S)", label)]
    at = min(breaks, key=lambda end: abs(end - len(label) / 2), default=0)
    parts = (label[:at].rstrip(" ·"), label[at:])
    return "\n".join(short(part, limit) for part in parts) if at else short(label, limit)


def beside(ax: Axes, x: float, y: float, text: str) -> None:
    """Words to the right of a bar's end."""
    ax.annotate(text, (x, y), xytext=(4, 0), textcoords="offset points", va="center", fontsize=9)


def mark_failure(ax: Axes, y: float, cell: Cell, *, right: float) -> None:
    """A hatched stub with the status: a failed cell is a row like any other."""
    ax.barh(y, right * 0.06, height=0.62, color="white", edgecolor=VERMILION, hatch="////", linewidth=0.8)
    ax.text(right * 0.07, y, cell.status_text, va="center", ha="left", color=VERMILION, fontsize=9)


def colours(cells: list[Cell]) -> tuple[list[str], dict[str, str], str]:
    """A colour for each cell by the first column of 2 to 7 values; the legend; the column's name."""
    for title in cells[0].varying if cells else ():
        values = list(dict.fromkeys(cell.varying[title] for cell in cells if cell.configured))
        if 2 <= len(values) <= len(PALETTE):
            legend = dict(zip(values, PALETTE, strict=False))
            return [legend.get(cell.varying[title], GREY) for cell in cells], legend, title
    return [BLUE] * len(cells), {}, ""


def plain_ticks(axis: Axis) -> None:
    """Write the figures of a logarithmic axis as numbers, not as powers of ten.

    Between these 2 and 5 are written too where there is room for them, and all within one decade.
    """

    def plain(value: float, _: float = 0.0) -> str:
        return f"{value:,.10g}" if 1e-3 <= value < 1e9 else f"{value:g}"

    def between(value: float, _: float = 0.0) -> str:
        low, high = axis.get_view_interval()
        marked = high < 10 * low or (f"{value:e}"[0] in "25" and room(low, high))
        return plain(value) if marked else ""

    def room(low: float, high: float) -> bool:
        box, along_x = axis.axes.bbox, axis is axis.axes.xaxis
        inches = (box.width if along_x else box.height) / axis.axes.figure.dpi
        decades = range(math.floor(math.log10(low)), math.floor(math.log10(high)) + 1)
        widest = max(len(plain(figure * 10.0**decade)) for decade in decades for figure in (1, 2, 5))
        needed = 0.1 + 0.07 * widest if along_x else 0.3
        return math.log10(2) / math.log10(high / low) * inches > needed

    axis.set_major_formatter(plain)
    axis.set_minor_formatter(between)
    axis.set_tick_params(which="minor", pad=5.0)  # at the height of the others, whose ticks are longer


def heading(ax: Axes, text: str) -> None:
    """A bold title over the left edge of the axes."""
    ax.set_title(text, loc="left", fontsize=10, fontweight="bold", color=INK)


def legend_below(figure: Figure, entries: list[tuple[Any, str]]) -> None:
    """Lines of handles and names under all axes, out of the data's way; nothing for no entries."""
    if not entries:
        return
    longest = max(len(name) for _, name in entries)
    lines = math.ceil(len(entries) / max(1, min(7, LEGEND_CHARACTERS // (4 + longest))))
    columns = math.ceil(len(entries) / lines)
    # matplotlib fills column after column, and people read line after line.
    handles, names = zip(*(entry for i in range(columns) for entry in entries[i::columns]), strict=True)
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

    return Line2D([], [], marker=marker, color=colour, ls="", ms=6.5, mew=1.6 if marker == "|" else 0.6)
