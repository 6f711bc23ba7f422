"""What drafts gave and cost: acceptance, tokens a step, and the acceptance from which on they
pay."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minivllm.analysis.cell import Cell
from minivllm.analysis.cells import name_columns, names_of
from minivllm.analysis.format import count, show, sig
from minivllm.report.figures.drafts import acceptance, by_position
from minivllm.report.figures.render import Described, Plot
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
