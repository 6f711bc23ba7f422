"""What each precision costs and gains: speed, memory, energy and quality side by side, and the Pareto plot of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from minivllm.bench.identity import quality_wanted
from minivllm.report.cells import Cell, gather, show
from minivllm.report.format import count, listing, sig
from minivllm.report.plots import THROUGHPUT
from minivllm.report.rows import distinct, rows_of
from minivllm.report.style import (
    LIGHT,
    Plot,
    canvas,
    colours,
    heading,
    legend_below,
    mark,
    png,
    short,
)
from minivllm.report.tables import Column, markdown_table, rich_table, spread_text, summary_table, text

if TYPE_CHECKING:
    import pandas as pd
    from rich.table import Table

KL, PERPLEXITY = "quality.kl_mean", "quality.perplexity"
COLUMNS = (
    Column(THROUGHPUT, "Output", "tok/s"),
    Column("metrics.ttft_ms.p50", "TTFT p50", "ms"),
    Column("metrics.itl_ms.p50", "ITL p50", "ms"),
    Column("metrics.tpot_ms.p50", "TPOT p50", "ms"),
    Column("memory.weights", "Weights", "GB", 1e-9, terminal=True),
    Column("memory.linear", "Linear layers", "% of 16-bit", 100.0, per="memory.linear_16bit"),
    Column("energy.joules_per_output_token", "Energy", "J/token"),
    Column(PERPLEXITY, "Perplexity", "", digits=4, terminal=True),
    Column("quality.bits_per_byte", "Bits per byte", ""),
    Column(KL, "KL, mean", "nats", terminal=True),
    Column("quality.kl_p99", "KL, p99", "nats"),
    Column("quality.top1_agreement", "Top-1", "%", 100.0, terminal=True),
    Column("quality.prefix_mean", "Prefix, mean", "tokens", terminal=True),
    Column("quality.prefix_min", "Prefix, least", "tokens", whole=True, terminal=True),
)
LEAST_KL = 1e-8  # nats; where a cell that equals the reference is drawn, since a logarithmic axis has no zero
MAX_NAMED = 16  # points with their names beside them


@dataclass(frozen=True)
class Panel:
    """One quality against throughput; less of it is better."""

    key: str
    title: str
    logarithmic: bool


PANELS = (
    Panel(KL, "KL to the reference, nats a token", True),
    Panel(PERPLEXITY, "Perplexity", False),
)


def judged(cells: list[Cell]) -> list[Cell]:
    """Cells of which quality was asked, failed ones too; none at all where no record has any."""
    if not any(cell.mean(PERPLEXITY) is not None for cell in cells):
        return []
    return [cell for cell in cells if cell.mean(PERPLEXITY) is not None or any(map(_asked, cell.rows))]


def _asked(row: dict[str, Any]) -> bool:
    return quality_wanted(
        {
            "task": {"_target_": row.get("config.task._target_")},
            "measure": {"quality": row.get("config.measure.quality")},
        }
    )


def used(cells: list[Cell]) -> list[Column]:
    """The columns that hold at least one figure."""
    return [column for column in COLUMNS if any(column.mean(cell) is not None for cell in cells)]


def section(cells: list[Cell]) -> dict[str, Any] | None:
    """The precision section as plain data for the page's template; None where no record has quality."""
    shown = judged(cells)
    if not shown:
        return None
    columns = used(shown)
    return {
        "names": _titles(shown),
        "columns": columns,
        "rows": [
            {
                "names": _names(cell),
                "status": cell.status_text,
                "tone": "ok" if not cell.failed else "mixed" if cell.ok else "failed",
                "figures": [
                    {"text": text(cell, c), "sort": c.mean(cell), "spread": spread_text(cell, c)}
                    for c in columns
                ],
            }
            for cell in shown
        ],
        "notes": _notes(shown, columns),
    }


def _titles(cells: list[Cell]) -> list[str]:
    return list(cells[0].varying) or ["cell"]


def _names(cell: Cell) -> list[str]:
    if not cell.varying or not cell.configured:
        return [cell.label] + [""] * (len(cell.varying) - 1)
    return list(cell.varying.values())


def _notes(shown: list[Cell], columns: list[Column]) -> list[str]:
    rows = [row for cell in shown for row in cell.ok]
    references = listing([show(v) for v in distinct(rows, "quality.reference")])
    tokens = listing([show(v) for v in distinct(rows, "quality.tokens")])
    kl_tokens = listing([show(v) for v in distinct(rows, "quality.kl_tokens")])
    prompts = listing([show(v) for v in distinct(rows, "quality.prompts")])
    longest = listing([show(v) for v in distinct(rows, "quality.prefix_of")])
    notes = [
        f"Perplexity and top-1 are over {tokens} tokens, KL({references} ‖ cell) over {kl_tokens}; prefix: greedy tokens "
        f"identical with those of {references} before the first that differs, of {longest}, over {prompts} prompts."
    ]
    perplexities = [sig(v, 4) for v in distinct(rows, "quality.reference_perplexity")]
    if perplexities:
        notes.append(f"Perplexity of the reference itself: {listing(perplexities)}.")
    if len(distinct(rows, "quality.reference_id")) > 1:
        notes.append(
            "These cells were compared with different references (another text, checkpoint, machine or version of "
            "the code), so their KL, top-1 and prefix must not be compared with each other."
        )
    if all(column.key != "energy.joules_per_output_token" for column in columns):
        reasons = listing([show(v) for v in distinct(rows, "energy.reason")]) or "no reason recorded"
        notes.append(f"J/token: {reasons}.")
    return notes


