"""A comparison of two runs for people: rows of a table, Markdown, a plot."""

from __future__ import annotations

from typing import TYPE_CHECKING

from minivllm.ablation.comparison import Comparison, Verdict
from minivllm.report.format import MISSING, cut, interval, p_value, sig
from minivllm.report.spreadsheet import markdown_table, markdown_text
from minivllm.report.style import (
    BLUE,
    FAINT,
    GREY,
    ORANGE,
    PURPLE,
    VERMILION,
    Plot,
    bar_height,
    canvas,
    legend_below,
    mark,
    plain_ticks,
    png,
    row_labels,
)
from minivllm.report.terminal import rich_table

if TYPE_CHECKING:
    from rich.table import Table

HEADINGS = (
    "cell",
    "mean before",
    "mean after",
    "ratio",
    "95 % interval",
    "p (Holm)",
    "blocks",
    "test",
    "verdict",
)
COLOURS: dict[Verdict, str] = {
    "slower": VERMILION,
    "failed": VERMILION,
    "faster": BLUE,
    "none": GREY,
    "undecided": ORANGE,
    "not comparable": PURPLE,
}


def table_rows(comparison: Comparison) -> list[list[str]]:
    """One row a cell, under HEADINGS."""
    return [
        [
            cell.label,
            sig(cell.before),
            sig(cell.after),
            sig(cell.ratio),
            interval(cell.low, cell.high),
            p_value(cell.p_holm),
            f"{cell.blocks[0]} and {cell.blocks[1]}",
            cell.method or MISSING,
            cell.verdict + (f": {cell.reason}" if cell.reason else ""),
        ]
        for cell in comparison.cells
    ]


def comparison_table(comparison: Comparison) -> Table:
    """The same for the terminal, without the reasons, which the conclusion has."""
    from rich.text import Text

    name, *figures, last = HEADINGS
    table = rich_table([name], [(title, "") for title in figures], status=last)
    for cell, row in zip(comparison.cells, table_rows(comparison), strict=True):
        table.add_row(Text(row[0]), cell.verdict, *row[1:-1])
    return table


def markdown(comparison: Comparison, names: tuple[str, str]) -> str:
    """The whole comparison; `names` are the runs'."""
    old, new = map(markdown_text, names)
    lines = [f"# {new} against {old}", "", markdown_text(comparison.conclusion), ""]
    lines += [
        f"`{comparison.metric}`, {comparison.direction} is better; means are geometric, ratios after / before.",
        "",
    ]
    if comparison.cells:
        lines.append(markdown_table(HEADINGS[:1], HEADINGS[1:], table_rows(comparison), HEADINGS[6:]))
    for name, labels in zip((old, new), (comparison.only_before, comparison.only_after), strict=True):
        lines += [f"Only in {name}: {markdown_text(label)}" for label in labels]
    return "\n".join(lines).rstrip() + "\n"


def plot(comparison: Comparison, names: tuple[str, str]) -> Plot | None:
    """Ratios with their intervals on a logarithmic axis, a row a cell; None where no cell has one."""
    cells = [cell for cell in comparison.cells if cell.ratio is not None]
    if not cells:
        return None
    figure, axes = canvas(height=bar_height(len(cells), extra=1.2))
    threshold = comparison.threshold
    axes.set_xscale("log")
    plain_ticks(axes.xaxis)
    axes.axvspan(max(1 - threshold, 0.01), 1 + threshold, color="#eeeeee", lw=0)
    axes.axvline(1, color=FAINT, lw=1)
    for row, cell in enumerate(cells):
        colour = COLOURS[cell.verdict]
        if cell.low is not None and cell.high is not None:
            axes.plot(cut([cell.low, cell.high]), [row, row], color=colour, lw=2, solid_capstyle="butt")
        axes.plot([cell.ratio], [row], "o", color=colour, ms=6)
    axes.set_yticks(range(len(cells)), row_labels([cell.label for cell in cells]))
    axes.set_ylim(len(cells) - 0.4, -0.6)
    axes.set_xlabel(
        f"{comparison.metric}: {names[1]} / {names[0]} ({comparison.direction} is better, log scale)"
    )
    axes.grid(axis="x")
    met = {cell.verdict for cell in cells}
    legend_below(figure, [(mark("o", colour), name) for name, colour in COLOURS.items() if name in met])
    title = f"{names[1]} against {names[0]}"
    caption = (
        "Ratios of geometric means with 95 % bootstrap intervals, in the colour of the verdict; "
        "the grey band is what the threshold lets pass."
    )
    return Plot("compare", title, comparison.conclusion, caption, png(figure))
