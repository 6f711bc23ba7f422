"""What the records of an ablation say: each optimisation's effect, with its uncertainty. Reads
nothing but records."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from typing import Any

import numpy as np

from minivllm.analysis import statistics
from minivllm.analysis.ablation.arm_figures import ArmFigures
from minivllm.analysis.ablation.design import AGAIN, BASELINE, Chosen, Contrast, Design
from minivllm.analysis.ablation.findings import (
    Analysis,
    Attribution,
    Effect,
    EffectVerdict,
    Factor,
    Interaction,
    Planned,
    Togetherness,
)
from minivllm.analysis.ablation.remarks import RemarkInputs, remarks, why_none
from minivllm.analysis.ablation.token_agreement import TokenAgreement
from minivllm.analysis.cell import Cell
from minivllm.analysis.cells import foundations, gather
from minivllm.analysis.interleaving import apart, busy_blocks, pairable, untested
from minivllm.analysis.metric import OTHERS, USUAL, MetricRef, find_metric, gaps, logarithms
from minivllm.analysis.ranking import Ranking, rank
from minivllm.analysis.rows import Row, below, started
from minivllm.bench.records.reading import flatten


def analyse(rows: Sequence[Row], planned: Planned | None = None) -> Analysis | None:
    """The analysis of an ablation's records.

    Args:
        rows: of `report.rows`, also of other sweeps, which are left out. Of several ablations, and
            of records of several versions of the code or several devices, the newest is analysed
            and the rest is noted.
        planned: which of them it is of, and how they are to be read; None: what the newest says of
            its design and metric counts for all that are arms of this design.

    Returns:
        None if there is no record of an ablation.
    """
    planned_rows = [row for row in rows if row.get("ablation.design")]
    known = (
        planned_rows
        if planned is None
        else [_read_as(row, planned) for row in planned_rows if row["run_id"] in planned]
    )
    if not known:
        return None
    newest = max(known, key=started)
    design = _design(newest)
    arms: dict[str, Cell] = {}
    for cell in gather(known):
        if _belongs(cell, newest) and _fits(cell, design):
            other = arms.get(cell.arm)  # the same arm of the same name, but of another cell
            if other is None or other.last_started < cell.last_started:
                arms[cell.arm] = cell
    cells = list(arms.values())
    left_out = len(planned_rows) - sum(len(cell.rows) for cell in cells)
    ranking = rank([cell for cell in cells if cell.timed])
    metric = _metric(newest, cells, ranking)
    lossless = frozenset(newest.get("ablation.lossless") or ())
    return _Reading(RemarkInputs(cells, metric, ranking, left_out, lossless), design).analysis()


def _metric(newest: Row, cells: Sequence[Cell], ranking: Ranking) -> MetricRef:
    """What the verdicts are about: what the command named, else what ranks the arms, as far as it
    was recorded."""
    chosen = find_metric(str(newest["ablation.metric"]))
    if (
        newest.get("ablation.named") or chosen.name != USUAL
    ):  # older records do not say, and that was the default
        return chosen
    known = map(find_metric, ranking.metrics)
    return next((m for m in known if any(logarithms(cell, m) for cell in cells)), chosen)


def _read_as(row: Row, planned: Planned) -> Row:
    """The row with what a sweep has it as in place of what it was measured for."""
    others = {key: value for key, value in row.items() if not key.startswith("ablation.")}
    return others | flatten({"ablation": dict(planned[row["run_id"]])})


def _design(row: Row) -> Design:
    requires = below(row, "ablation.requires")
    names = row["ablation.optimisations"]
    return Design(row["ablation.design"], {name: tuple(requires.get(name) or ()) for name in names})


def _belongs(cell: Cell, newest: Row) -> bool:
    """Whether both are of one sweep, one code, one device and one environment; a record that cannot
    say belongs to any."""
    for key in ("sweep", *foundations([newest])):
        if len({cell.first(key), newest.get(key)} - {None}) > 1:
            return False
    return True


def _fits(cell: Cell, design: Design) -> bool:
    """Whether the cell is an arm of this design: records of another one may have the same names."""
    on = frozenset(cell.first("ablation.on") or ())
    name = AGAIN if cell.arm == AGAIN and on == design.baseline else design.label(on)
    return on <= set(design.names) and cell.arm == name


@dataclass(frozen=True)
class _Reading:
    """The cells of one ablation by their arms."""

    inputs: RemarkInputs
    design: Design
    token_agreement: TokenAgreement = field(default_factory=TokenAgreement)

    @property
    def cells(self) -> list[Cell]:
        """All arms."""
        return self.inputs.cells

    @cached_property
    def figures(self) -> ArmFigures:
        """Those of the arms."""
        return ArmFigures(self.cells)

    @property
    def metric(self) -> MetricRef:
        """What the verdicts are about."""
        return self.inputs.metric

    @cached_property
    def tests(self) -> int:
        """How many optimisations are tested at once."""
        return len(self.design.names)

    def analysis(self) -> Analysis:
        metric = self.metric
        noise = self._noise(metric)
        effects, interactions = self._effects(metric, noise), self._interactions(metric)
        others = [m for name in OTHERS if (m := find_metric(name)) != metric and self._recorded(m)]
        baseline = self.figures.arms.get(self.design.baseline)
        return Analysis(
            design=self.design.kind,
            sweep=self.cells[0].sweep,
            baseline=BASELINE,
            metric=metric.name,
            direction=metric.direction,
            effects=effects,
            others=tuple(effect for m in others for effect in self._further(m)),
            noise=noise,
            interactions=interactions,
            attribution=self._attribution(metric),
            blocks=0 if baseline is None else len(baseline.timed),
            blocks_needed=statistics.blocks_needed(self.tests),
            notes=tuple(remarks(self.inputs, effects, noise, interactions)),
            gaps=tuple(one for cell in self.cells if (one := gaps(cell, metric)).missing),
        )

    def _further(self, metric: MetricRef) -> list[Effect]:
        """The effects on another metric, and what the A/A arm has of it."""
        noise = self._noise(metric)
        return [*self._effects(metric, noise), *([noise] if noise else [])]

    def _recorded(self, metric: MetricRef) -> bool:
        return any(logarithms(cell, metric) for cell in self.figures.arms.values())

    # ---- effects

    def _effects(self, metric: MetricRef, noise: Effect | None) -> tuple[Effect, ...]:
        read = [self.figures.measured(contrast, metric) for contrast in self.design.contrasts]
        estimates = [self.figures.estimate(chain(*pairs), logs) for pairs, logs in read]
        corrected = statistics.holm([e.p_value if e else None for e in estimates])
        band = _band(noise)
        effects = []
        for contrast, (pairs, logs), estimate, p_holm in zip(
            self.design.contrasts, read, estimates, corrected, strict=True
        ):
            verdict: EffectVerdict
            reason = ""
            if estimate is None:
                chosen = {arm for pair in contrast.pairs for arm in pair}
                verdict = self.figures.lacking(chosen, metric)
            elif not self.figures.live(pairs):
                verdict = "not live"
            elif self.figures.apart(chain(*pairs)):
                verdict = "apart"
            else:
                verdict = self._verdict(estimate, p_holm, metric, band)
                reason = why_none(estimate, p_holm, self.tests, band) if verdict == "none" else ""
            effect = self._effect(
                contrast, metric, len(pairs), logs, estimate, p_holm, verdict, band
            )
            arms = self.figures.arms
            cells = [(arms[with_], arms[without]) for with_, without in pairs]
            busy = busy_blocks(*chain.from_iterable(cells))
            effect = replace(effect, reason=reason, busy=busy)
            if metric == self.metric:  # the outputs are the same whatever else is measured
                effect = replace(effect, same_tokens=self.token_agreement.share(cells))
            effects.append(effect)
        return tuple(effects)

    def _verdict(
        self, estimate: statistics.Estimate, p_holm: float | None, metric: MetricRef, band: float
    ) -> EffectVerdict:
        if p_holm is None or p_holm > statistics.ALPHA:
            enough = estimate.n >= statistics.blocks_needed(self.tests)
            return "none" if enough else "too few blocks"
        logarithm = math.log(estimate.ratio)
        if abs(logarithm) <= band or abs(estimate.ratio - 1) < statistics.SMALLEST:
            return "none"
        return "faster" if logarithm * metric.better > 0 else "slower"

    def _effect(
        self,
        contrast: Contrast,
        metric: MetricRef,
        pairs: int,
        logs: np.ndarray[Any, Any],
        estimate: statistics.Estimate | None,
        p_holm: float | None,
        verdict: EffectVerdict,
        band: float,
    ) -> Effect:
        with_, without = contrast.pairs[0]
        tested = estimate is not None and estimate.low is not None
        least = statistics.minimum_detectable(logs, self.tests) if tested else None
        return Effect(
            name=contrast.name,
            metric=metric.name,
            arm=self.design.label(with_),
            against=self.design.label(without),
            pairs=pairs,
            ratio=estimate.ratio if estimate else None,
            low=estimate.low if estimate else None,
            high=estimate.high if estimate else None,
            p_value=estimate.p_value if estimate else None,
            p_holm=p_holm,
            blocks=len(logs),
            minimum_detectable=None
            if least is None
            else max(least, math.expm1(band), statistics.SMALLEST),
            verdict=verdict,
            log_ratios=tuple(float(value) for value in logs),
            spikes=statistics.spikes(logs),
        )

    def _noise(self, metric: MetricRef) -> Effect | None:
        again = next((cell for cell in self.cells if cell.arm == AGAIN), None)
        base = self.figures.logs(self.design.baseline, metric)
        if again is None or not base:
            return None
        copies = logarithms(again, metric)
        baseline = self.figures.arms[self.design.baseline]
        blocks = pairable(base.keys() & copies.keys(), again, baseline)
        logs = np.array([copies[block] - base[block] for block in blocks])
        if not len(logs):
            return None
        estimate = statistics.paired(logs)
        enough = len(logs) >= statistics.blocks_needed(1)
        verdict: EffectVerdict = "none" if enough else "too few blocks"
        if apart(again, baseline):
            estimate, verdict = untested(estimate), "apart"
        significant = estimate.p_value is not None and estimate.p_value <= statistics.ALPHA
        if significant and abs(estimate.ratio - 1) >= statistics.SMALLEST:
            verdict = "faster" if math.log(estimate.ratio) * metric.better > 0 else "slower"
        return Effect(
            name="A/A",
            metric=metric.name,
            arm=AGAIN,
            against=BASELINE,
            pairs=1,
            ratio=estimate.ratio,
            low=estimate.low,
            high=estimate.high,
            p_value=estimate.p_value,
            p_holm=estimate.p_value,
            blocks=len(logs),
            minimum_detectable=statistics.minimum_detectable(logs, 1),
            verdict=verdict,
            log_ratios=tuple(float(value) for value in logs),
            same_tokens=self.token_agreement.share([(again, baseline)]),
            reason=why_none(estimate, estimate.p_value, 1, 0.0) if verdict == "none" else "",
            spikes=statistics.spikes(logs),
            busy=busy_blocks(again, baseline),
        )

    # ---- more than one at a time

    def _interactions(self, metric: MetricRef) -> tuple[Interaction, ...]:
        contrasts = self.design.interactions
        read = []
        for contrast in contrasts:
            fours = [
                four
                for four in contrast.quadruples
                if all(self.figures.logs(chosen, metric) for chosen in four)
            ]

            def excess(log: dict[Chosen, float], fours: Any = fours) -> float:
                return float(np.mean([log[ab] - log[a] - log[b] + log[o] for ab, a, b, o in fours]))

            def whole(log: dict[Chosen, float], fours: Any = fours) -> float:
                return float(np.mean([log[ab] - log[o] for ab, _, _, o in fours]))

            used = [chosen for four in fours for chosen in four]
            logs, joint = (self.figures.by_block(used, metric, value) for value in (excess, whole))
            read.append((used, logs, joint))
        estimates = [self.figures.estimate(used, logs) for used, logs, _ in read]
        corrected = statistics.holm([e.p_value if e else None for e in estimates])
        interactions = []
        for contrast, (used, _, joint), estimate, p_holm in zip(
            contrasts, read, estimates, corrected, strict=True
        ):
            verdict: Togetherness
            reason = ""
            if estimate is None:
                verdict = self.figures.lacking(
                    {arm for four in contrast.quadruples for arm in four}, metric
                )
            elif self.figures.apart(used):
                verdict = "apart"
            elif p_holm is None or p_holm > statistics.ALPHA:
                enough = estimate.n >= statistics.blocks_needed(len(contrasts))
                verdict = "none" if enough else "too few blocks"
                reason = why_none(estimate, p_holm, len(contrasts), 0.0) if enough else ""
            else:
                improved = math.log(estimate.ratio) * metric.better > 0
                verdict = "more together" if improved else "less together"
            interactions.append(
                Interaction(
                    contrast.first,
                    contrast.second,
                    metric.name,
                    estimate.ratio if estimate else None,
                    estimate.low if estimate else None,
                    estimate.high if estimate else None,
                    estimate.p_value if estimate else None,
                    p_holm,
                    estimate.n if estimate else 0,
                    verdict,
                    reason,
                    statistics.paired(joint).ratio if estimate else None,
                )
            )
        return tuple(interactions)

    def _attribution(self, metric: MetricRef) -> Attribution | None:
        if self.design.kind != "factorial":
            return None
        arms = self.design.arms
        weights = self.design.shapley_weights()

        def share(name: str) -> Callable[[dict[Chosen, float]], float]:
            return lambda log: sum(
                weight * (log[with_] - log[without])
                for (with_, without), weight in weights[name].items()
            )

        def estimate(value: Callable[[dict[Chosen, float]], float]) -> statistics.Estimate | None:
            logs = self.figures.by_block(arms, metric, value)
            return self.figures.estimate(arms, logs, statistics.mean)

        whole = estimate(lambda log: log[arms[-1]] - log[arms[0]])
        if whole is None:
            return None
        factors = [
            Factor(name, one.ratio, one.low, one.high)
            for name in self.design.names
            if (one := estimate(share(name))) is not None
        ]
        return Attribution(metric.name, tuple(factors), whole.ratio, whole.low, whole.high, whole.n)


def _band(noise: Effect | None) -> float:
    """By how much the logarithm of the A/A arm differs, either way: less is no effect. That is its
    estimate and not the far end of its interval, since the test already allows for the scatter."""
    return 0.0 if noise is None or not noise.ratio else abs(math.log(noise.ratio))
