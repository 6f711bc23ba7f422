"""Which cell leads, and how far: by throughput, or by latency where the arrivals set the
throughput."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from minivllm.analysis.cell import DEVICE, Cell, Summary, like_for_like, set_load
from minivllm.analysis.format import ratio, show, sig
from minivllm.analysis.interleaving import caveat, took_turns
from minivllm.analysis.ranking import LATENCIES, NAMES, rank
from minivllm.analysis.rows import number
from minivllm.analysis.separation import Separation, Separations
from minivllm.report.figures.plots import THROUGHPUT, time_unit

NO_ORDER = ("not separated", "apart")
NO_INTERVAL = "these are least and greatest, not a confidence interval"


def by_throughput(done: list[Cell], base: Cell) -> tuple[str, list[str]]:
    """The fastest of several cells with a throughput, against slowest and baseline, and what
    qualifies it."""
    known = [(cell, stat) for cell in done if (stat := cell.summary(THROUGHPUT))]
    ranked = sorted(known, key=lambda item: -item[1].mean)
    (best, most), (worst, least) = ranked[0], ranked[-1]
    headline = f"Fastest: {best.label} at {sig(most.mean)} output tokens/s"
    lines = not_like_for_like(done)
    tie = tie_of(ranked, THROUGHPUT, "fastest")
    if tie is not None and tie.how == "not separated":
        headline += f", not separated from {tie.second.label} at {sig(tie.second.mean(THROUGHPUT))}"
    if not lines:
        if _separation(ranked, THROUGHPUT, worst) != "not separated":
            headline += f", {_ratio(best, worst)} the slowest ({worst.label}, {sig(least.mean)})"
        if base not in done:
            lines.append(_no_baseline(base, "throughput"))
        elif base not in (best, worst):
            lines.append(
                f"Against the first cell ({base.label}): {_ratio(best, base)} its output tokens/s."
            )
        elif base is best:
            lines.append(
                "The fastest is the first cell, the baseline: nothing that was varied made it "
                "faster."
            )
        lines += _intervals(best, worst)
    return headline + _caveat(tie, best, worst) + ".", lines + not_separated(done)


@dataclass(frozen=True)
class Tie:
    """The first two of a ranking, of which no order is shown."""

    first: Cell
    second: Cell
    called: str  # "fastest" or "lowest"
    how: Separation

    @property
    def sentence(self) -> str:
        """That it is so, and why."""
        both = f"{self.first.mention} and {self.second.mention}, the {self.called} two"
        if self.how == "apart":
            return (
                f"Measured apart: {both}, so that what changed on the machine in between is in "
                "their difference; measure.isolation=run takes turns."
            )
        return f"Not separated: {both}, whose difference is within the scatter of their blocks."


def not_separated(cells: list[Cell]) -> list[str]:
    """Notes a tie between the two best cells."""
    done = [cell for cell in cells if cell.summary(THROUGHPUT)]
    if (latency := _by_latency(done)) is not None:
        tie = tie_of(latency[1], f"metrics.{latency[0]}", "lowest")
    elif rank(done).paced:
        return []
    else:
        known = [(cell, stat) for cell in done if (stat := cell.summary(THROUGHPUT))]
        tie = tie_of(sorted(known, key=lambda item: -item[1].mean), THROUGHPUT, "fastest")
    return [] if tie is None else [tie.sentence]


def tie_of(ranked: Sequence[tuple[Cell, Summary]], key: str, called: str) -> Tie | None:
    """The first two of a ranking, where both did the same work and no order of them is shown."""
    if len(ranked) < 2 or not like_for_like(ranked[0][0], ranked[1][0]):
        return None
    how = _separation(ranked, key, ranked[1][0])
    return Tie(ranked[0][0], ranked[1][0], called, how) if how in NO_ORDER else None


def _separation(ranked: Sequence[tuple[Cell, Summary]], key: str, other: Cell) -> Separation:
    """Of the first of a ranking and another, among those that did the same work."""
    best = ranked[0][0]
    comparable = [cell for cell, _ in ranked if like_for_like(best, cell)]
    return Separations(comparable, key).between(best, other)


def _caveat(tie: Tie | None, best: Cell, worst: Cell) -> str:
    """What stands behind a headline, see `caveat`."""
    return caveat(best, worst if tie is None or tie.how != "apart" else tie.second)


def by_latency(done: list[Cell], base: Cell) -> tuple[str, list[str]] | None:
    """The same by latency, where that is what ranks the cells (see `rank`).

    Returns:
        None where throughput ranks them, or fewer than two cells have a latency.
    """
    lowest = _by_latency(done)
    return None if lowest is None else _lowest(*lowest, base, not_like_for_like(done))


def _by_latency(done: list[Cell]) -> tuple[str, list[tuple[Cell, Summary]]] | None:
    """The name of the latency that ranks the cells, and the cells, the lowest first; None where
    throughput does."""
    if rank(done).metrics != LATENCIES:
        return None
    for metric in LATENCIES:
        known = [(cell, stat) for cell in done if (stat := cell.summary(f"metrics.{metric}"))]
        if len(known) > 1:
            return metric, sorted(known, key=lambda item: item[1].mean)
    return None


def _lowest(
    metric: str, ranked: list[tuple[Cell, Summary]], base: Cell, unlike: list[str]
) -> tuple[str, list[str]]:
    """Of a latency, the least first; `unlike` is why the cells must not be held against each
    other."""
    (best, least), (worst, most) = ranked[0], ranked[-1]
    key = f"metrics.{metric}"
    headline, lines = f"Lowest {NAMES[metric]}: {best.label}, {_time(least.mean)}", [*unlike]
    tie = tie_of(ranked, key, "lowest")
    if tie is not None and tie.how == "not separated":
        headline += f", not separated from {tie.second.label}, {_time(ranked[1][1].mean)}"
    if not unlike and _separation(ranked, key, worst) != "not separated":
        headline += f", against {_time(most.mean)} of {worst.label}"
    if not unlike:
        first = next((stat for cell, stat in ranked if cell is base), None)
        if first is None:
            lines.append(_no_baseline(base, NAMES[metric]))
        elif base is best:
            lines.append(
                "The lowest is the first cell's, the baseline's: nothing that was varied made "
                "it lower."
            )
        elif base is not worst:
            lines.append(f"The first cell ({base.label}) had {_time(first.mean)}.")
    if least.spread:
        ends = dict.fromkeys((_time(least.low), _time(least.high)))
        lines.append(f"Over {least.n} blocks it was {' to '.join(ends)}; {NO_INTERVAL}.")
    ties = [] if tie is None else [tie.sentence]
    return headline + _caveat(tie, best, worst) + ".", lines + ties


def _no_baseline(base: Cell, figure: str) -> str:
    what = f"has no {figure}" if base.ok else "failed"
    return f"The first cell ({base.label}) {what}, so there is no baseline to compare with."


def range_text(stat: Summary) -> str:
    """Least and greatest block, once where they read the same."""
    low, high = sig(stat.low), sig(stat.high)
    return low if low == high else f"{low} to {high}"


def _time(milliseconds: float) -> str:
    scale, unit = time_unit([milliseconds])
    return f"{sig(milliseconds * scale)} {unit}"


def _ratio(cell: Cell, other: Cell) -> str:
    mine, theirs = cell.mean(THROUGHPUT), other.mean(THROUGHPUT)
    return ratio(mine / theirs) if mine and theirs else "–"


def _intervals(best: Cell, worst: Cell) -> list[str]:
    """Ranges over blocks of the fastest cell and, where they took turns, of its ratio to the
    slowest, block by block."""
    stat = best.summary(THROUGHPUT)
    if stat is None or not stat.spread:
        return []
    text = f"Over {stat.n} blocks the fastest had {range_text(stat)} tokens/s"
    if not took_turns(best, worst):
        return [f"{text}; {NO_INTERVAL}."]
    blocks = {row.get("block"): value for row in worst.ok if (value := number(row.get(THROUGHPUT)))}
    pairs = [
        value / blocks[row.get("block")]
        for row in best.ok
        if (value := number(row.get(THROUGHPUT))) and row.get("block") in blocks
    ]
    if len(pairs) >= 2:
        text += f", block by block {ratio(min(pairs))} to {ratio(max(pairs))} the slowest"
    return [f"{text}; {NO_INTERVAL}."]


def not_like_for_like(done: list[Cell]) -> list[str]:
    """Why the cells' figures must not be divided by each other, if so."""
    lines = []
    if len({cell.simulated for cell in done}) > 1:
        lines.append(
            "Some cells are measured and some simulated, so no ratio between them is a speed-up."
        )
    measured = [cell for cell in done if not cell.simulated]
    for key, noun, where in (("workload_hash", "workloads", done), (DEVICE, "devices", measured)):
        values = {show(cell.first(key)) for cell in where if cell.first(key) is not None}
        if len(values) > 1:
            lines.append(
                f"The cells ran on different {noun}, so no ratio between them is given as a "
                "speed-up."
            )
    if len({set_load(cell) for cell in done}) > 1:
        lines.append(
            "Requests arrived at different rates, so no ratio between the cells is given as a "
            "speed-up."
        )
    return lines
