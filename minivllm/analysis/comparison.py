"""Two runs, cell by cell: did anything get slower? Reads nothing but records."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from minivllm.analysis import statistics
from minivllm.analysis.cells import DEVICE, Cell, gather, like_for_like, varying_columns
from minivllm.analysis.format import count, listing, p_value, show
from minivllm.analysis.interleaving import took_turns
from minivllm.analysis.metric import USUAL, MetricRef, find_metric, gaps, logarithms
from minivllm.analysis.ranking import LATENCIES, keeps_up, rank
from minivllm.analysis.rows import Row

ChangeVerdict = Literal["slower", "faster", "none", "undecided", "failed", "not comparable"]
NO_REGRESSION, REGRESSION, NOT_COMPARABLE = 0, 1, 3


@dataclass(frozen=True)
class Compared:
    """One figure of a cell in both runs. Ratios are after / before: above 1 it has grown, whichever
    way is better."""

    label: str
    cell_id: str
    before: float | None  # arithmetic means over blocks, as in every table
    after: float | None
    blocks: tuple[int, int]  # with figures, before and after
    method: Literal["paired", "two samples"] | None  # None: there is nothing to test
    ratio: float | None
    low: float | None
    high: float | None
    p_value: float | None
    p_holm: float | None  # corrected for the number of cells
    # "slower" is worse, "undecided" that it may be much worse, "failed" that only the second run
    # has no figures, or failures
    verdict: ChangeVerdict
    # the greatest that the interval does not exclude, a fraction of before
    loss: float | None = None
    reason: str = ""  # why, where the figures alone do not say
    metric: str = ""
    direction: Literal["higher", "lower"] = "higher"  # which is better


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
                f"; the intervals exclude a loss of more than {_percent(max(losses), math.ceil)}"
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
    matched, used = [], set()
    for key, cell in first.items():
        candidates = [other for (cell_id, _), other in second.items() if cell_id == cell.cell_id]
        same_cells = [other for (cell_id, _), other in first.items() if cell_id == cell.cell_id]
        # Names may differ between a lone run and a sweep; they only count where they tell arms
        # apart.
        alone = len(candidates) == len(same_cells) == 1
        partner = candidates[0] if alone else second.get(key)
        if partner is None:  # a configuration that is refused by now has no identity but its name
            partner = next(
                (other for other in second.values() if other.arm == cell.arm and other.refused),
                None,
            )
        if partner is not None:
            matched.append((cell, partner))
            used.add((partner.cell_id, partner.arm))
    drafts = [
        _Draft(one, other, figure)
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


def _figures(first: Cell, second: Cell, metric: str | None) -> list[MetricRef]:
    """What of a cell is compared: what was asked for, or what ranks the two, as far as the first
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
    """Whether the load sets what was asked for, and which cells do not keep up with it any more."""
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


def _newest(rows: Sequence[Row]) -> dict[tuple[str, str], Cell]:
    """Cells by cell_id and arm; of those measured with several versions of the code, the newest."""
    newest: dict[tuple[str, str], Cell] = {}
    for cell in gather(list(rows)):
        key = (cell.cell_id, cell.arm)
        if key not in newest or cell.last_started > newest[key].last_started:
            newest[key] = cell
    return newest


