"""The statistics keep their rates, and agree with what can be counted by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.stats import binomtest

from minivllm.ablation import statistics
from minivllm.ablation.statistics import ALPHA, holm, minimum_detectable, paired, sign_flip, two_sample


def test_the_sign_flip_test_counts_sign_patterns() -> None:
    assert sign_flip(np.array([0.1, 0.2, 0.3, 0.4])) == 2 / 16
    # Of the 16 sums of +-1, +-2, +-3, +-4, ten are at least as far from 0 as 1 + 2 + 3 - 4 = 2, besides those at 0.
    far = sum(
        abs(a + b * 2 + c * 3 + d * 4) >= 2
        for a in (1, -1)
        for b in (1, -1)
        for c in (1, -1)
        for d in (1, -1)
    )
    assert sign_flip(np.array([0.1, 0.2, 0.3, -0.4])) == far / 16
    assert sign_flip(np.array([0.1])) is None


def test_many_blocks_are_tested_at_random() -> None:
    x = np.random.default_rng(0).normal(0.03, 0.01, 30)
    p = sign_flip(x)
    assert p is not None and 0 < p <= 2 / statistics.RESAMPLES


def test_equal_blocks_are_not_told_apart_by_rounding() -> None:
    assert sign_flip(np.full(8, 0.1)) == 2 / 256
    assert paired(np.full(8, math.log(1.1))).width == 0
    assert paired(np.zeros(8)).p_value == 1.0


def test_blocks_for_a_verdict() -> None:
    assert [statistics.blocks_needed(k) for k in (1, 2, 3, 6, 7, 12)] == [6, 7, 7, 8, 9, 9]
    assert [statistics.repeats_needed(k) for k in (1, 2, 12)] == [4, 5, 6]
    for k in range(1, 20):
        n = statistics.blocks_needed(k)
        assert 2 / 2**n <= ALPHA / k < 2 / 2 ** (n - 1)
        p = paired(np.random.default_rng(k).normal(0.5, 0.01, n)).p_value
        corrected = holm([p, *[1.0] * (k - 1)])[0]
        assert corrected is not None and corrected <= ALPHA


def test_holm_by_hand() -> None:
    assert holm([0.01, None, 0.04, 0.03]) == pytest.approx([0.03, None, 0.06, 0.06])
    assert holm([None]) == [None] and holm([]) == []


@pytest.mark.parametrize("n", [statistics.FEWEST, 6, 8, 12])
def test_intervals_contain_the_truth_as_often_as_they_say(n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(statistics, "RESAMPLES", 999)
    rng = np.random.default_rng(n)
    inside = 0
    for x in rng.normal(math.log(0.9), 0.02, (300, n)):
        found = paired(x)
        assert found.low is not None and found.high is not None
        inside += found.low <= 0.9 <= found.high
    assert binomtest(inside, 300, 1 - ALPHA).pvalue > 1e-3


def test_three_blocks_give_no_interval() -> None:
    """Theirs would contain the truth in about 81 of 100 cases."""
    x = np.random.default_rng(0).normal(0, 0.02, 4)
    assert statistics.FEWEST == 4
    assert paired(x[:3]).low is None and paired(x[:3]).width is None and paired(x).low is not None
    assert two_sample(x, x[:3]).low is None and two_sample(x[:3], x).high is None
    assert two_sample(x, x + 0.1).low is not None


def test_two_samples() -> None:
    rng = np.random.default_rng(0)
    found = two_sample(rng.normal(0, 0.01, 5), rng.normal(math.log(0.9), 0.01, 6))
    assert found.low is not None and found.high is not None and found.low <= 0.9 <= found.high
    assert found.p_value == pytest.approx(2 / math.comb(11, 5))
    alone = two_sample([0.0], [0.1])
    assert alone.low is None and alone.p_value is None and alone.ratio == pytest.approx(math.exp(0.1))


def test_two_alike_samples_are_told_apart_one_time_in_twenty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(statistics, "RESAMPLES", 99)
    rng = np.random.default_rng(1)
    wrong = 0
    for _ in range(300):
        p = two_sample(rng.normal(0, 0.02, 5), rng.normal(0, 0.02, 5)).p_value
        wrong += p is not None and p <= ALPHA
    assert binomtest(wrong, 300, ALPHA, alternative="greater").pvalue > 1e-3


def test_an_effect_as_large_as_the_minimum_is_found_as_often_as_it_says() -> None:
    """Approximately: the power is the t-test's, the verdict the sign-flip test's."""
    rng = np.random.default_rng(2)
    found = 0
    size = math.log1p(minimum_detectable(_unit_noise(12, 0.02), 1) or 0.0)
    for x in rng.normal(size, 0.02, (300, 12)):
        p = sign_flip(x)
        found += p is not None and p <= ALPHA
    assert 0.7 < found / 300 < 0.9


def _unit_noise(n: int, deviation: float) -> np.ndarray:
    """Numbers of exactly this standard deviation."""
    x = np.random.default_rng(0).normal(0, 1, n)
    return deviation * (x - x.mean()) / x.std(ddof=1)


def test_no_effect_is_detectable_with_too_few_blocks() -> None:
    assert minimum_detectable(_unit_noise(7, 0.02), 6) is None
    assert minimum_detectable(_unit_noise(8, 0.02), 6) is not None
    assert minimum_detectable(np.zeros(8), 6) == 0.0
    assert minimum_detectable([], 6) is None


def test_equal_numbers_give_equal_figures() -> None:
    x = np.random.default_rng(3).normal(0, 1, 20)
    assert paired(x) == paired(x) and two_sample(x, x[:9]) == two_sample(x, x[:9])
