"""Lies of engines: what each says of itself is not what the driver saw, and a sentence names it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minivllm.bench.driver import drive
from minivllm.bench.hardware import clock as clocks
from minivllm.bench.metrics.metrics import compute
from minivllm.bench.metrics.reconciliation import check_clock, check_resident, reconcile
from minivllm.bench.metrics.request_trace import RequestTrace
from minivllm.bench.metrics.validity import Evidence, check
from minivllm.bench.records.record import Validity
from minivllm.bench.workloads.arrivals import Concurrency
from minivllm.bench.workloads.workload import Workload, WorkloadRequest
from minivllm.engine.options import SamplingParams
from tests.bench.lying import (
    Bursts,
    CachedAnswers,
    CountingEngine,
    CutPrompts,
    LongAnswers,
    MadeUpHits,
)
from tests.bench.scripted import ScriptedClock

WORK = Workload(tuple(WorkloadRequest(f"r{i}", (i, *range(50, 65)), 8, True) for i in range(4)))


def judged(kind: type[CountingEngine], has_steps: bool = True, **knobs: Any) -> Validity:
    """What the gate says of a run of four requests, two at a time."""
    engine = kind(ScriptedClock(10.0), **knobs)
    traces = drive(engine, WORK, Concurrency(2), SamplingParams(), engine.clock)
    return check(
        Evidence(
            *(traces, WORK, compute(traces, {}, 2)),
            liveness=engine.liveness(),
            cold=True,
            steps=engine.steps(),
            has_steps=has_steps,
        )
    )


def test_an_honest_engine_is_not_remarked_on() -> None:
    assert judged(CountingEngine) == Validity(True, [], [])
    assert judged(CountingEngine, has_steps=False, max_num_seqs=1) == Validity(True, [], [])


@pytest.mark.parametrize(
    ("lie", "knobs", "words"),
    [
        (LongAnswers, {}, "4 outputs are not as long as asked (r0: 16 of 8"),
        (
            CachedAnswers,
            {},
            "32 tokens of 4 answers came, and the engine's steps decoded 0: answers came from "
            "elsewhere than its steps",
        ),
        (
            CutPrompts,
            {},
            "the engine computed 16 prompt tokens and found 0 in its prefix cache, of 64 that "
            "were asked: it cut prompts, or answered without them",
        ),
    ],
)
def test_a_lie_about_the_work_is_a_reason(
    lie: type[CountingEngine], knobs: dict[str, Any], words: str
) -> None:
    seen = judged(lie, **knobs)
    assert not seen.ok and any(words in reason for reason in seen.reasons)


@pytest.mark.parametrize(
    ("lie", "knobs", "words"),
    [
        (Bursts, {}, "tokens came 4.0 at a time, 32 at 8 moments"),
        (
            CachedAnswers,
            {},
            "whole answers came at once, 32 tokens in 4 of them",
        ),
        (
            CountingEngine,
            {"cached": 12},
            "the prefix cache was not cold: 48 of 64 prompt tokens came from it, and prompts "
            "share at most 0 with each other",
        ),
        (
            MadeUpHits,
            {},
            "the engine computed 64 prompt tokens where 64 were asked and 32 found in its prefix "
            "cache: it computed some twice, or found fewer",
        ),
    ],
)
def test_a_lie_about_how_it_was_done_is_a_note(
    lie: type[CountingEngine], knobs: dict[str, Any], words: str
) -> None:
    seen = judged(lie, **knobs)
    assert any(words in note for note in seen.notes)


def test_what_an_engine_does_not_count_is_not_judged() -> None:
    engine = CutPrompts(ScriptedClock())
    traces = drive(engine, WORK, Concurrency(2), SamplingParams(), engine.clock)
    bare = [{"start_s": row["num_tokens"]} for row in engine.rows]
    assert reconcile(traces, [], {}) == ([], []) == reconcile(traces, bare, {})
    some = {"engine": {"steps": 2.0 * len(engine.rows)}}  # a row of every second step
    assert reconcile(traces, engine.rows, some) == ([], [])


def answered(prompt: int, tokens: int, moments: int, cached: int = 0) -> RequestTrace:
    """A trace whose tokens come at so many moments."""
    times = [1.0 + i * moments // tokens for i in range(tokens)]
    trace = RequestTrace("r", prompt, 0.0, 0.0, token_times=times, cached_tokens=cached)
    trace.finish_reason, trace.token_ids = "length", [0] * tokens
    return trace


HONEST: dict[str, tuple[list[tuple[int, int, int]], dict[str, dict[str, float | str]]]] = {
    # (tokens, of prompts, drafts) of each step, for a prompt of 10 tokens and an answer of 6
    "plain": ([(10, 10, 0), *[(1, 0, 0)] * 5], {}),
    "chunked prefill": ([(4, 4, 0), (6, 6, 0), *[(1, 0, 0)] * 5], {}),
    "preempted": (
        [(10, 10, 0), (1, 0, 0), (12, 12, 0), *[(1, 0, 0)] * 3],
        {"batching": {"preemptions": 1.0}},
    ),
    "swapped": (
        [(10, 10, 0), (1, 0, 0), (1, 1, 0), *[(1, 0, 0)] * 3],
        {"batching": {"preemptions": 1.0}},
    ),
    "overlapping": (
        [(10, 10, 0), *[(1, 0, 0)] * 6],
        {"runtime": {"overlap_wasted_tokens": 1.0}},
    ),
    "without a cache": ([(10 + i, 10 + i, 0) for i in range(6)], {}),
    "handed over": (
        [(10, 10, 0), (2, 2, 0), *[(1, 0, 0)] * 5],
        {"parallel": {"tokens_handed_over": 8.0}},
    ),
}


@pytest.mark.parametrize("name", HONEST)
def test_honest_steps_of_every_kind_are_not_remarked_on(name: str) -> None:
    columns = ("num_tokens", "num_prefill_tokens", "num_drafts")
    steps, liveness = HONEST[name]
    rows = [dict(zip(columns, step, strict=True)) for step in steps]
    assert reconcile([answered(10, 6, 6)], rows, liveness) == ([], [])
    assert reconcile([answered(10, 6, 6)], rows[:1], liveness)[0] or name == "without a cache"


def test_accepted_drafts_are_no_burst() -> None:
    row = {"num_tokens": 10, "num_prefill_tokens": 10, "num_drafts": 0}
    verified = {"num_tokens": 5, "num_prefill_tokens": 0, "num_drafts": 4}
    traces = [answered(10, 9, 3)]
    assert reconcile(traces, [row, verified, verified], {}) == ([], [])
    assert reconcile(traces, [], {"speculative": {"accepted_tokens": 6.0}}) == ([], [])
    assert reconcile(traces, [], {})[1] == [  # of a server that says nothing of drafts
        "tokens came 3.0 at a time, 9 at 3 moments: ITL gives them equal parts of the time "
        "between these"
    ]
    assert reconcile(traces, [], {"decoding": {"beam_rounds": 8.0}}) == ([], [])


@given(st.lists(st.tuples(st.integers(1, 50), st.integers(1, 20), st.integers(0, 50))))
def test_sums_of_honest_requests_agree(requests: list[tuple[int, int, int]]) -> None:
    """Whatever prompts, answers and hits are, an engine that computes the rest is believed."""
    traces = [answered(prompt, out, out, min(hit, prompt - 1)) for prompt, out, hit in requests]
    rows = [
        {
            "num_tokens": (t.input_tokens - (t.cached_tokens or 0)) + len(t.token_ids) - 1,
            "num_prefill_tokens": t.input_tokens - (t.cached_tokens or 0),
            "num_drafts": 0,
        }
        for t in traces
    ]
    assert reconcile(traces, rows, {}, has_steps=True) == ([], [])


@pytest.mark.parametrize(("made", "ok"), [(32.0, True), (28.0, True), (0.0, False)])
def test_answers_of_a_server_are_held_against_what_it_generated(made: float, ok: bool) -> None:
    traces = [answered(16, 8, 8) for _ in range(4)]
    reasons, _ = reconcile(traces, [], {"engine": {"output_tokens": made}})
    assert (not reasons) is ok and all("from a cache before it" in reason for reason in reasons)


@pytest.mark.parametrize(("computed", "ok"), [(64.0, True), (40.0, False)])
def test_prompts_of_a_server_are_held_against_what_it_computed(computed: float, ok: bool) -> None:
    traces = [answered(16, 8, 8) for _ in range(4)]
    counters = {"engine": {"prompt_tokens_computed": computed}}
    assert (not reconcile(traces, [], counters)[0]) is ok
    hits = {**counters, "cache": {"cached_prompt_tokens": 24.0}}
    assert not reconcile(traces, [], hits)[0]


# ---- the clock and memory


def coarse(tick_s: float) -> Callable[[], float]:
    """A clock that is read a thousand times while it shows one value."""
    reads = 0

    def now() -> float:
        nonlocal reads
        reads += 1
        return tick_s * (reads // 1000)

    return now


def test_a_coarse_clock_is_found_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert clocks.tick_s() < 1e-3
    monkeypatch.setattr(clocks.Clock, "now", staticmethod(coarse(0.1)))
    tick = clocks.tick_s(patience_s=60.0)
    assert tick == pytest.approx(0.1)
    assert check_clock(tick, {"ITL": 16.7, "E2E": 5000.0, "TPOT": None}) == [
        "the clock moves every 100 ms, and a time below 20 of its ticks is no reading: median "
        "ITL of 16.7 ms"
    ]
    assert check_clock(1e-7, {"ITL": 0.0}) == [] == check_clock(None, {"ITL": 1.0})


def test_a_clock_that_stands_still_is_as_coarse_as_it_was_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(clocks.Clock, "now", staticmethod(lambda: 5.0))
    assert clocks.tick_s(patience_s=0.01) == 0.01


def test_weights_that_nothing_holds_are_named() -> None:
    record: dict[str, Any] = {
        "memory": {"weights": 64_000_000_000, "host_rss_peak": 350_000_000},
        "liveness": {},
    }
    (note,) = check_resident(record, {"kind": "cpu"})
    assert note.startswith("the engine says that its weights take 64 GB, and no more than 0.35 GB")
    assert not check_resident(record, {"kind": "gpu"})  # whose memory is not known
    assert not check_resident(record | {"memory": {"weights": 64}}, {"kind": "cpu"})
    away = record | {"liveness": {"parallel": {"backend": "ray"}}}
    assert not check_resident(away, {"kind": "cpu"})
    held = {**record["memory"], "device_process": 65_000_000_000}
    assert not check_resident(record | {"memory": held}, {"kind": "gpu"})
    assert check_resident(record | {"memory": held | {"device_process": 9}}, {"kind": "gpu"})
