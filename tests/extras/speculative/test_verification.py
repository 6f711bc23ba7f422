"""Which drafts are kept: by the target's own tokens, and at a given rate."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minivllm.extras.speculative.verification import DraftedRun, GivenAcceptance, SameNoise, uniform
from tests.extras.speculative.growing import request
from tests.later import Later

few = st.lists(st.integers(0, 2), max_size=6)


@given(drafts=few, more=st.lists(st.integers(-2, 2), min_size=7, max_size=7))
def test_the_output_is_the_targets_own(drafts: list[int], more: list[int]) -> None:
    """A prefix of its tokens, which ends at the first wrong draft or with one token more."""
    chosen = more[: len(drafts) + 1]
    added = SameNoise().verify(DraftedRun(request(), 1, drafts, chosen, None))
    assert added == chosen[: len(added)] and 1 <= len(added) <= len(drafts) + 1
    assert added[:-1] == drafts[: len(added) - 1]
    assert len(added) > len(drafts) or added[-1] != drafts[len(added) - 1]


def test_rows_after_a_draft_that_a_mask_refused_say_nothing() -> None:
    assert SameNoise().verify(DraftedRun(request(), 1, [5], [5, 6, 7, 8], None)) == [5, 6]
    assert SameNoise().verify(DraftedRun(request(), 1, [], [5, 6, 7, 8], None)) == [5]


@pytest.mark.parametrize("rates", [(0.7,), (0.9, 0.5), (1.0, 0.0), (0.0,), (1.0,)])
def test_drafts_are_accepted_at_the_given_rates(rates: tuple[float, ...]) -> None:
    rule, one, count = GivenAcceptance(rates), request(), 4_000
    kept = [0] * 4  # drafts that are at least so long
    for position in range(count):
        added = rule.verify(DraftedRun(one, 7 * position, [3, 3, 3], [9, 9, 9, 9], None))
        assert added[:-1] == [3] * (len(added) - 1) and added[-1] == 9
        for length in range(len(added)):
            kept[length] += 1
    for place, (before, after) in enumerate(pairwise(kept)):
        rate = rates[min(place, len(rates) - 1)]
        if before:
            assert after / before == pytest.approx(rate, abs=0.05)


def test_a_verdict_depends_on_seed_and_position_alone() -> None:
    rule = GivenAcceptance((0.5,))
    first, second = request(), request()
    second.seed = 1
    verdicts = [
        [
            len(rule.verify(DraftedRun(one, 4 * place, [3, 3], [9, 9, 9], None)))
            for place in range(60)
        ]
        for one in (first, first, second)
    ]
    assert verdicts[0] == verdicts[1] != verdicts[2]


def test_what_is_no_number_is_not_accepted_at_any_rate() -> None:
    assert GivenAcceptance((1.0,)).verify(DraftedRun(request(), 1, [3, 3], [9, -1, 9], None)) == [
        3,
        -1,
    ]


stats = Later("scipy.stats")


@pytest.mark.parametrize(
    "arguments",
    [
        [(seed, 3, 1) for seed in range(5_000)],
        [(3, position, 1) for position in range(5_000)],
        [(-(2**63) + salt, 2**40, salt) for salt in range(5_000)],
    ],
)
def test_they_are_uniform(arguments: list[tuple[int, int, int]]) -> None:
    numbers = [uniform(*one) for one in arguments]
    assert all(0 <= number < 1 for number in numbers) and len(set(numbers)) == len(numbers)
    assert stats.kstest(numbers, "uniform").pvalue > 0.001
    assert abs(np.corrcoef(numbers[1:], numbers[:-1])[0, 1]) < 0.06
    assert [uniform(*one) for one in arguments] == numbers


def test_salts_are_independent() -> None:
    pairs = [[uniform(seed, 5, salt) for salt in (1, 2)] for seed in range(5_000)]
    assert abs(np.corrcoef(np.array(pairs).T)[0, 1]) < 0.06
