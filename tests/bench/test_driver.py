"""The driver's loop: who is submitted when, what is traced, and what happens to those that fail."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minivllm.bench.driver import DriveProgress, drive, full_batch, request_seed, warm_up
from minivllm.bench.metrics.metrics import compute
from minivllm.bench.metrics.validity import Evidence, check
from minivllm.bench.workloads.arrivals import Arrival, Concurrency, Offline, Poisson
from minivllm.engine.options import SamplingParams
from minivllm.engines.base import EngineOutput
from minivllm.errors import BadInput
from tests.bench.scripted import ScriptedClock, ScriptedEngine, workload


class Schedule(Arrival):
    def __init__(self, times: list[float]) -> None:
        self.times = times

    def schedule(self, n: int, seed: int) -> list[float]:
        return self.times


def test_offline_submits_everything_in_order() -> None:
    engine = ScriptedEngine(ScriptedClock(7.0), max_num_seqs=2)
    traces = drive(
        engine, workload((3, 2), (4, 1), (5, 3)), Offline(), SamplingParams(), engine.clock
    )
    assert list(engine.submitted) == ["a", "b", "c"]
    assert [trace.scheduled_s for trace in traces] == [7, 7, 7]
    assert [trace.started_s for trace in traces] == [7, 7, 8]
    assert [trace.finished_s for trace in traces] == [9, 8, 11]
    assert [trace.token_ids for trace in traces] == [[0, 1], [0], [0, 1, 2]]
    assert [trace.input_tokens for trace in traces] == [3, 4, 5]
    assert {trace.finish_reason for trace in traces} == {"length"}


def test_requests_carry_the_workloads_lengths_and_seeds_of_their_own() -> None:
    def submitted(params: SamplingParams, seed: int) -> list[SamplingParams]:
        engine = ScriptedEngine(ScriptedClock())
        drive(engine, workload((3, 2), (3, 5)), Offline(), params, engine.clock, seed=seed)
        return [sent for _, sent in engine.submitted.values()]

    first, second = submitted(SamplingParams(temperature=0.5, max_tokens=99), seed=1)
    assert (first.max_tokens, first.ignore_eos, first.temperature) == (2, True, 0.5)
    assert second.max_tokens == 5
    assert first.seed == request_seed(1, 0) != second.seed
    assert submitted(SamplingParams(), seed=1)[1].seed == second.seed
    assert submitted(SamplingParams(), seed=2)[1].seed != second.seed
    assert submitted(SamplingParams(seed=1), seed=2)[1].seed == second.seed
    assert all(0 <= request_seed(seed, 3) < 2**31 for seed in (0, -1, 10**12))


def test_an_idle_driver_sleeps_until_the_next_arrival() -> None:
    engine = ScriptedEngine(ScriptedClock())
    traces = drive(
        engine, workload((1, 1), (1, 1)), Schedule([0.0, 5.0]), SamplingParams(), engine.clock
    )
    assert engine.clock.slept == 4  # the first request took 1 s
    assert engine.polls == 2
    assert [trace.token_times for trace in traces] == [[1], [6]]


@pytest.mark.parametrize(("concurrency", "seen"), [(1, 1), (3, 3), (99, 5)])
def test_a_closed_loop_keeps_to_its_concurrency(concurrency: int, seen: int) -> None:
    engine = ScriptedEngine(ScriptedClock())
    work = workload(*[(2, 3)] * 5)
    traces = drive(engine, work, Concurrency(concurrency), SamplingParams(), engine.clock)
    assert engine.largest_batch == seen
    assert all(trace.completed for trace in traces)


def test_refused_and_aborted_requests_are_traced_and_free_their_slots() -> None:
    engine = ScriptedEngine(ScriptedClock(), refuse={"a", "c"}, abort={"b"})
    traces = drive(
        engine,
        workload((1, 5), (1, 5), (1, 5), (1, 5)),
        Concurrency(1),
        SamplingParams(),
        engine.clock,
    )
    assert [trace.status for trace in traces] == ["refused", "aborted", "refused", "ok"]
    assert [trace.scheduled_s for trace in traces] == [0, 0, 2, 2]
    assert traces[0].error == "a can never fit"
    assert traces[1].error == "the engine ended it after 2 tokens: abort"
    assert traces[3].error is None


def test_an_answer_for_a_stranger_is_an_error() -> None:
    class Confused(ScriptedEngine):
        def poll(self, timeout_s: float | None = None) -> list[EngineOutput]:
            return [EngineOutput("z", (1,))]

    engine = Confused(ScriptedClock())
    with pytest.raises(RuntimeError, match="z, which is not in flight"):
        drive(engine, workload((1, 1)), Offline(), SamplingParams(), engine.clock)


def test_progress_is_told_seldom_and_at_the_end() -> None:
    engine = ScriptedEngine(ScriptedClock(), step_s=0.0625)
    progress: list[DriveProgress] = []
    drive(
        engine,
        workload((1, 16), (1, 16)),
        Offline(),
        SamplingParams(),
        engine.clock,
        progress.append,
    )
    assert len(progress) == 5  # every fourth step of 1 s, and at the end
    assert progress[-1] == DriveProgress(done=2, total=2, output_tokens=32, elapsed_s=1.0)


@pytest.mark.parametrize(
    "times", [[0.0], [1.0, 0.5], [-1.0, 0.0], [0.0, float("nan")], [0.0, float("inf")]]
)
def test_a_wrong_schedule_is_refused(times: list[float]) -> None:
    engine = ScriptedEngine(ScriptedClock())
    with pytest.raises(BadInput, match="2 ascending times"):
        drive(engine, workload((1, 1), (1, 1)), Schedule(times), SamplingParams(), engine.clock)


def test_several_completions_a_request_are_refused() -> None:
    engine = ScriptedEngine(ScriptedClock())
    with pytest.raises(BadInput, match=r"decoding\.n=2"):
        drive(engine, workload((1, 1)), Offline(), SamplingParams(n=2), engine.clock)


@pytest.mark.parametrize(
    ("arrival", "seqs", "batch"),
    [(Offline(), 64, 6), (Offline(), 4, 4), (Concurrency(2), 4, 2), (Poisson(), 3, 3)],
)
def test_warm_up_runs_one_batch_of_the_measured_size(
    arrival: Arrival, seqs: int, batch: int
) -> None:
    engine = ScriptedEngine(ScriptedClock(), max_num_seqs=seqs)
    work = workload(*[(5, 100)] * 6)
    took = warm_up(
        engine, work, arrival, SamplingParams(min_tokens=50, max_tokens=None), engine.clock
    )
    assert full_batch(seqs, arrival, 6) == batch
    assert engine.largest_batch == len(engine.submitted) == batch
    assert {params.max_tokens for _, params in engine.submitted.values()} == {8}
    assert took == 8


def test_warm_up_of_a_set_number() -> None:
    engine = ScriptedEngine(ScriptedClock())
    work = workload((5, 3), (5, 100))
    assert (
        warm_up(engine, work, Concurrency(2), SamplingParams(), engine.clock, num_requests=0)
        is None
    )
    assert not engine.submitted
    warm_up(engine, work, Concurrency(2), SamplingParams(), engine.clock, num_requests=5)
    assert len(engine.submitted) == 5  # the workload's two, over and over
    assert engine.largest_batch == 2


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=12),
    st.sampled_from(
        [Offline(), Concurrency(1), Concurrency(3), Poisson(0.1), Poisson(1.0), Poisson(30.0)]
    ),
    st.integers(1, 5),
    st.floats(0.01, 4.0),
    st.integers(0, 5),
)
def test_any_drive_is_whole_and_valid(
    lengths: list[tuple[int, int]], arrival: Arrival, max_num_seqs: int, step_s: float, seed: int
) -> None:
    engine = ScriptedEngine(ScriptedClock(3.0), max_num_seqs=max_num_seqs, step_s=step_s)
    work = workload(*lengths)
    traces = drive(engine, work, arrival, SamplingParams(), engine.clock, seed=seed)
    assert [len(trace.token_ids) for trace in traces] == [output for _, output in lengths]
    metrics = compute(traces, {}, full_batch(max_num_seqs, arrival, len(work)))
    assert check(Evidence(traces, work, metrics)).reasons == []
    assert metrics.output_tokens == sum(output for _, output in lengths)
