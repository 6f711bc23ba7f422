"""Loads that are capped, end by time, or end because too much fails."""

from __future__ import annotations

import math

import pytest

from minivllm.bench.driver import drive, full_batch
from minivllm.bench.metrics.request_trace import RequestTrace
from minivllm.bench.workloads.arrivals import Arrival, Concurrency, Constant, Poisson
from minivllm.bench.workloads.stopping import Stopping
from minivllm.engine.options import SamplingParams
from tests.bench.scripted import ScriptedClock, ScriptedEngine, workload


def run(
    engine: ScriptedEngine, arrival: Arrival, stopping: Stopping, *lengths: tuple[int, int]
) -> list[RequestTrace]:
    return drive(
        engine, workload(*lengths), arrival, SamplingParams(), engine.clock, stopping=stopping
    )


def test_a_capped_rate_counts_the_wait_for_a_place() -> None:
    """One a second, two at a time, 4 s each: c, due at 2, gets a's place at 4; d, due at 3, b's at
    5."""
    engine = ScriptedEngine(ScriptedClock())
    arrival = Constant(rate=1.0, max_concurrency=2)
    traces = run(engine, arrival, Stopping(), *[(2, 4)] * 4)
    assert engine.largest_batch == full_batch(64, arrival, 4) == 2
    assert [trace.scheduled_s for trace in traces] == [0, 1, 2, 3]
    assert [trace.submitted_s for trace in traces] == [0, 1, 4, 5]
    assert [trace.token_times[0] - trace.scheduled_s for trace in traces] == [1, 1, 3, 3]


def test_a_cap_that_is_never_reached_changes_nothing() -> None:
    def times(arrival: Arrival) -> list[list[float]]:
        traces = run(ScriptedEngine(ScriptedClock()), arrival, Stopping(), *[(2, 3)] * 9)
        return [[trace.scheduled_s, *trace.token_times] for trace in traces]

    assert times(Poisson(0.7)) == times(Poisson(0.7, max_concurrency=9))


def test_nothing_is_sent_that_is_due_after_the_end() -> None:
    stopping = Stopping(duration_s=3.0, cooldown_s=2.0)
    traces = run(ScriptedEngine(ScriptedClock(7.0)), Constant(1.0), stopping, *[(2, 4)] * 9)
    assert [trace.scheduled_s for trace in traces] == [7, 8, 9, 10, 11]
    assert all(trace.completed for trace in traces), "what was sent is waited for"
    assert stopping.measured_until_s == 10 and stopping.sent_until_s == 12


def test_requests_that_were_due_in_time_wait_for_their_place_past_the_end() -> None:
    """Leaving them out would leave out the wait that an overload causes."""
    arrival = Constant(rate=1.0, max_concurrency=1)
    traces = run(ScriptedEngine(ScriptedClock()), arrival, Stopping(duration_s=3.0), *[(2, 4)] * 9)
    assert [trace.submitted_s for trace in traces] == [0, 4, 8]


def test_a_closed_loop_ends_by_time() -> None:
    traces = run(
        ScriptedEngine(ScriptedClock()), Concurrency(2), Stopping(duration_s=5.0), *[(1, 2)] * 99
    )
    assert [trace.scheduled_s for trace in traces] == [0, 0, 2, 2, 4, 4]


def test_too_many_failures_end_the_run() -> None:
    names = {chr(ord("a") + i) for i in range(1, 60)}
    engine = ScriptedEngine(ScriptedClock(), abort=names)
    stopping = Stopping(max_error_rate=0.5)
    traces = run(engine, Concurrency(1), stopping, *[(1, 5)] * 60)
    assert len(traces) == 10 and [trace.status for trace in traces[:2]] == ["ok", "aborted"]
    assert stopping.reason() == (
        "stopped early: 9 of the first 10 requests to end had failed, more than "
        "measure.max_error_rate=0.5 allows"
    )


@pytest.mark.parametrize(("rate", "sent"), [(0.1, 20), (0.05, 10), (None, 20)])
def test_as_many_failures_as_are_allowed_do_not(rate: float | None, sent: int) -> None:
    engine = ScriptedEngine(ScriptedClock(), abort={"a"})
    stopping = Stopping(max_error_rate=rate)
    assert len(run(engine, Concurrency(1), stopping, *[(1, 3)] * 20)) == sent
    assert (stopping.reason() is None) == (sent == 20)


def test_without_rules_nothing_ends() -> None:
    assert Stopping().in_time(1e12) == 1e12 and not Stopping().failing
    assert Stopping(duration_s=1.0).in_time(1.0) == math.inf
