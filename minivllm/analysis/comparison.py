"""Two runs, cell by cell: did anything get slower? Reads nothing but records."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from minivllm.analysis import statistics
from minivllm.analysis.cell import Cell
from minivllm.analysis.cells import gather, varying_columns
from minivllm.analysis.compared import Compared, Draft, percent
from minivllm.analysis.format import count, listing, show
from minivllm.analysis.interleaving import apart
from minivllm.analysis.metric import USUAL, MetricRef, find_metric, gaps, logarithms
from minivllm.analysis.ranking import LATENCIES, keeps_up, rank
from minivllm.analysis.rows import Row

NO_REGRESSION, REGRESSION, NOT_COMPARABLE = 0, 1, 3

Cells = dict[tuple[str, str], Cell]  # by cell_id and arm


@dataclass(frozen=True)
class Comparison:
    """Two runs."""

    metric: str  # or several, as one lists them
    # Which is better; None: of some metrics this, of others that.
    direction: Literal["higher", "lower"] | None
    threshold: float
    cells: tuple[Compared, ...]  # of both runs
    only_before: tuple[str, ...]  # labels of cells that the other run lacks
    only_after: tuple[str, ...]
    differing: str = ""  # settings that differ between the runs, where they have no cell in common
    notes: tuple[str, ...] = ()  # sentences on what was compared

    @property
    def several(self) -> bool:
        """Whether more than one figure of a cell was compared."""
        return len({cell.metric for cell in self.cells}) > 1

    def name(self, cell: Compared) -> str:
        """The cell, and which figure of it where there are several."""
        return f"{cell.label}, {cell.metric}" if self.several else cell.label

    @property
    def exit_code(self) -> int:
        """1 a regression; 3 nothing to compare, or a cell that is undecided, cannot be judged or is
        not there any more; 0 none."""
        verdicts = {cell.verdict for cell in self.cells}
        if verdicts & {"slower", "failed"}:
            return REGRESSION
        unclear = not verdicts or verdicts & {"not comparable", "undecided"} or self.only_before
        return NOT_COMPARABLE if unclear else NO_REGRESSION

    @property
    def conclusion(self) -> str:
        """One sentence, and what to do."""
        if not self.cells:
            if self.differing:
                return (
                    "Not comparable: the runs have no cell in common, since they differ in "
                    f"{self.differing}; to compare options use -m or +ablation, to compare "
                    "versions measure the same command twice."
                )
            return (
                "Not comparable: the runs have no cell in common (cell_id: engine, workload, "
                "arrival, seed, checkpoint); measure the same command twice."
            )
        worse = [
            f"{self.name(cell)} ({cell.reason})" if cell.reason else self.name(cell)
            for cell in self.cells
            if cell.verdict in ("slower", "failed")
        ]
        if worse:
            return (
                f"Regression of {self.metric} in {len(worse)} of {self._counted}: "
                f"{'; '.join(worse)}."
            )
        unclear = [cell for cell in self.cells if cell.verdict in ("not comparable", "undecided")]
        if unclear or self.only_before:
            labels: dict[str, list[str]] = {}
            for cell in unclear:
                labels.setdefault(cell.reason, []).append(self.name(cell))
            if self.only_before:
                labels["the second run has no such cell"] = [*self.only_before]
            undecided = not self.only_before and all(
                cell.verdict == "undecided" for cell in unclear
            )
            return (
                ("Undecided: " if undecided else "Not comparable: ")
                + "; ".join(f"{', '.join(who)}: {why}" for why, who in labels.items())
                + "."
            )
        losses = [cell.loss for cell in self.cells if cell.loss is not None]
        excluded = ""
        if losses:
            excluded = (
                f"; the intervals exclude a loss of more than {percent(max(losses), math.ceil)}"
            )
            if len(losses) < len(self.cells):  # what is faster needs no interval
                excluded += f" in {len(losses)} of them"
        return (
            f"No regression of {self.metric} beyond {100 * self.threshold:g} % was found in "
            f"{len(self.cells)} of {self._counted} shared cells{excluded}."
        )

    @property
    def _counted(self) -> str:
        """How many cells were compared, or figures of them."""
        cells = len({(cell.cell_id, cell.label) for cell in self.cells})
        return f"{len(self.cells)} figures of {cells}" if self.several else str(len(self.cells))


def compare(
    before: Sequence[Row], after: Sequence[Row], metric: str | None, threshold: float, margin: float
) -> Comparison:
    """Compare the cells that two runs share.

    A cell is tested by blocks in pairs where the two runs took turns on one host, block by block;
    else as two samples. p-values are corrected over all that is tested (Holm).

    Args:
        before: rows of the first run, the one to compare with.
        after: of the second.
        metric: as for `find_metric`; None: throughput, or of a cell whose load sets it every
            latency (see `rank`).
        threshold: a fraction: a change of less is none, however certain.
        margin: a fraction: where nothing was found, the interval has to exclude a greater loss
            (non-inferiority), or the cell is undecided.

    Raises:
        BadInput: there is no such metric.
    """
    if metric is not None:
        find_metric(metric)
    first, second = _newest(before), _newest(after)
    matched = _matched(first, second)
    drafts = [
        Draft(one, other, figure)
        for one, other in matched
        for figure in _figures(one, other, metric)
    ]
    tests = sum(draft.problem is None and not draft.broken for draft in drafts)
    estimates = [draft.estimate(tests) for draft in drafts]
    corrected = statistics.holm([e.p_value if e else None for e in estimates])
    cells = [
        draft.compared(estimate, p_holm, threshold, margin)
        for draft, estimate, p_holm in zip(drafts, estimates, corrected, strict=True)
    ]
    paired = {(cell.cell_id, cell.arm) for cell, _ in matched}
    used = {(partner.cell_id, partner.arm) for _, partner in matched}
    compared = {draft.metric.name: draft.metric.direction for draft in drafts}
    directions = {*compared.values()} or {find_metric(metric or USUAL).direction}
    return Comparison(
        listing([*compared]) or metric or USUAL,
        directions.pop() if len(directions) == 1 else None,
        threshold,
        tuple(cells),
        tuple(cell.label for key, cell in first.items() if key not in paired),
        tuple(cell.label for key, cell in second.items() if key not in used),
        "" if cells else _differing([*first.values()], [*second.values()]),
        tuple(_notes(matched, metric)),
    )


def _matched(first: Cells, second: Cells) -> list[tuple[Cell, Cell]]:
    """Each cell of the first run that the second one has, with that."""
    matched = []
    for key, cell in first.items():
        candidates = [other for (cell_id, _), other in second.items() if cell_id == cell.cell_id]
        same_cells = [other for (cell_id, _), other in first.items() if cell_id == cell.cell_id]
        # Names may differ between a lone run and a sweep; they only count where they tell arms
        # apart.
        alone = len(candidates) == len(same_cells) == 1
        partner = candidates[0] if alone else second.get(key)
        if partner is None:  # a configuration that is rejected by now has no identity but its name
            partner = next(
                (other for other in second.values() if other.arm == cell.arm and other.rejected),
                None,
            )
        if partner is not None:
            matched.append((cell, partner))
    return matched


def _figures(first: Cell, second: Cell, metric: str | None) -> list[MetricRef]:
    """What of a cell is compared: what was requested, or what ranks the two, as far as the first
    run has it."""
    if metric is not None:
        return [find_metric(metric)]
    names = rank([cell for cell in (first, second) if cell.timed] or [first]).metrics
    recorded = [figure for figure in map(find_metric, names) if logarithms(first, figure)]
    if names == LATENCIES and not recorded:  # no latency was recorded
        return [find_metric(USUAL)]
    whole = recorded or [find_metric(names[0])]
    return whole if second.timed else whole[:1]  # what failed did so once


def _notes(matched: Sequence[tuple[Cell, Cell]], metric: str | None) -> list[str]:
    """Whether the load sets what was requested, and which cells do not keep up with it any more."""
    both = [(one, other) for one, other in matched if one.timed and other.timed]
    rankings = [rank(pair) for pair in both]
    notes = []
    if metric is not None:
        notes += list(dict.fromkeys(notice for one in rankings if (notice := one.notice(metric))))
    elif any(one.metrics == LATENCIES for one in rankings):
        notes.append(
            "Where requests came at the load's own pace and were kept up with, the load sets "
            "the throughput, and latencies are compared."
        )
    for which, side in (("first", 0), ("second", 1)):
        for pair in matched:
            figures = _figures(*pair, metric)
            found_gaps = gaps(pair[side], figures[0])
            if found_gaps.missing and logarithms(pair[side], figures[0]):
                why = ", ".join(f"{n} {kind}" for kind, n in found_gaps.why.items())
                notes.append(
                    f"{pair[0].label}: {found_gaps.missing} of "
                    f"{count(found_gaps.blocks, 'block')} of the {which} run have no "
                    f"{figures[0].name} ({why}) and are left out."
                )
    fallen = [one.label for one, other in both if keeps_up(one) and keeps_up(other) is False]
    if fallen:
        notes.append(f"Kept up with in the first run and not in the second: {listing(fallen)}.")
    if any(apart(one, other) for one, other in both):
        notes.append(
            "The runs did not take turns, so a change of the machine in between reads as one of "
            "the program, and the intervals are of the blocks of each run alone."
        )
    return notes


def _differing(first: list[Cell], second: list[Cell]) -> str:
    """Settings that have other values in one run than in the other: `batching: continuous /
    sequential`."""
    differences = []
    for key, title in varying_columns([*first, *second]).items():
        before, after = (
            ", ".join(sorted({show(cell.first(key)) for cell in run})) for run in (first, second)
        )
        if key.startswith(("choices.", "config.")) and before != after:
            differences.append(f"{title}: {before} / {after}")
    return listing(differences)


def _newest(rows: Sequence[Row]) -> Cells:
    """Cells by cell_id and arm; of those measured with several versions of the code, the newest."""
    newest: dict[tuple[str, str], Cell] = {}
    for cell in gather(list(rows)):
        key = (cell.cell_id, cell.arm)
        if key not in newest or cell.last_started > newest[key].last_started:
            newest[key] = cell
    return newest
