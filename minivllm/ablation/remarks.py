"""What is to be known besides the verdicts of an ablation, in sentences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from minivllm.ablation import statistics
from minivllm.ablation.findings import Effect, Interaction
from minivllm.ablation.metric import Metric, zero_blocks
from minivllm.report.cells import Cell
from minivllm.report.format import count, whole_percent
from minivllm.report.ranking import Ranking
from minivllm.report.rows import status_of


@dataclass(frozen=True)
class Told:
    """What the records of an ablation are, and what they are read for."""

    cells: list[Cell]  # an arm each
    metric: Metric
    ranking: Ranking
    left_out: int  # records of other ablations, code or devices, and those that newer ones replace
    lossless: frozenset[str]  # optimisations that are declared so


def remarks(
    told: Told, effects: Sequence[Effect], noise: Effect | None, interactions: Sequence[Interaction]
) -> list[str]:
    """Blocks that lack, noise, knobs that did nothing, outputs that changed, records left out."""
    notice = told.ranking.notice(told.metric.name)
    notes = [notice] if notice else told.ranking.notes
    for found, noun in ((effects, "optimisation"), (interactions, "interaction")):
        if any(item.verdict == "too few blocks" for item in found):
            needed = statistics.blocks_needed(len(found))
            notes.append(
                f"A verdict over {count(len(found), noun)} needs {needed} blocks: measure.repeats={needed} "
                "adds what is missing."
            )
    if noise is None:
        notes.append("There is no A/A arm with figures, so the noise is not known.")
    elif noise.verdict in ("faster", "slower"):
        notes.append(
            "The A/A arm differs from the baseline, of which it is a copy: something besides the "
            "optimisations changed while measuring, or this is the one time in twenty."
        )
    for effect in effects:
        if effect.verdict == "not live":
            notes.append(
                f"{effect.name} did no work that its counters show, so what is measured is not its effect."
            )
        share = effect.same_tokens
        if effect.name in told.lossless and share is not None and share < 1:
            notes.append(
                f"{effect.name} is declared lossless, and only {whole_percent(share)} of the outputs are the "
                "same with it and without it: in 16 bits sums in another order do that, and quant=fp32 or "
                "runtime.determinism=batch tells it from a mistake."
            )
        if effect.verdict == "apart":
            notes.append(
                f"{effect.name}: one arm was measured after the other had ended, so that what drifted in between is in "
                "the ratio; sweep.fresh=true measures them block by block."
            )
    for cell in told.cells:
        if zeros := zero_blocks(cell, told.metric):
            notes.append(
                f"{cell.label}: {told.metric.name} is 0 in {count(zeros, 'block')}, and nothing can be divided by that."
            )
    failed = sum(status_of(row) != "ok" for cell in told.cells for row in cell.rows)
    if failed:
        notes.append(
            f"{count(failed, 'measurement')} did not end well; {'its block counts' if failed == 1 else 'their blocks count'} for other arms only."
        )
    if told.left_out:
        notes.append(
            f"{told.left_out} records of other ablations, other code or other devices, or that were measured "
            "again, are left out."
        )
    return notes
