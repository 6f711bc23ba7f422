"""What is to be known besides the verdicts of an ablation, in sentences."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from minivllm.analysis import statistics
from minivllm.analysis.ablation.findings import Effect, Interaction
from minivllm.analysis.cell import Cell
from minivllm.analysis.format import count, p_value, ratio, sig, whole_percent
from minivllm.analysis.metric import MetricRef, gaps
from minivllm.analysis.ranking import Ranking


@dataclass(frozen=True)
class RemarkInputs:
    """What the records of an ablation are, and what they are read for."""

    cells: list[Cell]  # an arm each
    metric: MetricRef
    ranking: Ranking
    left_out: int  # records of other ablations, code or devices, and those that newer ones replace
    lossless: frozenset[str]  # optimisations that are declared so


def remarks(
    inputs: RemarkInputs,
    effects: Sequence[Effect],
    noise: Effect | None,
    interactions: Sequence[Interaction],
) -> list[str]:
    """Blocks that lack, noise, knobs that did nothing, outputs that changed, records left out."""
    notice = inputs.ranking.notice(inputs.metric.name)
    notes = [notice] if notice else inputs.ranking.notes
    for comparisons, noun in ((effects, "optimisation"), (interactions, "interaction")):
        if any(item.verdict == "too few blocks" for item in comparisons):
            needed = statistics.blocks_needed(len(comparisons))
            notes.append(
                f"A verdict over {count(len(comparisons), noun)} needs {needed} blocks: "
                f"measure.repeats={needed} adds what is missing."
            )
    if noise is None:
        notes.append("There is no A/A arm with figures, so the noise is not known.")
    elif noise.verdict == "apart":
        notes.append(
            "The A/A arm and the baseline did not take turns, so the noise is not known: "
            "sweep.fresh=true measures them block by block."
        )
    elif noise.verdict in ("faster", "slower"):
        notes.append(
            "The A/A arm differs from the baseline, of which it is a copy: something besides the "
            "optimisations changed while measuring, or this is the one time in twenty."
        )
    for effect in effects:
        if effect.verdict == "not live":
            notes.append(
                f"{effect.name} did no work that its counters show, so what is measured is not "
                "its effect."
            )
        share = effect.same_tokens
        if effect.name in inputs.lossless and share is not None and share < 1:
            notes.append(
                f"{effect.name} is declared lossless, and only {whole_percent(share)} of the "
                "outputs are the same with it and without it: in 16 bits sums in another order "
                "do that, and quant=fp32 or runtime.determinism=batch tells it from a mistake."
            )
        if effect.verdict == "apart":
            notes.append(
                f"{effect.name}: one arm did not take turns with the other, so that what drifted "
                "in between is in the ratio; sweep.fresh=true measures them block by block."
            )
        if effect.reason:
            notes.append(f"{effect.name} is none: {effect.reason}.")
        notes += _spikes(effect)
    notes += _gaps(inputs)
    if inputs.left_out:
        notes.append(
            f"{inputs.left_out} records of other ablations, other code or other devices, or that "
            "were measured again, are left out."
        )
    return notes


def _gaps(inputs: RemarkInputs) -> list[str]:
    """Which blocks have no figure, an arm a sentence; failures of all arms in one."""
    notes = []
    summaries = [gaps(cell, inputs.metric) for cell in inputs.cells]
    name = inputs.metric.name
    for one in summaries:
        for kind, words in (("zero", "0"), ("negative", "negative")):
            if number := one.why.get(kind):
                notes.append(
                    f"{one.arm}: {name} is {words} in {count(number, 'block')}, and nothing can "
                    "be divided by that."
                )
        if number := one.why.get("no figure"):
            notes.append(
                f"{one.arm}: no {name} in {number} of {count(one.blocks, 'block')}, which count "
                "for other arms only."
            )
    ended = [
        (
            one.arm,
            {
                kind: n
                for kind, n in one.why.items()
                if kind not in ("zero", "negative", "no figure")
            },
        )
        for one in summaries
    ]
    if failed := sum(n for _, why in ended for n in why.values()):
        arms = [
            f"{arm}: {', '.join(f'{n} {kind}' for kind, n in why.items())}"
            for arm, why in ended
            if why
        ]
        notes.append(
            f"{count(failed, 'measurement')} did not end well "
            f"({'; '.join(arms[:4])}{'; ...' * (len(arms) > 4)}); "
            f"{'its block counts' if failed == 1 else 'their blocks count'} for other arms only."
        )
    return notes


def _spikes(effect: Effect) -> list[str]:
    """That blocks lie far from the others, and how far the ratios reach."""
    if not effect.spikes:
        return []
    lies = "lies" if effect.spikes == 1 else "lie"
    ends = f"{ratio(math.exp(min(effect.log_ratios)))} to {ratio(math.exp(max(effect.log_ratios)))}"
    robust = statistics.withstands_a_spike(effect.blocks)
    return [
        f"{effect.name}: {effect.spikes} of {count(effect.blocks, 'block')} {lies} far from the "
        f"others, with ratios from {ends}; the ratio is that of the typical block"
        + (
            "."
            if robust
            else ", and its interval, of so few, is not robust to one spike: add blocks "
            "(measure.repeats)."
        )
    ]


def why_none(estimate: statistics.Estimate, p_holm: float | None, tests: int, band: float) -> str:
    """Why there is no verdict although the p-value or the interval seem to say that there is one;
    empty where they do not.

    Args:
        estimate: of the effect.
        p_holm: its p-value after correction.
        tests: how many effects it is one of.
        band: by how much the logarithm of the A/A arm differs.
    """
    p, low, high = estimate.p_value, estimate.low, estimate.high
    apart = low is not None and high is not None and not low <= 1 <= high
    if p is None or p_holm is None or not (apart or p <= statistics.ALPHA):
        return ""
    if p_holm > statistics.ALPHA:
        return (
            f"p is {p_value(p)} by itself and {p_value(p_holm)} as one of {count(tests, 'test')} "
            "(Holm); the interval is for it alone"
        )
    if abs(math.log(estimate.ratio)) <= band:
        return f"found, but by no more than the A/A arm differs, {sig(100 * math.expm1(band), 2)} %"
    if abs(estimate.ratio - 1) < statistics.SMALLEST:
        return f"found, but of less than {100 * statistics.SMALLEST:g} %"
    return ""
