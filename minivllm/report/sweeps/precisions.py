"""Which precision to take: what each gives in speed at each load, and what it costs in quality."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from minivllm.analysis.cell import Cell, Summary
from minivllm.analysis.cells import spoken
from minivllm.analysis.format import ratio, show, sig
from minivllm.analysis.interleaving import busy_words, in_brackets
from minivllm.report.figures.chart import Chart
from minivllm.report.figures.opening import ForestRow, forest
from minivllm.report.figures.palette import BLUE, GREY
from minivllm.report.figures.plots import THROUGHPUT
from minivllm.report.ranking import tie_of
from minivllm.report.studies.precision import KL, judged
from minivllm.report.sweeps.levels import Levels, levels_of, runs
from minivllm.report.sweeps.picture import BLOCKS, by_level

QUANT = "choices.quant"
WEIGHTS = "memory.weights"
SMALLER = 0.95  # of the weights of the fastest, from which a precision is named for its memory


@dataclass(frozen=True)
class Precisions:
    """Cells that differ in their precision, under one load or several.

    Args:
        title: of the column of precisions.
        cells: one for each precision, for its quality and its weights.
        levels: of several loads; None where there is one.
        ranked: of one load, the fastest first.
    """

    title: str
    cells: dict[str, Cell]
    levels: Levels | None
    ranked: tuple[tuple[Cell, Summary], ...] = ()

    def named(self, cell: Cell) -> str:
        """The precision of a cell."""
        return spoken(self.title, cell.varying[self.title])

    def cost(self, name: str) -> str:
        """What a precision costs in quality, e.g. "KL 0.012, top-1 97.1 %"; "" where that is not
        known."""
        cell = self.cells.get(name)
        loss = None if cell is None else cell.mean(KL)
        if cell is None or loss is None:
            return ""
        if show(cell.first(QUANT)) == show(cell.first("quality.reference")):
            return "the reference"
        same = 100 * (cell.mean("quality.top1_agreement") or 0.0)
        return f"KL {sig(loss, 2)}, top-1 {sig(same)} %"


def precisions(cells: Sequence[Cell]) -> Precisions | None:
    """What a sweep of precisions found; None where something besides precision and load varies, or
    no two precisions have both speed and quality."""
    title = cells[0].columns.get(QUANT) if cells and cells[0].varying else None
    if title is None:
        return None
    done = [cell for cell in cells if cell.configured and cell.timed]
    known: dict[str, Cell] = {}
    for cell in judged(list(done)):
        if cell.mean(KL) is not None:
            known.setdefault(spoken(title, cell.varying[title]), cell)
    if len(known) < 2:
        return None
    levels = levels_of(cells)
    if levels is not None:
        return Precisions(title, known, levels) if levels.option == title else None
    timed = [(cell, stat) for cell in done if (stat := cell.summary(THROUGHPUT)) and stat.mean > 0]
    names = {spoken(title, cell.varying[title]) for cell, _ in timed}
    if len(timed) < 2 or len(names) < len(timed):
        return None
    timed.sort(key=lambda pair: -pair[1].mean)
    return Precisions(title, known, None, tuple(timed))


def sentence(found: Precisions) -> str:
    """Which precision for which load, and its cost in quality, as one sentence."""
    if found.levels is not None:
        parts = [
            f"{run.name} if {found.levels.condition(run.where)}"
            f"{_priced(found, run.options, run.ahead)}"
            for run in runs(found.levels)
        ]
        return f"Take {', '.join(parts)}{found.levels.caveat}."
    (best, most), *_ = found.ranked
    name, tie = found.named(best), tie_of(found.ranked, THROUGHPUT, "fastest")
    names, (slowest, least) = [name], found.ranked[-1]
    ahead = f"{ratio(most.mean / least.mean)} the output tokens/s of {found.named(slowest)}"
    if tie is not None and tie.how == "apart":
        ahead += ", measured apart"
    elif tie is not None:
        names, ahead = [name, found.named(tie.second)], tie.how
    text = f"Take {' or '.join(names)} for speed{_priced(found, names, ahead)}"
    small = min(
        (cell for cell, _ in found.ranked if cell.mean(WEIGHTS)),
        key=lambda cell: cell.mean(WEIGHTS) or 0.0,
        default=best,
    )
    own, other = small.mean(WEIGHTS), best.mean(WEIGHTS)
    if small is not best and own and other and own < SMALLER * other:
        share = f"{ratio(own / other)} the weights of {name}"
        text += f", {found.named(small)} for memory{_priced(found, [found.named(small)], share)}"
    return f"{text}{in_brackets(busy_words(best, slowest))}."


def _priced(found: Precisions, names: Sequence[str], ahead: str) -> str:
    """How far precisions are ahead, and what each costs, in brackets."""
    costs = [cost for one in names if (cost := found.cost(one))]
    words = "; ".join(filter(None, [ahead, " / ".join(costs)]))
    return f" ({words})" if words else ""


def picture(found: Precisions) -> Chart | None:
    """The speed of each precision at each load, with its cost in quality."""
    costs = {name: found.cost(name) for name in found.cells}
    if found.levels is not None:
        return by_level(found.levels, costs)
    rows = [
        ForestRow(
            f"{found.named(cell)} ({cost})"
            if (cost := costs.get(found.named(cell)))
            else found.named(cell),
            stat.mean,
            stat.low if stat.spread else None,
            stat.high if stat.spread else None,
            GREY if cost == "the reference" else BLUE,
        )
        for cell, stat in found.ranked
    ]
    return forest(
        "How fast is each precision, and what does it cost in quality?",
        rows,
        "output tokens/s",
        "KL in nats a token to the reference, and the share of tokens that both rank first. "
        + BLOCKS,
    )
