"""Random numbers of verdicts: uniform, and independent in each of their arguments."""

from __future__ import annotations

import numpy as np
import pytest

from minivllm.extras.speculative.uniform import uniform
from tests.later import Later

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
