"""What it saves that a picture was seen before: first tokens beside those of pictures that are all
new."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from minivllm.analysis.cell import Cell
from minivllm.analysis.format import MISSING, interval, ratio, sig
from minivllm.analysis.rows import number
from minivllm.analysis.statistics import Estimate, two_sample
from minivllm.report.figures.render import Plot
from minivllm.report.html import Conclusion
from minivllm.report.inputs import ReportInputs
from minivllm.report.spreadsheet import markdown_table
from minivllm.report.spreadsheet import markdown_text as escaped
from minivllm.report.studies.base import Study
from minivllm.report.verdict import remarks

TTFT = "metrics.ttft_ms.p50"
REUSE = "config.workload.reuse"
# What cells may have otherwise that are asked about the same kind of pictures.
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
        sooner: TTFT of the other over its own; None: it is that one, or there is none.
    """

    cell: Cell
    sooner: Estimate | None

    @property
    def reuse(self) -> float:
        """Chance that a picture is one that came before."""
        return number(self.cell.first(REUSE)) or 0.0

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
    title = "How much sooner does the answer about a picture begin that was seen before?"
    file_names = ("images.md",)

    def find(self, inputs: ReportInputs) -> list[Seen] | None:
        return seen_again(inputs.cells) or None

    def statements(self, result: list[Seen], inputs: ReportInputs) -> list[str]:
        return statements(result)

    def conclusion(self, result: list[Seen], inputs: ReportInputs) -> Conclusion:
        """The first statement, and what has to be known of the records."""
        headline, *others = statements(result)
        return Conclusion(headline, [*others, *remarks(inputs.cells)])

    def files(self, result: list[Seen], inputs: ReportInputs) -> dict[str, str]:
        """images.md: statements and the table."""
        lines = "\n".join(f"* {escaped(line)}" for line in statements(result))
        return {"images.md": f"{lines}\n\n{markdown_table([], list(HEADINGS), rows(result))}"}

    def section(
        self, result: list[Seen], inputs: ReportInputs, plots: list[Plot], out_dir: Path
    ) -> dict[str, Any]:
        """Statements and the table."""
        table = {"title": "Cells", "headings": HEADINGS, "rows": rows(result)}
        return {"statements": statements(result), "tables": [table], "plots": plots}


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
        group.sort(key=lambda cell: Seen(cell, None).reuse)
        least = Seen(group[0], None).reuse
        if Seen(group[-1], None).reuse > least:
            found += [
                Seen(cell, None if Seen(cell, None).reuse == least else _sooner(group[0], cell))
                for cell in group
            ]
    return found


def _sooner(new: Cell, cell: Cell) -> Estimate | None:
    """TTFT of one cell over that of another."""
    times = [
        [math.log(ms) for row in one.timed if (ms := number(row.get(TTFT)))] for one in (cell, new)
    ]
    return two_sample(*times) if all(times) else None


def statements(result: Sequence[Seen]) -> list[str]:
    """How much sooner each cell's answers began, the most first."""
    known = [(one, one.sooner) for one in result if one.sooner is not None]
    known.sort(key=lambda pair: -pair[1].ratio)
    lines = []
    for one, sooner in known:
        sure = interval(sooner.low, sooner.high)
        lines.append(
            f"{one.cell.label}: TTFT p50 {sig(one.cell.mean(TTFT))} ms, {ratio(sooner.ratio)}"
            f"{f' ({sure})' if sure != MISSING else ''} shorter than about pictures of which "
            f"{_share(_newest_of(one, result))} came before."
        )
    return lines or ["No cell says how long the first tokens took."]


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
            sig(one.cell.mean(TTFT)),
            ratio(None if one.sooner is None else one.sooner.ratio),
            MISSING if one.sooner is None else interval(one.sooner.low, one.sooner.high),
            sig(one.encoder("images_encoded")),
            sig(one.tower_ms),
            sig(one.encoder("image_tokens")),
            sig(one.encoder("encoder_cache_hits")),
        ]
        for one in result
    ]
