"""Arrival processes."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from minivllm.bench.arrivals import Concurrency, Offline, Poisson
from minivllm.errors import BadInput


def test_offline_is_all_at_once() -> None:
    assert Offline().schedule(3, seed=0) == [0, 0, 0]
    assert Offline().concurrency is None


def test_poisson_repeats_with_its_seed() -> None:
    assert Poisson(2.0).schedule(50, seed=3) == Poisson(2.0).schedule(50, seed=3)
    assert Poisson(2.0).schedule(50, seed=3) != Poisson(2.0).schedule(50, seed=4)
    # A longer workload keeps the arrivals of a shorter one, and a higher rate only compresses them.
    assert Poisson(2.0).schedule(50, seed=3)[:20] == Poisson(2.0).schedule(20, seed=3)
    assert Poisson(4.0).schedule(9, seed=3) == pytest.approx(
        [t / 2 for t in Poisson(2.0).schedule(9, seed=3)]
    )


def test_poisson_has_its_rate_and_exponential_gaps() -> None:
    times = Poisson(5.0).schedule(20_001, seed=0)
    gaps = [b - a for a, b in pairwise(times)]
    mean = sum(gaps) / len(gaps)
    deviation = (sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5
    assert times[0] == 0 and min(gaps) >= 0
    assert mean == pytest.approx(0.2, rel=0.03)  # the standard error is 0.7 %
    assert deviation == pytest.approx(mean, rel=0.05)
    assert sum(gap > 0.2 for gap in gaps) / len(gaps) == pytest.approx(0.3679, abs=0.015)  # 1 / e


def test_no_requests_no_arrivals() -> None:
    assert Poisson(1.0).schedule(0, seed=0) == Offline().schedule(0, seed=0) == []


@pytest.mark.parametrize("rate", [0, -1, float("nan"), float("inf"), "2", True, None])
def test_a_wrong_rate_is_named(rate: Any) -> None:
    with pytest.raises(BadInput, match=r"arrival\.rate="):
        Poisson(rate)


@pytest.mark.parametrize("concurrency", [0, -3, 1.5, "8", True, None])
def test_a_wrong_concurrency_is_named(concurrency: Any) -> None:
    with pytest.raises(BadInput, match=r"arrival\.concurrency="):
        Concurrency(concurrency)
