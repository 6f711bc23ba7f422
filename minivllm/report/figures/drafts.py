"""Bars of how many drafts are still right at each position."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from minivllm.analysis.cell import Cell
from minivllm.analysis.format import count
from minivllm.report.figures.cell_styles import CellStyles
from minivllm.report.figures.palette import PALETTE
from minivllm.report.figures.style import Drawing, Sheet, canvas, legend_below, patch, short

if TYPE_CHECKING:
    from matplotlib.figure import Figure

POSITIONS = "speculation.acceptance_by_position"
MOST_CELLS = len(PALETTE)  # side by side at each position; the table has them all
GROUP = 0.8  # width of the bars of a position

Bars = tuple[str, str, list[float]]  # name, colour, and the share at each position


def by_position(cell: Cell) -> list[float]:
    """Share of a cell's drafts whose token at each position was accepted, mean over its blocks."""
    blocks = [row[POSITIONS] for row in cell.timed if row.get(POSITIONS)]
    if not blocks:
        return []
    longest = max(map(len, blocks))
    padded = [[*shares, *[0.0] * (longest - len(shares))] for shares in blocks]
    return [sum(shares) / len(blocks) for shares in zip(*padded, strict=True)]


def acceptance(cells: list[Cell], styles: CellStyles) -> Drawing | None:
    """Acceptance by position, a bar a cell; None where no draft was made."""
    drafting = [(cell, shares) for cell in cells if (shares := by_position(cell))]
    if not drafting:
        return None
    shown = drafting[:MOST_CELLS]
    each = [styles[cell.label] for cell, _ in shown]
    # Bars lack the marks that cells of the same colour differ in.
    shared = len({style.colour for style in each}) < len(each)
    colours = PALETTE if shared else [style.colour for style in each]
    bars = [
        (style.name, colour, shares)
        for style, colour, (_, shares) in zip(each, colours, shown, strict=False)
    ]
    first = ", ".join(f"{100 * shares[0]:.0f} % in {cell.label}" for cell, shares in shown)
    alt = (
        f"Bars of the share of drafts whose token at each position was accepted, "
        f"{count(len(shown), 'cell')}. At the first position: {first}."
    )
    caption = (
        "Share of all drafts whose token at a position was accepted, which takes that those before "
        "it were; a draft that is shorter counts as not accepted there."
    )
    if len(drafting) > len(shown):
        caption += f" The first {len(shown)} of {len(drafting)} cells; the table has them all."
    draw = partial(_draw, bars)
    return Drawing("acceptance", "How far are drafts right?", alt, caption + styles.note, draw)


def _draw(bars: Sequence[Bars], sheet: Sheet) -> Figure:
    figure, ax = canvas(height=2.9, sheet=sheet)
    width = GROUP / len(bars)
    longest = max(len(shares) for _, _, shares in bars)
    for index, (_, colour, shares) in enumerate(bars):
        offset = (index - (len(bars) - 1) / 2) * width
        places = [position + 1 + offset for position in range(len(shares))]
        heights = [100 * share for share in shares]
        ax.bar(places, heights, width=0.92 * width, color=colour)
        if len(bars) * longest <= (8 if sheet.narrow else 18):
            for place, height in zip(places, heights, strict=True):
                ax.annotate(
                    f"{height:.0f}",
                    (place, height),
                    xytext=(0, 2),
                    textcoords="offset points",
                    ha="center",
                    fontsize=8.5,
                )
    ax.set_xticks(range(1, longest + 1))
    ax.set_xlim(0.4, max(longest, 3) + 0.6)
    ax.set_ylim(0, 108)
    ax.set_xlabel("position in the draft")
    ax.set_ylabel("% of drafts")
    ax.grid(True, axis="y")
    names = [(patch(colour), short(name)) for name, colour, _ in bars]
    legend_below(figure, names if len(bars) > 1 else [])
    return figure
