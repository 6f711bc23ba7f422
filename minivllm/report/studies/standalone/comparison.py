"""A comparison of two runs for people: a page, rows of a table, Markdown, CSV and a plot."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minivllm.analysis.cell import DEVICE
from minivllm.analysis.cells import gather
from minivllm.analysis.compared import ChangeVerdict, Compared
from minivllm.analysis.comparison import Comparison
from minivllm.analysis.format import (
    MISSING,
    count,
    interval,
    listing,
    p_value,
    ratio,
    show,
    sig,
    spanned,
)
from minivllm.analysis.moved import changed_weights
from minivllm.analysis.ranking import NAMES
from minivllm.analysis.rows import Row, distinct
from minivllm.report import verdict
from minivllm.report.figures.chart import Chart, Series
from minivllm.report.figures.opening import forest, greatest_first, ratio_panel, ratio_rows
from minivllm.report.figures.palette import BETTER, GRID, NEUTRAL, SLATE, UNDECIDED, WORSE
from minivllm.report.figures.render import Described, Plot
from minivllm.report.figures.style import MAX_BARS
from minivllm.report.html import Conclusion
from minivllm.report.inputs import ReportInputs
from minivllm.report.sections import MAX_ROWS, newest
from minivllm.report.spreadsheet import csv_table, markdown_table, markdown_text
from minivllm.report.studies.base import Study
from minivllm.report.studies.standalone.page import write_alone
from minivllm.report.terminal import rich_table

if TYPE_CHECKING:
    from rich.table import Table

MEANS = (
    "The means are arithmetic, over blocks; the typical ratio is after / before of the typical "
    "block (see the test), so it is not the ratio of the means."
)
RATIO = "typical ratio"
HEADINGS = (
    "cell",
    "mean before",
    "mean after",
    RATIO,
    "95 % interval",
    "p (Holm)",
    "blocks",
    "test",
    "verdict",
)
TONES: dict[ChangeVerdict, str] = {
    "slower": "failed",
    "failed": "failed",
    "faster": "ok",
    "none": "neutral",
    "undecided": "mixed",
    "not comparable": "mixed",
}
TINGES: dict[ChangeVerdict, str] = {"faster": "better", "slower": "worse"}  # of a ratio
TITLE = "By how much did each change?"
MOST_CHARACTERS = 240  # of a headline
COLOURS = {
    "slower": WORSE,
    "failed": WORSE,
    "faster": BETTER,
    "none": NEUTRAL,
    "undecided": UNDECIDED,
    "not comparable": SLATE,
}


@dataclass(frozen=True)
class ComparedRuns:
    """A comparison with the runs that it is of.

    Args:
        comparison: of the two runs.
        names: theirs, the older first.
        sides: their records.
    """

    comparison: Comparison
    names: tuple[str, str]
    sides: tuple[list[Row], list[Row]]


class ComparisonStudy(Study[ComparedRuns]):
    """Whether anything got slower from one run to another; it finds nothing in the records of one
    report."""

    name = "compare"
    title = "Which cells changed?"
    template = "compare"
    figure_names = ("compare",)
    file_names = ("compare.md", "compare.csv")

    def find(self, inputs: ReportInputs) -> None:
        return None

    def question(self, result: ComparedRuns, inputs: ReportInputs) -> str:
        """Names the metric and the runs."""
        return (
            f"Did {_metric_name(result.comparison.metric)} get worse from {result.names[0]} to "
            f"{result.names[1]}?"
        )

    def conclusion(self, result: ComparedRuns, inputs: ReportInputs) -> Conclusion:
        """That of the comparison, and how far to trust it."""
        both = gather([row for rows in result.sides for row in rows])
        lines = [*result.comparison.notes, *changed_weights(both)]
        lines += busy(result.names, result.sides)
        headline, compared = result.comparison.conclusion, result.comparison.cells
        if len(headline) > MOST_CHARACTERS:  # it names every cell, which the first line does
            begin, lines = headline.partition(":")[0], [headline, *lines]
            verdicts = Counter(cell.verdict for cell in compared).most_common()
            counts = listing([f"{number} {state}" for state, number in verdicts])
            of_all = f"of {count(len(compared), 'cell')} {counts}"
            headline = f"{begin}: {of_all if compared else 'the runs have no cell in common'}."
        cells = [cell for rows in result.sides for cell in gather(rows)]
        return verdict.with_others(Conclusion(headline, lines), cells)

    def tables(self, result: ComparedRuns, inputs: ReportInputs) -> list[Table]:
        return [comparison_table(result.comparison)]

    def files(self, result: ComparedRuns, inputs: ReportInputs) -> dict[str, str]:
        """compare.md and compare.csv."""
        return {
            "compare.md": markdown(result.comparison, result.names),
            "compare.csv": csv_table(HEADINGS, table_rows(result.comparison)),
        }

    def picture(self, result: ComparedRuns, inputs: ReportInputs) -> Chart | None:
        """A row a cell, the greatest change first."""
        comparison = result.comparison
        cells = comparison.cells
        rows = ratio_rows(cells, comparison.name, lambda cell: ratio(cell.ratio), COLOURS)
        label = f"{_metric_name(comparison.metric)}, after / before"
        caption = "The ratio of the typical block, and its 95 % interval."
        return forest(TITLE, greatest_first(rows), label, caption, even=1.0)

    def figures(self, result: ComparedRuns, inputs: ReportInputs) -> list[Described | None]:
        return [figure(result.comparison, result.names)]

    def section(
        self, result: ComparedRuns, inputs: ReportInputs, plots: list[Plot], out_dir: Path
    ) -> dict[str, Any]:
        """The section as plain data for its template."""
        comparison = result.comparison
        rows = [
            {
                "texts": texts[:-1],
                "verdict": cell.verdict,
                "reason": cell.reason,
                "tone": TONES[cell.verdict],
                "tinge": TINGES.get(cell.verdict, ""),
            }
            for cell, texts in zip(
                comparison.cells[:MAX_ROWS], table_rows(comparison), strict=False
            )
        ]
        only = zip(result.names, (comparison.only_before, comparison.only_after), strict=True)
        return {
            "headings": HEADINGS,
            "tinged": RATIO,
            "rows": rows,
            "unshown": max(0, len(comparison.cells) - MAX_ROWS),
            "means": MEANS,
            "only": [(name, labels[:MAX_ROWS]) for name, labels in only if labels],
            "plots": plots,
        }


def write(result: ComparedRuns, out_dir: Path) -> Path:
    """Write index.html, compare.md, compare.csv and compare.png.

    Returns:
        The path of index.html.

    Raises:
        BadInput: nothing can be written there.
    """
    facts = [(name, _side(side)) for name, side in zip(result.names, result.sides, strict=True)]
    return write_alone(
        ComparisonStudy(),
        result,
        ReportInputs([*result.sides[0], *result.sides[1]]),
        out_dir,
        names=" and ".join(result.names),
        subject=("What was compared?", facts),
        command="task=compare 'runs=[before,after]'",
    )


def _metric_name(metric: str) -> str:
    """A metric as one says it."""
    return NAMES.get(metric, metric)


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
        lines.append(
            markdown_table(HEADINGS[:1], HEADINGS[1:], table_rows(comparison), HEADINGS[6:])
        )
    for name, labels in zip(
        (old, new), (comparison.only_before, comparison.only_after), strict=True
    ):
        lines += [f"Only in {name}: {markdown_text(label)}" for label in labels]
    return "\n".join(lines).rstrip() + "\n"


def figure(comparison: Comparison, names: tuple[str, str]) -> Chart | None:
    """Ratios with their intervals on a logarithmic axis, a row a cell; None where no cell has
    one."""
    known = [cell for cell in comparison.cells if cell.ratio is not None]
    if not known:
        return None
    threshold = comparison.threshold
    band = Series("", GRID, [max(1 - threshold, 0.01), 1 + threshold], [], "band")

    def words(cell: Compared) -> str:
        return f"{comparison.name(cell)}: {spanned(cell.ratio, cell.low, cell.high)}"

    rows = ratio_rows(known[:MAX_BARS], comparison.name, words, COLOURS)
    better = f"{comparison.direction} is better, " if comparison.direction else ""
    label = f"{_metric_name(comparison.metric)}, after / before ({better}log scale)"
    panel = ratio_panel(rows, label, band)
    caption = (
        f"Before: {names[0]}; after: {names[1]}. Ratios of the typical block with 95 % "
        "intervals, in the colour of the verdict; the grey band is what the threshold lets pass."
    )
    if len(known) > MAX_BARS:
        caption += f" The first {MAX_BARS} of {len(known):,} cells; the table has them all."
    return Chart("compare", TITLE, comparison.conclusion, caption, [("", [panel])])
