"""A comparison of two runs for people: a page, rows of a table, Markdown, CSV and a plot."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from minivllm.analysis.cells import DEVICE, gather, show
from minivllm.analysis.comparison import Comparison, Verdict
from minivllm.analysis.format import MISSING, count, cut, interval, listing, p_value, sig
from minivllm.analysis.ranking import NAMES, THROUGHPUT
from minivllm.analysis.rows import Row, distinct
from minivllm.report import verdict
from minivllm.report.figures.palette import BETTER, FAINT, GRID, NEUTRAL, SLATE, UNDECIDED, WORSE
from minivllm.report.figures.style import (
    MAX_BARS,
    Plot,
    Sheet,
    canvas,
    legend_below,
    mark,
    plain_ticks,
    plot,
    rows_axis,
)
from minivllm.report.html import Front, Section, page
from minivllm.report.sections import MAX_ROWS, commands, newest
from minivllm.report.spreadsheet import csv_table, markdown_table, markdown_text
from minivllm.report.terminal import rich_table
from minivllm.report.writing import make_folder, write_bytes

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.table import Table

# One kind of mean, and how it stands beside the ratio.
MEANS = "Means are arithmetic, over blocks; the ratio, after / before, is that of the typical block."
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
TONES: dict[Verdict, str] = {
    "slower": "failed",
    "failed": "failed",
    "faster": "ok",
    "none": "neutral",
    "undecided": "mixed",
    "not comparable": "mixed",
}
TINGES: dict[Verdict, str] = {"faster": "better", "slower": "worse"}  # of a ratio
COLOURS: dict[Verdict, str] = {
    "slower": WORSE,
    "failed": WORSE,
    "faster": BETTER,
    "none": NEUTRAL,
    "undecided": UNDECIDED,
    "not comparable": SLATE,
}


def write(
    comparison: Comparison, names: tuple[str, str], sides: tuple[list[Row], list[Row]], out_dir: Path
) -> Path:
    """Write index.html, compare.md, compare.csv and compare.png.

    Args:
        comparison: of the two runs.
        names: theirs, the older first.
        sides: their records.
        out_dir: where to write.

    Returns:
        The path of index.html.

    Raises:
        BadInput: nothing can be written there.
    """
    make_folder(out_dir)
    drawn = figure(comparison, names)
    write_bytes(out_dir / "compare.md", markdown(comparison, names).encode())
    write_bytes(out_dir / "compare.csv", csv_table(HEADINGS, table_rows(comparison)).encode())
    if drawn is None:
        (out_dir / "compare.png").unlink(missing_ok=True)
    else:
        write_bytes(out_dir / "compare.png", drawn.png)
    rows = [*sides[0], *sides[1]]
    facts = [(name, _side(side)) for name, side in zip(names, sides, strict=True)]
    parts = [
        Section("compare", "Which cells changed?", section(comparison, names, drawn)),
        Section("asked", "What was compared?", {"facts": facts, "commands": commands(rows)}),
    ]
    front = Front(
        f"Did {_said(comparison.metric)} get worse from {names[0]} to {names[1]}?",
        " and ".join(names),
        verdict.Verdict(comparison.conclusion, [*comparison.notes, *busy(names, sides)]),
        newest(rows),
        command="task=compare 'runs=[before,after]'",
    )
    index = out_dir / "index.html"
    write_bytes(index, page(front, parts, {drawn.name: drawn} if drawn else {}).encode())
    return index


def section(comparison: Comparison, names: tuple[str, str], drawn: Plot | None) -> dict[str, Any]:
    """The page's section as plain data for its template."""
    rows = [
        {
            "texts": texts[:-1],
            "verdict": cell.verdict,
            "reason": cell.reason,
            "tone": TONES[cell.verdict],
            "tinge": TINGES.get(cell.verdict, ""),
        }
        for cell, texts in zip(comparison.cells[:MAX_ROWS], table_rows(comparison), strict=False)
    ]
    sides = zip(names, (comparison.only_before, comparison.only_after), strict=True)
    return {
        "headings": HEADINGS,
        "rows": rows,
        "unshown": max(0, len(comparison.cells) - MAX_ROWS),
        "means": MEANS,
        "only": [(name, labels[:MAX_ROWS]) for name, labels in sides if labels],
        "plot": drawn,
    }


