"""What it saves that a picture was seen before: first tokens beside those of pictures that are all
new."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from minivllm.analysis.cell import Cell
from minivllm.analysis.format import MISSING, interval, ratio, sig
from minivllm.analysis.interleaving import caveat, interval_text, marked, relative
from minivllm.analysis.rows import number
from minivllm.analysis.statistics import Estimate
from minivllm.report.figures.chart import Chart
from minivllm.report.figures.opening import ForestRow, forest
from minivllm.report.html import Conclusion
from minivllm.report.inputs import ReportInputs
from minivllm.report.studies.base import PageTable, Study
from minivllm.report.verdict import remarks

TTFT = "metrics.ttft_ms.p50"
REUSE = "config.workload.reuse"
# What cells may have otherwise about the same kind of pictures.
APART = ("choices.engine", "config.engine.", REUSE, "config.cache.", "config.vision.")
KERNEL = "attention_backend"  # which differs with the engine
HEADINGS = (
    "cell",
    "reuse",
    "TTFT p50 (ms)",
    "× new",
    "interval",
    "pictures encoded",
    "encoder (ms each)",
    "image tokens",
    "encoder-cache hits",
)


@dataclass(frozen=True)
class Seen:
    """One cell beside the one of its engine whose pictures are seen least often before.

    Attributes:
        new: that other one, or the cell itself.
        sooner: TTFT of the other over its own; None: it is that one, or has none.
    """

    cell: Cell
    new: Cell
    sooner: Estimate | None

    @property
    def reuse(self) -> float:
        """Chance that a picture is one that came before."""
        return _reuse(self.cell)

    def encoder(self, name: str) -> float | None:
        """A figure of the record's `encoder`, as mean of the blocks."""
        return self.cell.mean(f"encoder.{name}")

    @property
    def tower_ms(self) -> float | None:
        """Milliseconds of the tower for each picture that it computed."""
        images, ms = self.encoder("images_encoded"), self.encoder("encoder_ms")
        return ms / images if ms is not None and images else None


class ImagesStudy(Study[list[Seen]]):
    """How much sooner answers about known pictures begin; it finds cells of `workload=images` that
    differ in `workload.reuse`."""

    name = "images"
    leads = True
    title = "How much sooner does the answer about a picture begin that was seen before?"
    page_title = title
    file_names = ("images.md",)

    def find(self, inputs: ReportInputs) -> list[Seen] | None:
        return seen_again(inputs.cells) or None

    def statements(self, result: list[Seen], inputs: ReportInputs) -> list[str]:
        return statements(result)

    def conclusion(self, result: list[Seen], inputs: ReportInputs) -> Conclusion:
        """The first statement, and what has to be known of the records."""
        headline, *others = statements(result)
        return Conclusion(headline, [*others, *remarks(inputs.cells, inputs.knobs)])

    def picture(self, result: list[Seen], inputs: ReportInputs) -> Chart | None:
        """A row for each cell about pictures that came before."""
        known = [(one.cell, one.sooner) for one in result if one.sooner is not None]
        known.sort(key=lambda pair: -pair[1].ratio)
        rows = [
            ForestRow(cell.label, sooner.ratio, sooner.low, sooner.high, words=ratio(sooner.ratio))
            for cell, sooner in known
        ]
        label = "TTFT p50 about new pictures / about these"
        return forest("How much sooner?", rows, label, "", even=1.0, span="95 % interval")

    def page_tables(self, result: list[Seen], inputs: ReportInputs) -> list[PageTable]:
        return [PageTable("Cells", HEADINGS, rows(result))]


def seen_again(cells: Sequence[Cell]) -> list[Seen]:
    """The cells about pictures, where some of an engine's differ in `workload.reuse` alone, but for
    caches."""
    groups: dict[tuple[Any, ...], list[Cell]] = {}
    for cell in cells:
        if cell.ok and not cell.simulated and cell.first("choices.workload") == "images":
            apart = {t for key, t in cell.columns.items() if key.startswith((*APART, KERNEL))}
            same = tuple((t, v) for t, v in cell.varying.items() if t not in apart)
            groups.setdefault((cell.first("choices.engine"), same), []).append(cell)
    found = []
    for group in groups.values():
        group.sort(key=_reuse)
        new, least = group[0], _reuse(group[0])
        if _reuse(group[-1]) > least:
            found += [
                Seen(cell, new, None if _reuse(cell) == least else _sooner(new, cell))
                for cell in group
            ]
    return found


def _reuse(cell: Cell) -> float:
    return number(cell.first(REUSE)) or 0.0


def _sooner(new: Cell, cell: Cell) -> Estimate | None:
    """TTFT of one cell over that of another."""
    return relative(new, cell, lambda row: number(row.get(TTFT)))


def statements(result: Sequence[Seen]) -> list[str]:
    """How much sooner each cell's answers began, the most first."""
    known = [(one, one.sooner) for one in result if one.sooner is not None]
    known.sort(key=lambda pair: -pair[1].ratio)
    lines = []
    for one, sooner in known:
        share = _share(_newest_of(one, result))
        lines.append(
            f"{one.cell.label}: TTFT p50 {sig(one.cell.mean(TTFT))} ms, {_times(sooner)} than "
            f"about pictures of which {share} came before{caveat(one.cell, one.new)}."
        )
    return lines or ["No cell says how long the first tokens took."]


def _times(sooner: Estimate) -> str:
    """How many times shorter, or longer where it is."""
    if sooner.ratio >= 1:
        times, low, high, word = sooner.ratio, sooner.low, sooner.high, "shorter"
    else:
        ends = [None if end is None else 1 / end for end in (sooner.high, sooner.low)]
        times, low, high, word = 1 / sooner.ratio, *ends, "longer"
    sure = interval(low, high)
    return f"{ratio(times)}{f' ({sure})' if sure != MISSING else ''} {word}"


def _newest_of(one: Seen, result: Sequence[Seen]) -> float:
    """The least reuse among the cells of an engine."""
    engine = one.cell.first("choices.engine")
    return min(other.reuse for other in result if other.cell.first("choices.engine") == engine)


def _share(reuse: float) -> str:
    return f"{sig(100 * reuse)} %" if reuse else "none"


def rows(result: Sequence[Seen]) -> list[list[str]]:
    """The cells under HEADINGS."""
    return [
        [
            one.cell.label,
            sig(one.reuse),
            marked(sig(one.cell.mean(TTFT)), one.cell),
            marked(ratio(None if one.sooner is None else one.sooner.ratio), one.cell, one.new),
            interval_text(one.sooner, one.cell, one.new),
            sig(one.encoder("images_encoded")),
            sig(one.tower_ms),
            sig(one.encoder("image_tokens")),
            sig(one.encoder("encoder_cache_hits")),
        ]
        for one in result
    ]
