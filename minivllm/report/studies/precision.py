"""What each precision costs and gains: speed, memory, energy and quality side by side, and the
Pareto plot of them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from minivllm.analysis.cell import Cell
from minivllm.analysis.cells import name_columns
from minivllm.analysis.format import count, listing, show, sig
from minivllm.analysis.rows import distinct
from minivllm.bench.records.identity import quality_wanted
from minivllm.report.figures.cell_styles import CellStyles
from minivllm.report.figures.chart import Chart, Panel
from minivllm.report.figures.plots import THROUGHPUT
from minivllm.report.figures.render import Described, Plot
from minivllm.report.figures.scatter import frontier, frontier_series, thinning
from minivllm.report.figures.style import short
from minivllm.report.inputs import ReportInputs
from minivllm.report.sections import MAX_ROWS, anchors, unshown
from minivllm.report.spreadsheet import markdown_table
from minivllm.report.studies.base import Study
from minivllm.report.tables import Column, filled_columns, lines_of, page_row, terminal_table

if TYPE_CHECKING:
    from rich.table import Table

KL, PERPLEXITY = "quality.kl_mean", "quality.perplexity"
COLUMNS = (
    Column(THROUGHPUT, "Output"),
    Column("metrics.ttft_ms.p50", "TTFT p50"),
    Column("metrics.itl_ms.p50", "ITL p50"),
    Column("metrics.tpot_ms.p50", "TPOT p50"),
    Column("memory.weights", "Weights", terminal=True),
    Column("memory.linear", "Linear layers", "% of 16-bit", per="memory.linear_16bit"),
    Column("energy.joules_per_output_token", "Energy"),
    Column(PERPLEXITY, "Perplexity", digits=4, terminal=True),
    Column("quality.bits_per_byte", "Bits per byte"),
    Column(KL, "KL, mean", terminal=True),
    Column("quality.kl_p99", "KL, p99"),
    Column("quality.top1_agreement", "Top-1", terminal=True),
    Column("quality.prefix_mean", "Prefix, mean", terminal=True),
    Column("quality.prefix_min", "Prefix, least", whole=True, terminal=True),
)
TERMINAL = tuple(column for column in COLUMNS if column.terminal)
# in other tables of the page
BESIDE = ("metrics.ttft_ms.p50", "metrics.itl_ms.p50", "metrics.tpot_ms.p50")
# nats; where a cell that equals the reference is drawn, since a logarithmic axis has no zero
LEAST_KL = 1e-8


class _Gain(NamedTuple):
    """What quality is drawn against."""

    figure: str
    key: str
    scale: float
    sign: int  # of what is better: 1 more, -1 less
    label: str  # of its axis
    what: str  # in sentences
    better: str  # where the better cells are


SPEED = _Gain("precision", THROUGHPUT, 1.0, 1, "output tokens/s", "speed", "right")
MEMORY = _Gain("precision_memory", "memory.weights", 1e-9, -1, "GB of weights", "memory", "left")
PANELS = (("KL, nats a token", KL, True), ("Perplexity", PERPLEXITY, False))


class PrecisionStudy(Study[list[Cell]]):
    """What each cell costs in quality; it finds the cells whose quality was to be measured."""

    name = "precision"
    title = "What does each cost in quality?"
    template = "precision"
    figure_names = ("precision", "precision_memory")
    file_names = ("precision.md",)

    def find(self, inputs: ReportInputs) -> list[Cell] | None:
        return judged(inputs.cells) or None

    def tables(self, result: list[Cell], inputs: ReportInputs) -> list[Table]:
        """Quality, a row a cell."""
        columns, names = filled_columns(result, TERMINAL), name_columns(result)
        return [terminal_table(names, columns, lines_of(result, names, columns))]

    def replaces_summary(self, result: list[Cell], inputs: ReportInputs) -> bool:
        """Where quality is all that was measured."""
        timed = any(cell.mean(THROUGHPUT) is not None for cell in inputs.cells)
        return not timed and len(result) == len(inputs.cells)

    def files(self, result: list[Cell], inputs: ReportInputs) -> dict[str, str]:
        """precision.md: every column that has a figure, a row a cell."""
        columns, names = filled_columns(result, COLUMNS), name_columns(result)
        heads, lines = [one.heading for one in columns], lines_of(result, names, columns)
        return {"precision.md": markdown_table([*names, "status"], heads, lines)}

    def figures(self, result: list[Cell], inputs: ReportInputs) -> list[Described | None]:
        """See `pareto`: against speed, and against memory where cells differ in it."""
        return [pareto(inputs.cells, inputs.styles, gain) for gain in (SPEED, MEMORY)]

    def section(
        self, result: list[Cell], inputs: ReportInputs, plots: list[Plot], out_dir: Path
    ) -> dict[str, Any]:
        columns = [one for one in filled_columns(result, COLUMNS) if one.key not in BESIDE]
        names, places = name_columns(result), anchors(inputs.cells)
        return {
            "names": names,
            "columns": columns,
            "rows": [
                page_row(cell, names, columns, places.get(id(cell))) for cell in result[:MAX_ROWS]
            ],
            "notes": [*filter(None, [unshown(result, "precision.md")]), *_notes(result, columns)],
            "plots": plots,
        }


def judged(cells: list[Cell]) -> list[Cell]:
    """Cells whose quality was to be measured, failed ones too; none at all where no record has
    any."""
    if not any(cell.mean(PERPLEXITY) is not None for cell in cells):
        return []
    return [
        cell
        for cell in cells
        if cell.mean(PERPLEXITY) is not None or any(map(_wants_quality, cell.rows))
    ]


def _wants_quality(row: dict[str, Any]) -> bool:
    return quality_wanted(
        {
            "task": {"_target_": row.get("config.task._target_")},
            "measure": {"quality": row.get("config.measure.quality")},
        }
    )


def _notes(shown: list[Cell], columns: list[Column]) -> list[str]:
    rows = [row for cell in shown for row in cell.ok]
    references = listing([show(v) for v in distinct(rows, "quality.reference")])
    tokens = listing([f"{v:,}" for v in distinct(rows, "quality.tokens")])
    kl_tokens = listing([f"{v:,}" for v in distinct(rows, "quality.kl_tokens")])
    prompts = listing([show(v) for v in distinct(rows, "quality.prompts")])
    longest = listing([show(v) for v in distinct(rows, "quality.prefix_of")])
    notes = [
        f"Perplexity and top-1 are over {tokens} tokens, KL({references} ‖ cell) over "
        f"{kl_tokens}; prefix: greedy tokens identical with those of {references} before the "
        f"first that differs, of {longest}, over {prompts} prompts."
    ]
    perplexities = [sig(v, 4) for v in distinct(rows, "quality.reference_perplexity")]
    if perplexities:
        notes.append(f"Perplexity of the reference itself: {listing(perplexities)}.")
    if len(distinct(rows, "quality.reference_id")) > 1:
        notes.append(
            "These cells were compared with different references (another text, checkpoint, "
            "machine or version of the code), so their KL, top-1 and prefix must not be "
            "compared with each other."
        )
    if all(column.key != "energy.joules_per_output_token" for column in columns):
        reasons = (
            listing([show(v) for v in distinct(rows, "energy.reason")]) or "no reason recorded"
        )
        notes.append(f"J/token: {reasons}.")
    return notes


def pareto(cells: list[Cell], styles: CellStyles, gain: _Gain = SPEED) -> Chart | None:
    """Quality against speed or memory, a point a cell; None unless two cells have both, and differ
    in memory if that is drawn."""
    drawn = [
        cell
        for cell in judged(cells)
        if cell.mean(gain.key) is not None and cell.mean(KL) is not None
    ]
    gains = [(cell.mean(gain.key) or 0.0) * gain.scale for cell in drawn]
    if len(drawn) < 2 or (gain is MEMORY and len({*gains}) < 2):
        return None
    panels = []
    for title, key, logarithmic in PANELS:
        losses = [_loss(cell, key, logarithmic) for cell in drawn]
        points = list(zip(gains, losses, strict=True))
        edge = frontier([(gain.sign * x, y) for x, y in points])
        series = frontier_series(drawn, points, edge, styles, _words)
        panels.append(
            Panel(
                f"{title}: down and to the {gain.better} is better",
                gain.label,
                title + (" (log scale)" if logarithmic else ""),
                series,
                log_y=logarithmic,
                y_from_zero=False,
                named=not any(one.label for one in series),
            )
        )
    kl = [(gain.sign * x, cell.mean(KL) or 0.0) for x, cell in zip(gains, drawn, strict=True)]
    best = [drawn[i].label for i in frontier(kl)]
    alt = (
        f"Scatter of mean KL divergence and of perplexity against {gain.label}, "
        f"{count(len(drawn), 'cell')}. Beaten by none in KL and {gain.what} at once: "
        f"{listing(best, 6)}."
    )
    caption = (
        "A point a cell, means over blocks. The line joins the cells that no other beats in "
        f"{gain.what} and quality at once, drawn full: the choice is among "
        f"these.{styles.note}{thinning(drawn)}"
    )
    if any((cell.mean(KL) or 0.0) < LEAST_KL for cell in drawn):
        caption += f" A KL below {LEAST_KL:g} is drawn there."
    title = f"What does {'speed' if gain is SPEED else 'less memory'} cost in quality?"
    return Chart(gain.figure, title, alt, caption, [("", panels)])


def _loss(cell: Cell, key: str, logarithmic: bool) -> float:
    value = cell.mean(key) or 0.0
    return max(value, LEAST_KL) if logarithmic else value


def _words(cell: Cell) -> str:
    """What the pointer shows of a cell."""
    weights, speed = cell.mean(MEMORY.key), cell.mean(THROUGHPUT)
    figures = [
        *([f"{sig(speed)} tok/s"] if speed is not None else ()),
        *([f"{sig(weights * MEMORY.scale)} GB"] if weights is not None else ()),
        f"KL {sig(cell.mean(KL))}",
        f"perplexity {sig(cell.mean(PERPLEXITY), 4)}",
    ]
    return f"{short(cell.label, 60)}: {', '.join(figures)}"


def headline(cells: list[Cell]) -> list[str]:
    """One sentence for the verdict: how far the cells are from the reference."""
    known = [(cell, kl) for cell in judged(cells) if (kl := cell.mean(KL)) is not None]
    if not known:
        return []
    reference = show(known[0][0].first("quality.reference"))
    known.sort(key=lambda item: item[1])
    # The reference's own precision differs from it by rounding alone: no loss by choice.
    others = [item for item in known if show(item[0].first("choices.quant")) != reference] or known
    words = [
        f"{sig(kl)} nats in {cell.mention} (top-1 the same for "
        f"{sig(100 * (cell.mean('quality.top1_agreement') or 0.0))} %)"
        for cell, kl in (others[:1] if others[0] is known[-1] else (others[0], known[-1]))
    ]
    return [f"Quality: KL to {reference} is {' and '.join(words)}."]
