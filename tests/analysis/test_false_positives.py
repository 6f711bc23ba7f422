"""Identical arms are declared equal: a thousand ablations in which nothing does anything."""

from __future__ import annotations

import numpy as np
import pytest

from minivllm.analysis import statistics
from minivllm.analysis.ablation.design import Design
from minivllm.analysis.ablation.effects import analyse
from tests.experiments.synthetic import ablation_rows
from tests.later import Later

stats = Later("scipy.stats")

SIX = {name: () for name in "abcdef"}
ABLATIONS = 1000


def test_false_verdicts_in_a_thousand_ablations() -> None:
    """An ablation is wrong if any of its six optimisations gets a verdict: after Holm, in at most 5
    %.

    Log-ratios as an ablation has them: leave-one-out arms share the baseline's noise, block by
    block.
    """
    rng = np.random.default_rng(0)
    wrong = 0
    for _ in range(ABLATIONS):
        baseline, arms = rng.normal(0, 0.02, 8), rng.normal(0, 0.02, (6, 8))
        corrected = statistics.holm([statistics.sign_flip(baseline - arm) for arm in arms])
        wrong += any(p is not None and p <= statistics.ALPHA for p in corrected)
    assert stats.binomtest(wrong, ABLATIONS, statistics.ALPHA, alternative="greater").pvalue > 0.05


def test_false_verdicts_from_records(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same through everything from records to verdicts, a few times."""
    monkeypatch.setattr(statistics, "RESAMPLES", 99)  # for intervals, which decide nothing here
    ablations = 20
    wrong = 0
    for seed in range(ablations):
        found = analyse(ablation_rows(Design("leave_one_out", SIX), {}, noise=0.02, seed=seed))
        assert found is not None
        wrong += any(effect.verdict != "none" for effect in found.effects)
    assert stats.binomtest(wrong, ablations, statistics.ALPHA, alternative="greater").pvalue > 0.05
