"""How fast is each engine beside the others: the answer, its picture, and the table."""

from __future__ import annotations

from typing import TYPE_CHECKING

from minivllm.analysis.format import listing, ratio
from minivllm.analysis.interleaving import apart, busy_words, in_brackets
from minivllm.report.figures.chart import Chart
from minivllm.report.figures.opening import LoadLine, LoadPoint, over_loads
from minivllm.report.html import Conclusion
from minivllm.report.inputs import ReportInputs
from minivllm.report.spreadsheet import markdown_table
from minivllm.report.studies.base import PageTable, Study
from minivllm.report.studies.peer_table import (
    DEFAULT,
    SETTINGS,
    TO_BEST,
    Ahead,
    PeerLine,
    PeersTable,
    compare,
)
from minivllm.report.terminal import bare_table
from minivllm.report.verdict import remarks

if TYPE_CHECKING:
    from rich.table import Table


class PeersStudy(Study[PeersTable]):
    """Engines side by side; it finds records of minivllm and at least one other engine in a closed
    loop, at several precisions, with several numbers of requests at once or lengths of prompts."""

    name = "peers"
    title = "How fast is each engine?"
    page_title = "How fast is each engine with {model}?"
    leads = True
    file_names = ("peers.md",)

    def find(self, inputs: ReportInputs) -> PeersTable | None:
        return compare(inputs.cells)

    def conclusion(self, result: PeersTable, inputs: ReportInputs) -> Conclusion:
        """Where minivllm is ahead, and what has to be known of the records; what the table's words
        mean stands beside it."""
        lines = [*by_width(result), *remarks(inputs.cells, inputs.knobs)]
        return Conclusion(answer(result), lines)

    def picture(self, result: PeersTable, inputs: ReportInputs) -> Chart | None:
        """How far minivllm is ahead at each load, a line for each width of weights."""
        loads = loads_of(result)
        lines = [
            LoadLine.numbered(
                index,
                f"{bits}{f', {name}' if name != DEFAULT else ''}",
                [
                    LoadPoint(float(loads.index(load)), one.ratio, one.low, one.high)
                    for load, one in known.items()
                ],
                dashed=name != DEFAULT,
            )
            for index, ((bits, name), known) in enumerate(speeds(result).items())
        ]
        return over_loads(
            "How far is minivllm ahead?",
            [("", "best other engine = 1", lines)],
            "requests at once",
            f"Output tokens/s. {DEFAULT.capitalize()} unless it is named.",
            ticks=loads,
            even=1.0,
            span="its interval, or the least and the greatest block",
        )

    def statements(self, result: PeersTable, inputs: ReportInputs) -> list[str]:
        """What the table leaves open."""
        return list(result.notes)

    def tables(self, result: PeersTable, inputs: ReportInputs) -> list[Table]:
        """The table."""
        from rich.markup import escape

        table = bare_table("weights", "", *result.engines, TO_BEST)
        for line in result.lines:
            table.add_row(*map(escape, _words(line)))
        return [table]

    def files(self, result: PeersTable, inputs: ReportInputs) -> dict[str, str]:
        """peers.md: the table, for a README."""
        return {
            "peers.md": markdown_table(
                ["weights", "row"], [*result.engines, TO_BEST], map(_words, result.lines)
            )
        }

    def page_tables(self, result: PeersTable, inputs: ReportInputs) -> list[PageTable]:
        """The table, and the settings of each engine."""
        heads = ["weights", "", *result.engines, TO_BEST]
        return [
            PageTable("Engines side by side", heads, [*map(_words, result.lines)]),
            PageTable("Settings", SETTINGS, result.settings),
        ]


def _words(line: PeerLine) -> list[str]:
    return [line.bits, line.question.text, *(answer.text for answer in line.answers), line.ahead]


def speeds(table: PeersTable) -> dict[tuple[str, str], dict[str, Ahead]]:
    """How far ahead at each load: by width of the weights, and column of ours."""
    found: dict[tuple[str, str], dict[str, Ahead]] = {}
    for line in table.lines:
        for name, ahead in line.aheads.items() if line.question.speed else ():
            found.setdefault((line.bits, name), {})[line.question.speed] = ahead
    return found


def loads_of(table: PeersTable) -> list[str]:
    """The loads at which output was measured."""
    loads = dict.fromkeys(line.question.speed for line in table.lines if line.question.speed)
    return sorted(loads, key=lambda load: int(load.split()[0]))  # stable: prompts keep their order


def answer(table: PeersTable) -> str:
    """How far minivllm is ahead at each load, by default and with each other column of its, from
    the least width of weights to the greatest, as one sentence."""
    known, loads = speeds(table), loads_of(table)
    parts = []
    for name in dict.fromkeys(name for _, name in known):
        spans = []
        for load in loads:
            ratios = [
                by_load[load].ratio
                for (_, of), by_load in known.items()
                if of == name and load in by_load
            ]
            if ratios:
                ends = dict.fromkeys((ratio(min(ratios)), ratio(max(ratios))))
                spans.append(f"{' to '.join(ends)} at {load}")
        begin = f"by {name}" if name == DEFAULT else f"with {name}"
        parts.append(f"{begin} {listing(spans)}")
    if not parts:
        return "No load was served by minivllm and by another engine."
    answers = [line.answers for line in table.lines if line.question.speed]
    cells = [[one.cell for one in each if one.cell is not None] for each in answers]
    quoted = {id(cell): cell for each in cells for cell in each}.values()
    words = "measured apart" if any(apart(*each) for each in cells) else "", busy_words(*quoted)
    return f"minivllm over the best other engine: {'; '.join(parts)}{in_brackets(*words)}."


def by_width(table: PeersTable) -> list[str]:
    """How far minivllm is ahead at each load, a sentence for each width of weights."""
    known, loads = speeds(table), loads_of(table)
    return [
        f"{bits}{f', {name}' if name != DEFAULT else ''}: "
        + listing([f"{one.text} at {load}" for load in loads if (one := by_load.get(load))])
        + "."
        for (bits, name), by_load in known.items()
    ]