def markdown_text(cells: list[Cell]) -> str:
    """precision.md: every used column, a row a cell; empty where no record has quality."""
    shown = judged(cells)
    if not shown:
        return ""
    columns = used(shown)
    lines = [[*_names(cell), cell.status_text, *(text(cell, column) for column in columns)] for cell in shown]
    return markdown_table([*_titles(shown), "status"], [column.heading for column in columns], lines)


def summary_tables(frame: pd.DataFrame) -> list[Table]:
    """The terminal's tables of a frame of `load_records`: the summary, and quality where records have it.

    Where quality is all that was measured its table says everything, so the other one is left out.
    """
    cells = gather(rows_of(frame))
    shown = judged(cells)
    timed = any(cell.mean(THROUGHPUT) is not None for cell in cells)
    tables = [summary_table(frame)] if timed or len(shown) < len(cells) else []
    return [*tables, _quality_table(shown)] if shown else tables


def _quality_table(shown: list[Cell]) -> Table:
    columns = [column for column in used(shown) if column.terminal]
    table = rich_table(_titles(shown), [(column.title, column.unit) for column in columns])
    for cell in shown:
        table.add_row(*_names(cell), cell.status_text, *(text(cell, column) for column in columns))
    return table


def frontier(points: list[tuple[float, float]]) -> list[int]:
    """Indices of the points (speed, loss) that no other beats in one without losing in the other, slowest first."""
    best, found = float("inf"), []
    for index in sorted(range(len(points)), key=lambda i: (-points[i][0], points[i][1])):
        if points[index][1] < best:
            best = points[index][1]
            found.append(index)
    return found[::-1]


def pareto(cells: list[Cell]) -> Plot | None:
    """Quality against throughput, a point a cell; None unless two cells have both."""
    drawn = [
        cell for cell in judged(cells) if cell.mean(THROUGHPUT) is not None and cell.mean(KL) is not None
    ]
    if len(drawn) < 2:
        return None
    figure, axes = canvas(1, 2, height=3.9)
    tints, legend, title = colours(drawn)
    fastest = max(cell.mean(THROUGHPUT) or 0.0 for cell in drawn)
    for ax, panel in zip(axes, PANELS, strict=True):
        points = [(cell.mean(THROUGHPUT) or 0.0, cell.mean(panel.key) or 0.0) for cell in drawn]
        if panel.logarithmic:
            points = [(x, max(y, LEAST_KL)) for x, y in points]
            ax.set_yscale("log")
        edge = frontier(points)
        ax.plot(*zip(*(points[i] for i in edge), strict=True), color=LIGHT, lw=2, zorder=1)
        for i, (cell, tint, (x, y)) in enumerate(zip(drawn, tints, points, strict=True)):
            ax.plot(x, y, "o", color=tint, ms=8, mew=1.6, mfc=tint if i in edge else "white", zorder=2)
            if not legend and len(drawn) <= MAX_NAMED:
                ax.annotate(
                    short(cell.label, 26), (x, y), xytext=(6, 4), textcoords="offset points", fontsize=8
                )
        ax.set_xlim(0, fastest * 1.12)
        ax.margins(y=0.15)
        ax.set_xlabel("output tokens/s")
        ax.set_ylabel(panel.title + (" (log scale)" if panel.logarithmic else ""))
        ax.grid(True)
    heading(axes[0], "Down and to the right is better")
    legend_below(figure, [(mark("o", colour), f"{title}={value}") for value, colour in legend.items()])
    kl = [(cell.mean(THROUGHPUT) or 0.0, cell.mean(KL) or 0.0) for cell in drawn]
    best = [drawn[i].label for i in frontier(kl)]
    alt = (
        f"Scatter of mean KL divergence and of perplexity against output tokens per second, "
        f"{count(len(drawn), 'cell')}. Beaten by none in KL and speed at once: {listing(best, 6)}."
    )
    caption = (
        "A point a cell, means over blocks. The line joins the cells that no other beats in speed and quality at "
        "once, drawn full: the choice is among these."
    )
    if any((cell.mean(KL) or 0.0) < LEAST_KL for cell in drawn):
        caption += f" A KL below {LEAST_KL:g} is drawn there."
    return Plot("precision", "Quality against speed", alt, caption, png(figure))


def headline(cells: list[Cell]) -> list[str]:
    """One sentence for the verdict: how far the cells are from the reference."""
    known = [(cell, kl) for cell in judged(cells) if (kl := cell.mean(KL)) is not None]
    if not known:
        return []
    reference = show(known[0][0].first("quality.reference"))
    known.sort(key=lambda item: item[1])
    words = [
        f"{sig(kl)} nats in {cell.label} (top-1 the same for {sig(100 * (cell.mean('quality.top1_agreement') or 0.0))} %)"
        for cell, kl in (known[:1] if len(known) == 1 else (known[0], known[-1]))
    ]
    return [f"Quality: KL to {reference} is {' and '.join(words)}."]
