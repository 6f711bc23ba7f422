"""Whether cells took turns, so that what changed on the machine met all of them equally: the one
rule for every ratio with an interval."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import replace

from minivllm.analysis.cell import Cell
from minivllm.analysis.format import MISSING, count, interval
from minivllm.analysis.rows import Block, Row, block_of, met_others
from minivllm.analysis.statistics import Estimate, paired, two_sample

SEVERAL = 2  # blocks of each cell from which it can be known whether cells took turns
APART = "measured apart, so without an interval"


def in_turns(*cells: Cell) -> list[Block]:
    """The blocks in which cells took turns: all were measured in one of them before any was in the
    next.

    Of the blocks that all cells have, the most are taken whose spans of time on one host, from the
    first start to the last, do not overlap: a block that was measured again later is left out, and
    of cells that were measured one after another no two blocks are left. Simulated cells have no
    time to change in.
    """
    if all(cell.simulated for cell in cells):
        blocks = (map(block_of, cell.timed) for cell in cells)
        return sorted(set.intersection(*map(set, blocks)))
    common = set.intersection(*(set(cell.starts) for cell in cells))
    begun = {block: [cell.starts[block] for cell in cells] for block in common}
    kept: list[Block] = []
    last: dict[str, float] = {}
    for block in sorted(common, key=lambda block: max(begun[block])):
        host, _ = block
        if host not in last or last[host] < min(begun[block]):
            last[host] = max(begun[block])
            kept.append(block)
    return sorted(kept)


def took_turns(*cells: Cell) -> bool:
    """Whether the cells took turns in every block of each of them."""
    kept = in_turns(*cells)
    return len(kept) >= SEVERAL and all(len(cell.timed) == len(kept) for cell in cells)


def apart(*cells: Cell) -> bool:
    """Whether cells of several blocks did not take turns, so that what changed on the machine in
    between is in every ratio of one to the other."""
    several = len(cells) > 1 and all(len(cell.timed) >= SEVERAL for cell in cells)
    return several and len(in_turns(*cells)) < SEVERAL


def pairable(blocks: Iterable[Block], *cells: Cell) -> list[Block]:
    """Those of the blocks in which cells took turns; all of them where the cells were measured
    apart, so that nothing is to be tested."""
    return sorted(blocks) if apart(*cells) else sorted({*blocks} & {*in_turns(*cells)})


def log_ratios(cell: Cell, other: Cell, figure: Callable[[Row], float | None]) -> list[float]:
    """Logarithms of the ratio of a figure of one cell to that of another, for each block in which
    they took turns."""
    own, theirs = _logs(cell, figure), _logs(other, figure)
    turns = in_turns(cell, other)
    return [own[block] - theirs[block] for block in turns if block in own and block in theirs]


def relative(cell: Cell, other: Cell, figure: Callable[[Row], float | None]) -> Estimate | None:
    """The ratio of a figure of one cell to that of another.

    Returns:
        Of blocks in which both took turns that of the typical pair, with its interval; otherwise
        that of two samples without interval and p-value. None where either has no such figure
        above zero.
    """
    logs = log_ratios(cell, other, figure)
    if len(logs) >= SEVERAL:
        return paired(logs)
    own, theirs = _logs(cell, figure), _logs(other, figure)
    return untested(two_sample([*theirs.values()], [*own.values()])) if own and theirs else None


def _logs(cell: Cell, figure: Callable[[Row], float | None]) -> dict[Block, float]:
    values = ((block_of(row), figure(row)) for row in cell.timed)
    return {block: math.log(value) for block, value in values if value is not None and value > 0}


def untested(estimate: Estimate) -> Estimate:
    """The same ratio without interval and p-value, which blocks that were measured apart do not
    give."""
    return replace(estimate, low=None, high=None, p_value=None)


def interval_text(estimate: Estimate | None, *cells: Cell) -> str:
    """The interval of a ratio of cells, for a table; `apart` where they were measured so."""
    if estimate is None:
        return MISSING
    return "apart" if apart(*cells) else interval(estimate.low, estimate.high)


def marked(text: str, *cells: Cell) -> str:
    """A figure of cells, or a ratio of them, for a table without a column for that: whether any of
    their blocks was busy."""
    return f"{text} (busy)" if text != MISSING and any(cell.busy for cell in cells) else text


def busy_blocks(*cells: Cell) -> int:
    """In how many blocks some of the cells met other processes."""
    return len({block_of(row) for cell in cells for row in cell.timed if met_others(row)})


def caveat(*cells: Cell) -> str:
    """What has to stand beside a figure of the cells, or a ratio of them, in brackets: that they
    were measured apart, and how many of their blocks met other processes; empty where nothing has
    to."""
    return in_brackets(APART if apart(*cells) else "", busy_words(*cells))


def busy_words(*cells: Cell) -> str:
    """How many blocks of the cells met other processes, in words; empty where none did."""
    rows = [row for cell in cells for row in cell.timed]
    met = sum(map(met_others, rows))
    return f"{met} of {count(len(rows), 'block')} busy" if met else ""


def in_brackets(*words: str) -> str:
    """What there is of remarks, as the end of a sentence; empty where there is nothing."""
    note = "; ".join(filter(None, words))
    return f" ({note})" if note else ""