@dataclass
class _Draft:
    """A cell of both runs on the way to a verdict."""

    first: Cell
    second: Cell
    metric: MetricRef

    def __post_init__(self) -> None:
        self.before, self.after = (
            logarithms(cell, self.metric) for cell in (self.first, self.second)
        )
        self.method: Literal["paired", "two samples"] = (
            "paired" if took_turns(self.first, self.second) else "two samples"
        )
        self.problem: str | None = None
        self.needed = statistics.FEWEST  # blocks
        if not self.before:
            self.problem = (
                f"the first run has no {self.metric.name} of it ({_why(self.first, self.metric)})"
            )
        elif not self._alike():
            self.problem = "other devices or other requests; compare runs of one machine"
        self.alike = self.problem is None  # so that at most the blocks are too few

    def _alike(self) -> bool:
        """Whether both are of one machine and the same requests, as far as a run that has no
        figures can say."""
        if self.after:
            return like_for_like(self.first, self.second)
        return len({cell.first(DEVICE) for cell in (self.first, self.second)} - {None}) < 2

    @property
    def broken(self) -> bool:
        """Whether only the second run failed."""
        return self.problem is None and not self.after

    def estimate(self, tests: int) -> statistics.Estimate | None:
        """The ratio; sets `problem` where so few blocks could not give a verdict."""
        if self.problem is not None or self.broken:
            return None
        n, m = len(self.before), len(self.after)
        if self.method == "paired":
            shared = sorted(self.before.keys() & self.after.keys())
            needed, enough = (
                statistics.blocks_needed(tests),
                len(shared) >= statistics.blocks_needed(tests),
            )
            estimate = statistics.paired(
                [self.after[block] - self.before[block] for block in shared]
            )
        else:
            needed = statistics.repeats_needed(tests)
            enough = 2 / math.comb(n + m, n) <= statistics.ALPHA / tests
            estimate = statistics.two_sample([*self.before.values()], [*self.after.values()])
        if not enough:
            self.problem = (
                f"{n} and {m} blocks are too few for a verdict: use measure.repeats={needed} in "
                "both"
            )
        self.needed = max(self.needed, needed)
        return estimate

    def _loss(self, estimate: statistics.Estimate | None) -> float | None:
        """The greatest loss within the interval, as a fraction of before; 0 where it holds none."""
        if estimate is None or estimate.low is None or estimate.high is None:
            return None
        return max(0.0, 1 - estimate.low if self.metric.better > 0 else estimate.high - 1)

    def compared(
        self,
        estimate: statistics.Estimate | None,
        p_holm: float | None,
        threshold: float,
        margin: float,
    ) -> Compared:
        """The comparison with its verdict, from an estimate of the ratio and its p-value among all
        that is tested."""
        loss = self._loss(estimate)
        verdict, reason = self._found(estimate, p_holm, threshold)
        if verdict == "none" and (loss is None or loss > margin):
            verdict, reason = "undecided", self._not_excluded(loss)
        newly = self.second.crashed and not self.first.crashed
        if self.alike and self.after and newly and verdict != "slower":
            verdict, reason = (
                "failed",
                f"{count(self.second.crashed, 'block')} failed, in the second run only",
            )
        return Compared(
            label=self.first.label,
            cell_id=self.first.cell_id,
            before=_mean(self.before),
            after=_mean(self.after),
            metric=self.metric.name,
            direction=self.metric.direction,
            blocks=(len(self.before), len(self.after)),
            method=self.method if estimate else None,
            ratio=estimate.ratio if estimate else None,
            low=estimate.low if estimate else None,
            high=estimate.high if estimate else None,
            p_value=estimate.p_value if estimate else None,
            p_holm=p_holm,
            verdict=verdict,
            loss=loss,
            reason=reason,
        )

    def _found(
        self, estimate: statistics.Estimate | None, p_holm: float | None, threshold: float
    ) -> tuple[ChangeVerdict, str]:
        """What the two runs show, and why it is no more than that."""
        if self.broken:
            why = _why(self.second, self.metric)
            return "failed", f"the second run has no {self.metric.name} of it ({why})"
        if self.problem is not None:
            return "not comparable", self.problem
        if estimate is None or p_holm is None:
            return "none", ""
        if p_holm <= statistics.ALPHA:
            change = estimate.ratio - 1
            if abs(change) > threshold:
                return "faster" if change * self.metric.better > 0 else "slower", ""
            return "none", f"found, but of no more than task.threshold, {100 * threshold:g} %"
        if (estimate.p_value or 0) <= statistics.ALPHA:
            return "none", (
                f"p is {p_value(estimate.p_value)} by itself and {p_value(p_holm)} among all "
                "that is tested (Holm); the interval is for it alone"
            )
        return "none", ""

    def _not_excluded(self, loss: float | None) -> str:
        """Why a loss may be there that was not found."""
        if loss is None:
            return (
                f"{len(self.before)} and {len(self.after)} blocks give no interval, so no loss "
                f"is excluded: use measure.repeats={self.needed} in both"
            )
        return (
            f"a loss of {_percent(loss, math.floor)} is not excluded: "
            "use a quieter machine or more blocks (measure.repeats)"
        )


def _why(cell: Cell, metric: MetricRef) -> str:
    """Why a cell has no figure."""
    why = gaps(cell, metric).why
    zeros = why.get("zero", 0)
    if zeros or why.get("negative"):
        what, number = ("0", zeros) if zeros else ("negative", why["negative"])
        return f"it is {what} in {count(number, 'block')}, and nothing can be divided by that"
    return "it is in no record" if cell.timed else cell.status_text


def _percent(share: float, towards: Callable[[float], int]) -> str:
    """A share to two digits, rounded up or down, so that no more is claimed of it than is so."""
    if not share:
        return "0 %"
    step = 10.0 ** (math.floor(math.log10(100 * share)) - 1)
    nearest = round(100 * share / step, 6)  # 5.1 is no 5.2 for the sake of its last bit
    return f"{towards(nearest) * step:.6g} %"


def _mean(logs: dict[Any, float]) -> float | None:
    return math.fsum(map(math.exp, logs.values())) / len(logs) if logs else None