def _said(metric: str) -> str:
    """A metric as one says it."""
    return NAMES.get(metric, "output tokens/s" if metric == THROUGHPUT else metric)


def _side(rows: list[Row]) -> str:
    """What one of the runs is: records, commits, devices, and when it was measured."""
    facts = [count(len(rows), "record")]
    for name, key, longest in (("commit", "provenance.git_sha", 12), ("on", DEVICE, 40)):
        if values := [show(value)[:longest] for value in distinct(rows, key)]:
            facts.append(f"{name} {listing(values, 3)}")
    return ", ".join([*facts, newest(rows)]).rstrip(", ")


def busy(names: tuple[str, str], sides: tuple[list[Row], list[Row]]) -> list[str]:
    """That other processes used the machine while one of the runs was measured."""
    return [
        f"{name}: {line[0].lower()}{line[1:]}"
        for name, rows in zip(names, sides, strict=True)
        for line in verdict.busy(gather(rows))
    ]


def table_rows(comparison: Comparison) -> list[list[str]]:
    """One row a cell, under HEADINGS."""
    return [
        [
            comparison.name(cell),
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
    better = f", {comparison.direction} is better" if comparison.direction else ""
    lines += [f"`{comparison.metric}`{better}. {MEANS}", ""]
    lines += [line for note in comparison.notes for line in (markdown_text(note), "")]
    if comparison.cells:
        lines.append(markdown_table(HEADINGS[:1], HEADINGS[1:], table_rows(comparison), HEADINGS[6:]))
    for name, labels in zip((old, new), (comparison.only_before, comparison.only_after), strict=True):
        lines += [f"Only in {name}: {markdown_text(label)}" for label in labels]
    return "\n".join(lines).rstrip() + "\n"


def figure(comparison: Comparison, names: tuple[str, str]) -> Plot | None:
    """Ratios with their intervals on a logarithmic axis, a row a cell; None where no cell has one."""
    known = [cell for cell in comparison.cells if cell.ratio is not None]
    if not known:
        return None
    cells, threshold = known[:MAX_BARS], comparison.threshold
    met = {cell.verdict for cell in cells}

    def draw(sheet: Sheet) -> Figure:
        drawn, axes = canvas(height=sheet.height(len(cells), 1.2), sheet=sheet)
        axes.set_xscale("log")
        plain_ticks(axes.xaxis)
        axes.axvspan(max(1 - threshold, 0.01), 1 + threshold, color=GRID, lw=0)
        axes.axvline(1, color=FAINT, lw=1)
        for row, cell in enumerate(cells):
            colour = COLOURS[cell.verdict]
            if cell.low is not None and cell.high is not None:
                axes.plot(cut([cell.low, cell.high]), [row, row], color=colour, lw=2, solid_capstyle="butt")
            axes.plot([cell.ratio], [row], "o", color=colour, ms=6)
        rows_axis(axes, [comparison.name(cell) for cell in cells], sheet)
        better = f"{comparison.direction} is better, " if comparison.direction else ""
        axes.set_xlabel(f"{_said(comparison.metric)}, after / before ({better}log scale)")
        legend_below(drawn, [(mark("o", colour), name) for name, colour in COLOURS.items() if name in met])
        return drawn

    caption = (
        f"Before: {names[0]}; after: {names[1]}. Ratios of the typical block with 95 % intervals, in the colour of the verdict; "
        "the grey band is what the threshold lets pass."
    )
    if len(known) > MAX_BARS:
        caption += f" The first {MAX_BARS} of {len(known):,} cells; the table has them all."
    return plot("compare", "By how much did each change?", comparison.conclusion, caption, draw)
