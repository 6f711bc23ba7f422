"""The statistics keep their rates, and agree with what can be counted by hand."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path

import numpy as np
import pytest

from minivllm.analysis import statistics
from minivllm.analysis.statistics import (
    ALPHA,
    POWER,
    centre,
    holm,
    mean,
    minimum_detectable,
    paired,
    sign_flip,
    two_sample,
)
from tests.later import Later
from tests.scripts.load import load_script

stats = Later("scipy.stats")
integrate = Later("scipy.integrate")


def test_the_signed_rank_test_counts_sign_patterns() -> None:
    assert sign_flip(np.array([0.1, 0.2, 0.3, 0.4])) == 2 / 16
    # Of the 16 sums of +-1, +-2, +-3, +-4, ten are at least as far from 0 as 1 + 2 + 3 - 4 = 2,
    # besides those at 0.
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
def test_intervals_contain_the_truth_as_often_as_they_say(
    n: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(statistics, "RESAMPLES", 999)
    rng = np.random.default_rng(n)
    inside = 0
    for x in rng.normal(math.log(0.9), 0.02, (300, n)):
        found = paired(x)
        assert found.low is not None and found.high is not None
        inside += found.low <= 0.9 <= found.high
    assert stats.binomtest(inside, 300, 1 - ALPHA).pvalue > 1e-3


ROWS = 1500  # simulated ablations a noise and number of blocks
KINDS = (
    "normal",
    "lognormal",
    "heavy-tailed (t, 3)",
    "spikes in 1 block of 10, one arm",
    "two machine states",
)


@pytest.mark.parametrize("kind", KINDS)
def test_intervals_hold_under_every_kind_of_noise(kind: str) -> None:
    """The rates of reports/examples/cpu/statistics_coverage.md, as few simulations show them."""
    script = load_script("statistics_coverage")
    draw = script.KINDS[kind]
    middle = script.typical(draw)
    for n in (5, 10, 13, 20):
        _, low, high = centre(draw(np.random.default_rng(n), ROWS, n))
        inside = int(((low <= middle) & (middle <= high)).sum())
        assert stats.binomtest(inside, ROWS, 1 - ALPHA, alternative="less").pvalue > 1e-3, (
            kind,
            n,
            inside / ROWS,
        )


def test_the_documented_rates_are_those_of_the_script() -> None:
    script = load_script("statistics_coverage")
    path = Path(__file__).parents[2] / "reports" / "examples" / "cpu" / "statistics_coverage.json"
    record = json.loads(path.read_text())
    assert script.markdown(record) == path.with_suffix(".md").read_text()
    told = {one["blocks"]: one for one in record["kinds"]["normal"]}
    anew = script.cell(script.normal, 10, 300, 0.0)
    assert abs(told[10]["coverage_typical"] - anew["coverage_typical"]) < 0.05
    for kind in KINDS:
        assert all(one["coverage_typical"] > 0.93 for one in record["kinds"][kind]), kind


@pytest.mark.parametrize("n", [6, 7, 9, 13, 20])
def test_interval_and_test_agree(n: int) -> None:
    for x in np.random.default_rng(n).normal(0.015, 0.02, (200, n)):
        found = paired(x)
        assert found.low is not None and found.high is not None and found.p_value is not None
        assert (found.p_value <= ALPHA) is not (found.low <= 1 <= found.high)


def test_the_interval_by_hand() -> None:
    """Of six blocks the ends are the least and the greatest; of eight the fourth mean of two from
    either end."""
    x = np.array([0.1, 0.3, 0.2, 0.6, 0.4, 0.5])
    middle, low, high = centre(x)
    assert (middle, low, high) == pytest.approx((0.35, 0.1, 0.6))
    x = np.array([0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0])
    pairs = sorted((a + b) / 2 for i, a in enumerate(x) for b in x[i:])
    assert centre(x) == pytest.approx((3.5, pairs[3], pairs[-4]))


def test_a_spike_moves_the_typical_ratio_by_little_and_is_counted() -> None:
    x = np.random.default_rng(0).normal(math.log(1.1), 0.01, 13)
    hit = np.append(x[:-1], math.log(0.2))
    clean, spiked = paired(x), paired(hit)
    assert spiked.ratio == pytest.approx(clean.ratio, rel=0.01)
    assert (
        spiked.low is not None
        and spiked.high is not None
        and spiked.low > 1.08
        and spiked.high < 1.12
    )
    assert mean(hit).ratio < 1.0
    assert (statistics.spikes(x), statistics.spikes(hit)) == (0, 1)
    assert not statistics.withstands_a_spike(11) and statistics.withstands_a_spike(12)


def test_two_samples_hold_too() -> None:
    rng = np.random.default_rng(0)
    inside = 0
    for _ in range(400):
        a, b = 0.02 * rng.standard_t(3, 5), math.log(0.9) + 0.02 * rng.standard_t(3, 6)
        found = two_sample(a, b)
        inside += (
            found.low is not None and found.high is not None and found.low <= 0.9 <= found.high
        )
    assert stats.binomtest(inside, 400, 1 - ALPHA, alternative="less").pvalue > 1e-3


@pytest.mark.parametrize(("n", "m"), [(4, 4), (4, 6), (5, 5), (3, 8)])
def test_the_ends_of_two_samples_are_counted(n: int, m: int) -> None:
    sums = [sum(chosen) - n * (n - 1) // 2 for chosen in itertools.combinations(range(n + m), n)]
    k = statistics._rank_sum_ends(n, m)
    assert sum(u < k for u in sums) / len(sums) <= ALPHA / 2 < sum(u <= k for u in sums) / len(sums)


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
    assert two_sample([0.0], [0.1, 0.2, 0.3]).p_value is None  # one block beside several
    alone = two_sample([0.0], [0.1])
    assert (
        alone.low is None and alone.p_value is None and alone.ratio == pytest.approx(math.exp(0.1))
    )


def test_two_alike_samples_are_told_apart_one_time_in_twenty(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(statistics, "RESAMPLES", 99)
    rng = np.random.default_rng(1)
    wrong = 0
    for _ in range(300):
        p = two_sample(rng.normal(0, 0.02, 5), rng.normal(0, 0.02, 5)).p_value
        wrong += p is not None and p <= ALPHA
    assert stats.binomtest(wrong, 300, ALPHA, alternative="greater").pvalue > 1e-3


def test_an_effect_as_large_as_the_minimum_is_found_as_often_as_it_says() -> None:
    """Approximately: the power is the t-test's, the verdict the signed-rank test's."""
    rng = np.random.default_rng(2)
    found = 0
    size = math.log1p(minimum_detectable(_unit_noise(12, 0.02), 1) or 0.0)
    for x in rng.normal(size, 0.02, (300, 12)):
        p = sign_flip(x)
        found += p is not None and p <= ALPHA
    assert 0.7 < found / 300 < 0.9


@pytest.mark.parametrize(("blocks", "tests"), [(8, 1), (12, 6), (12, 100), (50, 20)])
def test_the_minimum_is_what_the_t_test_has_the_power_for(blocks: int, tests: int) -> None:
    shift = math.log1p(minimum_detectable(_unit_noise(blocks, 0.02), tests) or 0.0) / 0.02
    freedom, limit = blocks - 1, stats.t.isf(ALPHA / tests / 2, blocks - 1)

    def found(square: float) -> float:
        beyond = limit * math.sqrt(square / freedom) - shift * math.sqrt(blocks)
        return float(stats.norm.sf(beyond) * stats.chi2.pdf(square, freedom))

    power, _ = integrate.quad(found, 0, 20 * freedom, points=[freedom], limit=200)
    assert power == pytest.approx(POWER, abs=1e-6)


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


@pytest.mark.parametrize("blocked", [True, False])
def test_a_contrast_of_few_blocks_holds_the_truth_as_often_as_it_says(blocked: bool) -> None:
    """Two blocks of six cells, two intervals that are to hold together."""
    rng, held, tries = np.random.default_rng(5), 0, 400
    for _ in range(tries):
        logs = 0.05 * rng.standard_normal((6, 2)) + (
            0.3 * rng.standard_normal(2) if blocked else 0.0
        )
        found = [
            statistics.contrast(list(logs), signs, 2, blocked=blocked)
            for signs in ((1, -1, 0, -1, 1, 0), (1, 0, -1, -1, 0, 1))
        ]
        held += all(
            one.low is not None and one.high is not None and one.low <= 1 <= one.high
            for one in found
        )
    assert 0.93 < held / tries < 0.99


def test_a_contrast_of_many_blocks_is_that_of_pairs() -> None:
    logs = np.random.default_rng(1).standard_normal((2, 8))
    found, pairs = (
        statistics.contrast(list(logs), (1, -1), 1, blocked=True),
        statistics.paired(logs[0] - logs[1]),
    )
    assert (found.ratio, found.low, found.high) == (pairs.ratio, pairs.low, pairs.high)


def test_a_spike_makes_no_finding() -> None:
    for n in (2, 3, 5, 7, 10):
        logs = 0.01 * np.random.default_rng(n).standard_normal((4, n))
        logs[3, 0] += 2.0
        found = statistics.contrast(list(logs), (1, -1, -1, 1), 1, blocked=True)
        assert statistics.multiply(found.ratio, found.low, found.high) is not False


@pytest.mark.parametrize(
    ("figures", "answer"),
    [
        ((0.9, 0.8, 0.95), False),
        ((1.2, 1.1, 1.3), False),
        ((1.0, 0.98, 1.04), True),
        ((1.0, 0.9, 1.2), None),
        ((0.5, None, None), None),
        ((1.001, 1.0005, 1.002), True),  # certain, and too little to be anything
    ],
)
def test_whether_two_effects_multiply(
    figures: tuple[float, float | None, float | None], answer: bool | None
) -> None:
    assert statistics.multiply(*figures) is answer
