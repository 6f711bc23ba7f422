"""Whether the effects of the two knobs of a sweep multiply: what both give together, against each
alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from minivllm.analysis import statistics
from minivllm.analysis.cell import Cell, like_for_like
from minivllm.analysis.cells import spoken
from minivllm.analysis.format import count, ratio, spanned
from minivllm.analysis.interleaving import apart, caveat, took_turns, untested
from minivllm.analysis.metric import MetricRef, find_metric, logarithms
from minivllm.analysis.ranking import NAMES, rank

Place = tuple[str, str]  # of a cell: its value of either knob
MAX_MORE = 3  # pairs that are named beside the first


@dataclass(frozen=True)
class Pair:
    """A value of each knob, against the first cell.

    Args:
        names: of the two values.
        alone: what either gives by itself, as ratios of means.
        joint: what both give.
        estimate: joint / (product of alone).
        cells: the four.
    """

    names: tuple[str, str]
    alone: tuple[float, float]
    joint: float
    estimate: statistics.Estimate
    cells: tuple[Cell, ...]

    @property
    def multiply(self) -> bool | None:
        return statistics.multiply(self.estimate.ratio, self.estimate.low, self.estimate.high)

    @property
    def share(self) -> str:
        """Of the product, with the interval."""
        return spanned(self.estimate.ratio, self.estimate.low, self.estimate.high)


def sentences(cells: Sequence[Cell]) -> list[str]:
    """One on the interaction of the two knobs that vary; none where other than two do, or no four
    cells make a square."""
    found = _found(cells)
    return [] if found is None else [_sentence(*found)]


def interact(cells: Sequence[Cell]) -> bool:
    """Whether the effects of the two knobs that vary do not multiply, for some values of theirs."""
    found = _found(cells)
    return found is not None and any(pair.multiply is False for pair in found[0])


def _found(cells: Sequence[Cell]) -> tuple[list[Pair], tuple[str, str], MetricRef] | None:
    knobs = knobs_of(list(cells)) if len(cells[0].varying) > 1 else []
    done = [cell for cell in cells if cell.configured and cell.timed]
    if len(knobs) != 2 or not done or done[0] is not cells[0]:
        return None
    first, second = knobs
    grid = {(cell.varying[first], cell.varying[second]): cell for cell in done}
    if len(grid) < len(done):  # something else varies, too
        return None
    metric = next((m for m in map(find_metric, rank(done).metrics) if logarithms(done[0], m)), None)
    if metric is None:
        return None
    grid = {
        place: cell
        for place, cell in grid.items()
        if like_for_like(done[0], cell) and not cell.simulated and logarithms(cell, metric)
    }
    pairs = _pairs(grid, (first, second), metric)
    return (pairs, (first, second), metric) if pairs else None


def knobs_of(cells: list[Cell]) -> list[str]:
    """Titles of the columns that vary, without those that follow from another; none where more than
    knobs vary."""
    columns = cells[0].columns
    known = [cell for cell in cells if cell.configured]
    kept: list[str] = []
    for key, title in columns.items():
        values = [cell.varying[title] for cell in known]
        if any(_follows(values, [cell.varying[other] for cell in known]) for other in kept):
            continue
        if not key.startswith(("choices.", "config.")):
            return []
        kept = [t for t in kept if not _follows([cell.varying[t] for cell in known], values)]
        kept.append(title)
    return kept


def _follows(values: Sequence[str], others: Sequence[str]) -> bool:
    """Whether each of the others goes with one value."""
    return len(set(zip(values, others, strict=True))) == len(set(others))


def _pairs(grid: dict[Place, Cell], titles: tuple[str, str], metric: MetricRef) -> list[Pair]:
    """Every value of either knob that the first cell does not have, where all four cells are
    there."""
    if not grid:
        return []
    base = next(iter(grid))
    squares = [
        ((a, b), (base, (a, base[1]), (base[0], b), (a, b)))
        for a, b in grid
        if a != base[0] and b != base[1] and {(a, base[1]), (base[0], b)} <= grid.keys()
    ]
    logs = {place: logarithms(cell, metric) for place, cell in grid.items()}
    blocked = took_turns(*grid.values()) and len({frozenset(known) for known in logs.values()}) == 1
    groups = [[known[block] for block in sorted(known)] for known in logs.values()]
    means = {place: cell.mean(metric.column) or 0.0 for place, cell in grid.items()}
    pairs = []
    for values, square in squares:
        signs = [dict(zip(square, (1, -1, -1, 1), strict=True)).get(place, 0) for place in grid]
        estimate = statistics.contrast(groups, signs, len(squares), blocked=blocked)
        cells = tuple(grid[place] for place in square)
        estimate = untested(estimate) if apart(*cells) else estimate
        alone_a, alone_b, joint = (means[place] / means[base] for place in square[1:])
        names = tuple(spoken(title, value) for title, value in zip(titles, values, strict=True))
        pairs.append(Pair((names[0], names[1]), (alone_a, alone_b), joint, estimate, cells))
    return pairs


def _sentence(pairs: list[Pair], titles: tuple[str, str], metric: MetricRef) -> str:
    # the strongest finding first, and of these the farthest from the product
    order = (False, None, True)
    pairs = sorted(
        pairs,
        key=lambda p: (order.index(p.multiply), -max(p.estimate.ratio, 1 / p.estimate.ratio)),
    )
    lead, more = pairs[0], pairs[1:]
    both = f"effects of {titles[0]} and {titles[1]}"
    begin = {
        False: f"The {both} do not multiply",
        True: f"The {both} multiply, to within {100 * statistics.WITHIN:g} %",
        None: f"Not told apart, whether the {both} multiply",
    }[lead.multiply]
    (first, second), (alone_a, alone_b) = lead.names, lead.alone
    text = (
        f"{begin}: {first} with {second} gives {ratio(lead.joint)} the {NAMES[metric.name]} of the "
        f"first cell, and alone they give {ratio(alone_a)} and {ratio(alone_b)}, whose product "
        f"is {ratio(alone_a * alone_b)}: {lead.share} of it"
    )
    text += caveat(*lead.cells)
    if lead.estimate.low is None and not apart(*lead.cells):
        text += ", and a single block has no interval"
    parts = [
        f"{pair.names[0]} with {pair.names[1]} {pair.share}"
        + ("" if pair.multiply == lead.multiply else _otherwise(pair))
        for pair in more[:MAX_MORE]
    ]
    if len(more) > MAX_MORE:
        parts.append(count(len(more) - MAX_MORE, "more pair"))
    return f"{text}; {', '.join(parts)}." if parts else f"{text}."


def _otherwise(pair: Pair) -> str:
    return " (multiply)" if pair.multiply else " (not told apart)"
