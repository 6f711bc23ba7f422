"""Arrival processes."""

from __future__ import annotations

import math
import statistics
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from minivllm.bench.workloads import arrivals
from minivllm.bench.workloads.arrivals import (
    Arrival,
    Concurrency,
    Constant,
    Gamma,
    Offline,
    Poisson,
    Ramp,
    check_span,
)
from minivllm.bench.workloads.options import GammaOptions, RampOptions, RateOptions, ReplayOptions
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


def gaps_of(arrival: Arrival, n: int = 40_001) -> list[float]:
    return [b - a for a, b in pairwise(arrival.schedule(n, seed=1))]


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_gamma_gaps_have_the_rate_and_the_shape(burstiness: float) -> None:
    gaps = gaps_of(Gamma(5.0, burstiness))
    assert statistics.mean(gaps) == pytest.approx(0.2, rel=0.03)
    assert statistics.stdev(gaps) / statistics.mean(gaps) == pytest.approx(
        burstiness**-0.5, rel=0.03
    )
    skew = statistics.mean(((gap - 0.2) / 0.2) ** 3 for gap in gaps) * burstiness**1.5
    assert skew == pytest.approx(2 / burstiness**0.5, rel=0.15)


def test_a_burstiness_of_one_is_poisson() -> None:
    gaps = gaps_of(Gamma(5.0, 1.0))
    for share in (0.5, 1.0, 2.0):
        assert statistics.mean(gap > share / 5 for gap in gaps) == pytest.approx(
            math.exp(-share), abs=0.01
        )


def test_constant_is_even() -> None:
    assert Constant(4.0).schedule(4, seed=9) == [0, 0.25, 0.5, 0.75]


@pytest.mark.parametrize(("start", "end"), [(2.0, 10.0), (10.0, 2.0), (6.0, 6.0)])
def test_a_ramp_goes_in_a_straight_line_over_the_requests(start: float, end: float) -> None:
    n = 60_000
    times = Ramp(start, end).schedule(n, seed=0)
    duration = n / ((start + end) / 2)
    assert times[0] == 0 and times[-1] == pytest.approx(duration, rel=0.02)
    for fifth in range(5):
        low, high = fifth * duration / 5, (fifth + 1) * duration / 5
        rate = sum(low <= time < high for time in times) / (high - low)
        assert rate == pytest.approx(start + (end - start) * (fifth + 0.5) / 5, rel=0.03)


def test_a_ramp_of_set_length_holds_its_end() -> None:
    times = Ramp(1.0, 9.0, duration_s=10.0).schedule(20_000, seed=3)
    assert sum(time < 10 for time in times) == pytest.approx(50, abs=22)
    later = [b - a for a, b in pairwise(time for time in times if time > 10)]
    assert statistics.mean(later) == pytest.approx(1 / 9, rel=0.03)


def test_a_ramp_is_a_poisson_process_with_its_time_stretched() -> None:
    """Expected arrivals up to each time, by hand: start t + slope t^2 / 2; their gaps are
    exponential of mean 1."""
    times = Ramp(1.0, 9.0, duration_s=1000.0).schedule(4000, seed=5)
    counts = [1.0 * t + 8 / 1000 * t * t / 2 if t < 1000 else 5000 + 9 * (t - 1000) for t in times]
    assert [Poisson(1.0).schedule(4000, seed=5)] == [pytest.approx(counts)]


@given(
    st.sampled_from(
        [
            Constant(3.0),
            Poisson(0.1),
            Gamma(2.0, 0.05),
            Gamma(2.0, 50.0),
            Ramp(),
            Ramp(9.0, 0.5, 3.0),
        ]
    ),
    st.integers(0, 50),
    st.integers(0, 9),
)
def test_any_schedule_is_ascending_from_zero_and_repeats(
    arrival: Arrival, n: int, seed: int
) -> None:
    times = arrival.schedule(n, seed)
    assert len(times) == n and times[:1] in ([], [0.0])
    assert all(0 <= a <= b < math.inf for a, b in pairwise(times))
    assert arrival.schedule(n, seed) == times
    assert all(type(time) is float for time in times)


def test_no_requests_no_arrivals() -> None:
    assert Poisson(1.0).schedule(0, seed=0) == Offline().schedule(0, seed=0) == []


@pytest.mark.parametrize("knob", ["start_rate", "end_rate", "duration_s"])
def test_a_wrong_ramp_is_named(knob: str) -> None:
    with pytest.raises(BadInput, match=rf"arrival\.{knob}=0"):
        Ramp(**{knob: 0})


@pytest.mark.parametrize("rate", [0, -1, float("nan"), float("inf"), "2", True, None])
def test_a_wrong_rate_is_named(rate: Any) -> None:
    for arrival in (Poisson, Gamma, Constant):
        with pytest.raises(BadInput, match=r"arrival\.rate="):
            arrival(rate)
    with pytest.raises(BadInput, match=r"arrival\.burstiness="):
        Gamma(1.0, rate if rate != "2" else None)


@pytest.mark.parametrize("concurrency", [0, -3, 1.5, "8", True, None])
def test_a_wrong_concurrency_is_named(concurrency: Any) -> None:
    with pytest.raises(BadInput, match=r"arrival\.concurrency="):
        Concurrency(concurrency)


class Never(Arrival):
    """A process of the user's own, whose requests never come."""

    def schedule(self, n: int, seed: int) -> list[float]:
        return [math.inf] * n


def test_arrivals_that_outlast_the_measurement_are_refused_at_once() -> None:
    check_span(Constant(2.0), 21, 0, 10.0)
    check_span(Offline(), 10**6, 0, 1e-9)
    check_span(Constant(2.0), None, 0, 10.0)
    check_span(Poisson(1.0), 10**30, 0, 10.0)  # no list of so many is made
    with pytest.raises(
        BadInput,
        match=r"the last of 22 requests is due 10.5 s .* measure.timeout_s=10; set a higher",
    ):
        check_span(Constant(2.0), 22, 0, 10.0)
    with pytest.raises(BadInput, match="is due inf s after the start"):
        check_span(Never(), 9, 0, 1e300)


@pytest.mark.parametrize(
    "options",
    [
        lambda value: RateOptions(rate=value),
        lambda value: GammaOptions(burstiness=value),
        lambda value: RampOptions(start_rate=value),
        lambda value: RampOptions(end_rate=value),
        lambda value: ReplayOptions(rate_scale=value),
    ],
)
def test_rates_that_floats_cannot_follow_are_refused(options: Any) -> None:
    for value in (1e-300, 1e300):
        with pytest.raises(BadInput, match=r"arrival\.\w+=1e.* must be at (least|most)"):
            options(value)


def test_an_option_file_names_its_class() -> None:
    files = sorted((Path(__file__).parents[3] / "conf" / "arrival").glob("*.yaml"))
    assert {"offline", "poisson"} <= {file.stem for file in files}
    for file in files:
        options = yaml.safe_load(file.read_text())
        cls = getattr(arrivals, options.pop("_target_").rpartition(".")[2])
        assert cls.__name__.lower() == file.stem and not options
