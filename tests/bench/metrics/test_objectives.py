"""Objectives: good requests and tokens, and the share of requests that meets each of them."""

from __future__ import annotations

import pytest

from minivllm.bench.metrics.metrics import compute
from minivllm.bench.metrics.objectives import unknown_objective
from minivllm.bench.metrics.request_trace import RequestTrace
from minivllm.bench.records.figures import Attainment


def trace(name: str, first_s: float, last_s: float, tokens: int) -> RequestTrace:
    """A request that is due at 0, and whose tokens after the first all come at the end."""
    times = [first_s, *[last_s] * (tokens - 1)]
    return RequestTrace(name, 3, 0.0, 0.0, 0.0, last_s, times, [1] * tokens, "length")


FAST, SLOW = trace("fast", 0.5, 1.0, 6), trace("slow", 2.0, 10.0, 5)
FAILED = RequestTrace("failed", 3, 0.0, finished_s=1.0, finish_reason="abort")


def test_each_objective_has_a_share_of_its_own_and_all_have_one() -> None:
    slo = {"ttft_ms": 3000.0, "tpot_ms": 100.0, "e2e_ms": 9000.0}
    # Of four requests, one failed: two and one more had their first token in time, and so on.
    metrics = compute([FAST, SLOW, FAST, FAILED], slo, 4)
    assert metrics.attainment == Attainment(ttft_ms=0.75, tpot_ms=0.5, e2e_ms=0.5, all=0.5)
    assert metrics.goodput_requests_per_s == pytest.approx(2 / 10)
    assert metrics.goodput_tokens_per_s == pytest.approx(12 / 10)


def test_an_answer_in_one_chunk_meets_no_tpot_that_anybody_knows() -> None:
    bundled, single = trace("bundled", 1.0, 1.0, 5), trace("single", 1.0, 1.0, 1)
    both = {"ttft_ms": 3000.0, "tpot_ms": 100.0}
    metrics = compute([FAST, bundled, FAILED], both, 4)
    assert metrics.attainment == Attainment(ttft_ms=2 / 3)
    assert metrics.goodput_requests_per_s is None and metrics.goodput_tokens_per_s is None
    assert metrics.counted.good is None
    (reason,) = unknown_objective([FAST, bundled, FAILED], both)
    assert reason.startswith("measure.slo.tpot_ms: the time per output token of 1 of 2 requests")
    # One of a single token has no gap to wait for, and without the objective nothing is unknown.
    assert compute([FAST, single], both, 4).attainment == Attainment(ttft_ms=1, tpot_ms=1, all=1)
    assert unknown_objective([FAST, single], both) == []
    assert compute([bundled], {"ttft_ms": 3000.0}, 4).attainment == Attainment(ttft_ms=1, all=1)
    assert unknown_objective([bundled], {"ttft_ms": 3000.0}) == []


def test_an_objective_that_is_not_set_has_no_share() -> None:
    metrics = compute([FAST, SLOW], {"ttft_ms": 1000.0, "tpot_ms": None}, 2)
    assert metrics.attainment == Attainment(ttft_ms=0.5, all=0.5)
    without = compute([FAST, SLOW], {}, 2)
    assert without.attainment is None and without.goodput_tokens_per_s is None
