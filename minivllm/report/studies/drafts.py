"""What drafts gave and cost: acceptance, tokens a step, and the acceptance from which on they
pay."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minivllm.analysis.cell import Cell
from minivllm.analysis.cells import name_columns, names_of
from minivllm.analysis.format import count, show, sig
from minivllm.report.figures.cell_styles import CellStyles
from minivllm.report.figures.palette import PALETTE
from minivllm.report.figures.render import Described, Plot
from minivllm.report.figures.style import Drawing, Sheet, canvas, legend_below, patch, short
from minivllm.report.inputs import ReportInputs
from minivllm.report.sections import MAX_ROWS, anchors, unshown
from minivllm.report.studies.base import Study
from minivllm.report.tables import (
    Column,
    filled_columns,
    lines_of,
    page_row,
    terminal_table,
    text,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.table import Table

SET = "acceptance set"
COLUMNS = (
    Column("speculation.num_drafts", "Drafts", whole=True),
    Column("speculation.num_draft_tokens", "Draft tokens", whole=True),
    Column("speculation.draft_acceptance_rate", "Accepted", terminal=True),
    Column("speculation.mean_acceptance_length", "Length", terminal=True),
    Column("speculation.tokens_per_step", "Tokens a step", "", terminal=True),
    Column("speculation.draft_ms", "Draft", terminal=True),
    Column("speculation.verify_ms", "Verify", terminal=True),
    Column("speculation.plain_ms", "Plain step", terminal=True),
    Column("speculation.token_acceptance", "Token acceptance", ""),
    Column("speculation.break_even_acceptance", "Break-even", "", terminal=True),
)

TERMINAL = tuple(column for column in COLUMNS if column.terminal)


class DraftsStudy(Study[list[Cell]]):
    """What drafts gave and cost; it finds the cells that speculate."""

    name = "drafts"
    title = "What do drafts give, and what do they cost?"
    template = "drafts"
    figure_names = ("acceptance",)

    def find(self, inputs: ReportInputs) -> list[Cell] | None:
        return speculating(inputs.cells) or None

    def statements(self, result: list[Cell], inputs: ReportInputs) -> list[str]:
        """A sentence for a lone cell; several have a table."""
        return [sentence(result[0])] if len(inputs.cells) == 1 else []

    def tables(self, result: list[Cell], inputs: ReportInputs) -> list[Table]:
        """A row a cell, where there are several."""
        if len(inputs.cells) == 1:
            return []
        columns, names = filled_columns(result, TERMINAL), name_columns(result)
        return [terminal_table(names, columns, lines_of(result, names, columns, status))]

    def figures(self, result: list[Cell], inputs: ReportInputs) -> Iterable[Described | None]:
        return [acceptance(result, inputs.styles)]

    def section(
        self, result: list[Cell], inputs: ReportInputs, plots: list[Plot], out_dir: Path
    ) -> dict[str, Any]:
        columns = filled_columns(result, COLUMNS)
        names = name_columns(inputs.cells) if len(inputs.cells) > 1 else []
        headings = names if "speculative" in names else [*names, "Proposer"]
        places = anchors(inputs.cells)
        rows: list[dict[str, Any]] = [
            {
                **page_row(cell, names, columns, places.get(id(cell))),
                "names": [*names_of(cell, names), show(cell.first("speculation.proposer"))][
                    : len(headings)
                ],
                "status": status(cell),
                "positions": [f"{100 * share:.1f}" for share in by_position(cell)],
            }
            for cell in result[:MAX_ROWS]
        ]
        return {
            "statements": self.statements(result, inputs),
            "names": headings,
            "columns": columns,
            "positions": max(len(row["positions"]) for row in rows),
            "rows": rows,
            "notes": [*filter(None, [unshown(result, "the records")]), *_notes(result)],
            "plots": plots,
        }


def speculating(cells: list[Cell]) -> list[Cell]:
    """Cells whose records tell of drafts."""
    return [cell for cell in cells if cell.mean("speculation.num_drafts") is not None]


def is_set(cell: Cell) -> bool:
    """Whether its drafts were accepted at given rates, whatever they were."""
    return cell.first("speculation.given_acceptance") is not None


def status(cell: Cell) -> str:
    """The cell's, and whether its acceptance was set."""
    return f"{cell.marked_status}, {SET}" if is_set(cell) else cell.marked_status


def sentence(cell: Cell) -> str:
    """What a cell's drafts gave and cost."""
    figures = {column.key.partition(".")[2]: column for column in COLUMNS}

    def figure(name: str) -> str:
        return text(cell, figures[name])

    proposer = show(cell.first("speculation.proposer"))
    if not cell.mean("speculation.num_drafts"):
        return f"Speculation ({proposer}): no draft was made."
    most = count(int(cell.first("speculation.num_speculative_tokens") or 0), "token")
    words = (
        f"Speculation ({proposer}, up to {most}): {figure('draft_acceptance_rate')} % of "
        f"{figure('num_draft_tokens')} draft tokens accepted{f' ({SET})' * is_set(cell)}, "
        f"{figure('tokens_per_step')} tokens a step; draft {figure('draft_ms')} ms, verify "
        f"{figure('verify_ms')} ms"
    )
    rate, needed = (
        cell.mean(f"speculation.{name}") for name in ("token_acceptance", "break_even_acceptance")
    )
    if needed is None or rate is None:
        return f"{words}."
    verdict = f"{sig(rate)} here: they {'pay' if rate > needed else 'do not pay'}"
    return (
        f"{words}, plain step {figure('plain_ms')} ms, so that drafts pay from a token acceptance "
        f"of {sig(needed)} on ({verdict})."
    )


def _notes(shown: list[Cell]) -> list[str]:
    notes = [
        "Accepted: share of all draft tokens. Length: tokens that a step gives to a request that "
        "drafts. Tokens a step: to any decoding request. Token acceptance: that of a draft token "
        "if those before it are accepted; drafts pay where it is above the break-even."
    ]
    if any(cell.mean("speculation.break_even_acceptance") is None for cell in shown):
        notes.append(
            "Break-even, where it is not shown: the run has too few steps without drafts, of as "
            "many requests as those with drafts, to compare with."
        )
    if any(map(is_set, shown)):
        notes.append(
            "Acceptance set: drafts were accepted at given rates, whatever they were. Costs are "
            "real, and outputs mean nothing."
        )
    return notes


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
