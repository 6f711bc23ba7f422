"""What drafts are worth: each speculating cell beside the one without drafts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from minivllm.analysis.cell import Cell
from minivllm.analysis.format import count, listing, ratio, sig, whole_percent
from minivllm.analysis.interleaving import (
    APART,
    apart,
    busy_words,
    in_brackets,
    interval_text,
    marked,
    relative,
)
from minivllm.analysis.rows import number
from minivllm.analysis.statistics import Estimate
from minivllm.extras.speculative.options import NOT_SPECULATING
from minivllm.report.figures.chart import Chart, Panel, Series
from minivllm.report.figures.opening import LoadLine, LoadPoint, over_loads
from minivllm.report.figures.palette import FAINT, MIST, SAND, SLATE, TAUPE
from minivllm.report.figures.render import Described
from minivllm.report.html import Conclusion
from minivllm.report.inputs import ReportInputs
from minivllm.report.studies.base import PageTable, Study
from minivllm.report.studies.simulation import twins
from minivllm.report.verdict import remarks

THROUGHPUT = "metrics.output_tokens_per_s"
REQUESTS = "config.workload.num_requests"
KNOBS = "config.speculative."
HEADINGS = (
    "model",
    "proposer",
    "K",
    "requests",
    "temperature",
    "with / without",
    "95 %",
    "drafts accepted",
    "token acceptance",
    "tokens a draft",
    "draft (ms)",
    "verify (ms)",
    "breaks even at",
)


@dataclass(frozen=True)
class DraftGain:
    """A speculating cell, and its speed over that of the cell without drafts."""

    cell: Cell
    base: Cell
    speedup: Estimate

    @property
    def proposer(self) -> str:
        """The proposer, with what tells two of the same name apart."""
        exit_layer = self.cell.first(f"{KNOBS}exit_layer")
        layers = "" if exit_layer is None else f" after layer {exit_layer}"
        return f"{self.cell.named('choices.speculative')}{layers}"

    @property
    def given(self) -> bool:
        """Whether the acceptance was set, not measured."""
        return self.cell.first(f"{KNOBS}acceptance") is not None

    @property
    def adaptive(self) -> bool:
        """Whether drafts are only as long as they pay."""
        return bool(self.cell.first(f"{KNOBS}adaptive"))

    @property
    def requests(self) -> float:
        """Requests at once."""
        return float(self.cell.first(REQUESTS) or 1)

    @property
    def acceptance(self) -> float | None:
        """Share of draft tokens that were accepted."""
        return self.cell.mean("speculation.draft_acceptance_rate")

    @property
    def drafts(self) -> str:
        """Most tokens of a draft."""
        longest = self.cell.named(f"{KNOBS}num_speculative_tokens")
        return f"up to {longest}" if self.adaptive else longest


class SpeculationStudy(Study[list[DraftGain]]):
    """When drafts pay."""

    name = "speculation"
    leads = True
    title = "When do drafts pay?"
    page_title = "When do drafts pay on {model}?"
    figure_names = ("speculation", "break_even")
    file_names = ("speculation.md",)

    def find(self, inputs: ReportInputs) -> list[DraftGain] | None:
        return draft_gains(inputs.cells) or None

    def conclusion(self, result: list[DraftGain], inputs: ReportInputs) -> Conclusion:
        """The statements, and remarks on the cells."""
        lines = statements(result)
        headline = answer(result) or lines.pop(0)
        return Conclusion(headline, [*lines, *remarks(inputs.cells, inputs.knobs)])

    def picture(self, result: list[DraftGain], inputs: ReportInputs) -> Chart | None:
        """What the best cell of each proposer gives at each load."""
        judged = [one for one in result if not one.given] or result
        lines = []
        for index, name in enumerate(dict.fromkeys(one.proposer for one in judged)):
            best: dict[float, DraftGain] = {}
            for one in judged:
                known = best.get(one.requests)
                if one.proposer == name and (
                    known is None or one.speedup.ratio > known.speedup.ratio
                ):
                    best[one.requests] = one
            points = [
                LoadPoint(load, one.speedup.ratio, one.speedup.low, one.speedup.high)
                for load, one in sorted(best.items())
            ]
            lines.append(LoadLine.numbered(index, name, points))
        caption = "Output tokens/s over those without drafts, of the best cell of each proposer."
        panels = [("", "with / without drafts", lines)]
        load, span = "requests at once", "95 % interval"
        return over_loads(self.title, panels, load, caption, even=1.0, span=span)

    def statements(self, result: list[DraftGain], inputs: ReportInputs) -> list[str]:
        return statements(result)

    def figures(self, result: list[DraftGain], inputs: ReportInputs) -> list[Described | None]:
        """Speed-up over load, and over given acceptance."""
        return [by_load(result), by_acceptance(result)]

    def page_tables(self, result: list[DraftGain], inputs: ReportInputs) -> list[PageTable]:
        """A row for each cell."""
        return [PageTable("Drafts, with / without", HEADINGS, rows(result))]


def draft_gains(cells: list[Cell]) -> list[DraftGain]:
    """Every speculating cell that has one without drafts beside it."""
    speculating = [cell for cell in cells if cell.ok and _speculates(cell)]
    if not speculating:
        return []
    plain = [cell for cell in cells if cell.ok and not _speculates(cell)]
    found = []
    for cell, base in twins(speculating, plain, "speculative"):
        speedup = relative(cell, base, lambda row: number(row.get(THROUGHPUT)))
        if speedup is not None:
            found.append(DraftGain(cell, base, speedup))
    return found


def _speculates(cell: Cell) -> bool:
    return cell.first("config.speculative._target_") not in (None, NOT_SPECULATING)


def drafting(result: Sequence[DraftGain]) -> list[DraftGain]:
    """Cells with drafts and an acceptance that was measured: one whose proposer found nothing says
    what noise there is, not what drafts are worth."""
    return [
        one
        for one in result
        if not one.given and one.cell.mean("speculation.num_drafts") not in (0, 0.0)
    ]


def answer(result: Sequence[DraftGain]) -> str:
    """Whether drafts pay at the least load and at the greatest, in one sentence; "" where none was
    made."""
    judged, parts = drafting(result), list[str]()
    quoted: list[DraftGain] = []
    for requests in dict.fromkeys(edges(judged)):
        at = [one for one in judged if one.requests == requests]
        best = max(at, key=lambda one: one.speedup.ratio)
        low, high, given = best.speedup.low, best.speedup.high, ratio(best.speedup.ratio)
        where = f"with {count(int(requests), 'request')} at once"
        if low is None or high is None:
            parts.append(f"give {given} {where} ({best.proposer})")
        else:
            pays = "pay" if low > 1 else "do not pay" if high < 1 else "may not pay"
            parts.append(f"{pays} {where} ({best.proposer} gives {given})")
        quoted.append(best)
    return f"Drafts {' and '.join(parts)}{_caveat(quoted)}." if parts else ""


def _caveat(quoted: Sequence[DraftGain], is_noted: bool = False) -> str:
    """What has to stand beside these ratios, once; `is_noted`: not that they were
    measured apart."""
    unpaired = not is_noted and any(apart(one.cell, one.base) for one in quoted)
    cells = {id(cell): cell for one in quoted for cell in (one.cell, one.base)}
    return in_brackets(APART if unpaired else "", busy_words(*cells.values()))


def statements(result: Sequence[DraftGain]) -> list[str]:
    """Sentences: the best at the least load and at the greatest, and what is set."""
    judged = drafting(result)
    all_apart = bool(judged) and all(apart(one.cell, one.base) for one in judged)
    lines = []
    for requests in dict.fromkeys(edges(judged)):
        at = [one for one in judged if one.requests == requests]
        ordered = sorted(at, key=lambda one: one.speedup.ratio)
        best, worst = ordered[-1], ordered[0]
        other = "" if best is worst else f"; {worst.proposer} the least, {_words(worst, all_apart)}"
        lines.append(
            f"{count(int(requests), 'request')} at once: {best.proposer} gives the most, "
            f"{_words(best, all_apart)}{other}."
        )
    adaptive = [one for one in judged if one.adaptive]
    if adaptive:
        least = min(adaptive, key=lambda one: one.speedup.ratio)
        lines.append(
            f"With adaptive lengths never under {_words(least, all_apart)} ({least.proposer})."
        )
    if all_apart:
        lines.append("Cells were measured apart, so no ratio has an interval.")
    if idle := len([one for one in result if not one.given]) - len(judged):
        lines.append(f"{count(idle, 'cell')} had no draft: their ratios are noise.")
    if given := [one for one in result if one.given]:
        lines.append(
            f"{count(len(given), 'cell')} with an acceptance that is set, not measured: costs are "
            "real, outputs mean nothing."
        )
    return lines


def edges(result: Sequence[DraftGain]) -> list[float]:
    """The least and the greatest load."""
    loads = sorted(one.requests for one in result)
    return [loads[0], loads[-1]] if loads else []


def _words(one: DraftGain, is_noted: bool) -> str:
    low, high = one.speedup.low, one.speedup.high
    span = "" if low is None else f" [{ratio(low)}, {ratio(high)}]"
    temperature = one.cell.named("config.decoding.temperature")
    return (
        f"{ratio(one.speedup.ratio)}{span} at temperature {temperature}{_caveat([one], is_noted)}"
    )


def rows(result: Sequence[DraftGain]) -> list[list[str]]:
    """The cells under HEADINGS, the loads ascending."""
    ordered = sorted(
        result,
        key=lambda one: (one.given, one.cell.named("choices.model"), one.proposer, one.requests),
    )
    return [
        [
            one.cell.named("choices.model"),
            one.proposer,
            one.drafts,
            f"{one.requests:.0f}",
            one.cell.named("config.decoding.temperature"),
            marked(ratio(one.speedup.ratio), one.cell, one.base),
            interval_text(one.speedup, one.cell, one.base),
            f"{whole_percent(one.acceptance)}{' (set)' * one.given}",
            whole_percent(one.cell.mean("speculation.token_acceptance")),
            sig(one.cell.mean("speculation.mean_acceptance_length")),
            sig(one.cell.mean("speculation.draft_ms")),
            sig(one.cell.mean("speculation.verify_ms")),
            whole_percent(one.cell.mean("speculation.break_even_acceptance")),
        ]
        for one in ordered
    ]


def by_load(result: Sequence[DraftGain]) -> Chart | None:
    """Speed-up over requests at once, a panel for each temperature and way to choose lengths."""
    judged = [one for one in result if not one.given]
    kinds = dict.fromkeys((_temperature(one), one.drafts) for one in judged)
    names = dict.fromkeys(one.proposer for one in judged)
    colours = dict(zip(names, (SLATE, TAUPE, MIST, SAND), strict=False))
    panels: dict[str, list[Panel]] = {}
    for temperature, drafts in kinds:
        series: list[Series] = []
        for name, colour in colours.items():
            points = sorted(
                (one.requests, one.speedup.ratio, _note(one))
                for one in judged
                if (one.proposer, _temperature(one), one.drafts) == (name, temperature, drafts)
            )
            series += _curve(name, colour, points)
        title = f"{drafts} tokens, temperature {temperature}"
        panel = _panel(title, "requests at once (log scale)", series)
        panels.setdefault(temperature, []).append(panel)
    if not panels:
        return None
    return Chart(
        "speculation",
        "What are drafts worth under load?",
        " ".join(statements(result)),
        "Output tokens per second over those without drafts; 1 is the dashed line.",
        [("", row) for row in panels.values()],
    )


def by_acceptance(result: Sequence[DraftGain]) -> Chart | None:
    """Speed-up over given acceptance, a line for each load: where it crosses 1 drafts break even.
    The most frequent proposer alone, since others have other costs."""
    given = [one for one in result if one.given and one.acceptance is not None]
    kinds = [_kind(one) for one in given]
    most = max(kinds, key=kinds.count, default=None)
    given = [one for one in given if _kind(one) == most]
    if len({one.acceptance for one in given}) < 2:
        return None
    series: list[Series] = []
    loads = sorted({one.requests for one in given})
    for requests, colour in zip(loads, (SLATE, TAUPE, MIST, SAND), strict=False):
        points = sorted(
            (one.acceptance or 0.0, one.speedup.ratio, _note(one))
            for one in given
            if one.requests == requests
        )
        series += _curve(count(int(requests), "request"), colour, points)
    panel = _panel("", "share of draft tokens accepted", series, log_x=False)
    return Chart(
        "break_even",
        "From which acceptance do drafts pay?",
        listing([f"{sig(one.acceptance)}: {_note(one)}" for one in given]),
        f"{given[0].proposer} of {given[0].drafts} tokens on {most[0] if most else ''}, with an "
        "acceptance that is set. A line pays where it is above 1.",
        [("", [panel])],
    )


def _kind(one: DraftGain) -> tuple[str, str, str]:
    return one.cell.named("choices.model"), one.proposer, one.drafts


def _temperature(one: DraftGain) -> str:
    return one.cell.named("config.decoding.temperature")


def _note(one: DraftGain) -> str:
    return f"{one.proposer}, K {one.drafts}: {ratio(one.speedup.ratio)}"


def _curve(name: str, colour: str, points: Sequence[tuple[float, float, str]]) -> list[Series]:
    if not points:
        return []
    xs, ys = [x for x, _, _ in points], [y for _, y, _ in points]
    return [
        Series(name, colour, xs, ys, "line"),
        Series("", colour, xs, ys, names=[words for _, _, words in points]),
    ]


def _panel(title: str, x_label: str, series: list[Series], log_x: bool = True) -> Panel:
    ends = [min(x for one in series for x in one.x), max(x for one in series for x in one.x)]
    even = Series("no drafts", FAINT, ends, [1.0, 1.0], "line", dashed=True)
    return Panel(title, x_label, "with / without", [even, *series], log_x)
