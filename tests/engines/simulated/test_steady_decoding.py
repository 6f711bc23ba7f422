"""Decode steps without a plan are those that the scheduler would have planned."""

from __future__ import annotations

from dataclasses import astuple
from functools import cache
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from minivllm.bench.workloads.lazy_prompt import LazyPrompt
from minivllm.engine.events import StepPlanned
from minivllm.engine.options import SamplingParams
from minivllm.engine.scheduler import Scheduler
from minivllm.engines.simulated.engine import SimulatedEngine
from tests.engines.simulated.test_engine import engine

SMALL = "cache.block_size=4"
KNOBS = (
    (SMALL,),
    (SMALL, "cache.prefix_caching=true"),
    (SMALL, "cache.prefix_caching=true", "cache.num_blocks=14"),
    (SMALL, "cache.num_blocks=14", "batching.preemption=swap"),
    (SMALL, "cache.num_blocks=16", "batching.preemption=reserve"),
    (SMALL, "batching.max_num_batched_tokens=6", "batching.max_num_seqs=3"),
    (SMALL, "batching=static", "batching.max_num_seqs=3"),
    (SMALL, "batching=sequential"),
    (SMALL, "cache.eviction=streaming", "cache.eviction_budget=12"),
    (SMALL, "speculative=ngram", "speculative.acceptance=0.6"),
    ("cache=contiguous",),
    ("cache=none",),
)
# What is done at each turn: a request of (first position, prompt tokens, output tokens), the end of
# an earlier one by its number, or a step.
ACTIONS = st.one_of(
    st.tuples(st.sampled_from((0, 400)), st.integers(1, 24), st.integers(1, 12)),
    st.integers(0, 5),
    *[st.none()] * 6,
)


@cache
def built(knobs: tuple[str, ...]) -> SimulatedEngine:
    return engine(*knobs)


def state(under_test: SimulatedEngine) -> tuple[Any, ...]:
    scheduler, kept = under_test.scheduler, under_test.cache
    requests = [*scheduler.running, *scheduler.waiting]
    kept.pool.check_integrity([request.cache.block_table for request in requests])
    return (
        under_test.clock.time,
        [
            (r.request_id, r.num_tokens, r.num_computed_tokens, r.cache.block_table.blocks)
            for r in scheduler.running
        ],
        {(block, node.tokens) for block, node in kept.prefix.by_block.items()},
        kept.pool.num_free,
        astuple(kept.counters),
    )


@given(st.sampled_from(KNOBS), st.lists(ACTIONS, min_size=8, max_size=60))
@settings(max_examples=120, deadline=None)
def test_steps_without_a_plan_are_those_of_the_scheduler(
    knobs: tuple[str, ...], actions: list[Any]
) -> None:
    known, planned = built(knobs).another(), built(knobs).another()
    # Somebody listens to plans, so that each step has one.
    planned.scheduler.events.subscribe(lambda event: None, StepPlanned)
    for number, action in enumerate(actions):
        outputs = []
        for under_test in (known, planned):
            if isinstance(action, tuple):
                first, length, wanted = action
                prompt: Any = LazyPrompt((range(first, first + length),), 50, 0)
                under_test.submit(f"r{number}", prompt, SamplingParams(max_tokens=wanted, seed=1))
            elif action is not None:
                under_test.abort(f"r{action}")
            else:
                outputs.append(under_test.poll())
        assert not outputs or outputs[0] == outputs[1]
        assert state(known) == state(planned)
    assert known.steps() == planned.steps() and known.liveness() == planned.liveness()


def test_most_decode_steps_need_no_plan(monkeypatch: Any) -> None:
    under_test, plans, plan = engine("cache.prefix_caching=true"), [], Scheduler.plan
    monkeypatch.setattr(Scheduler, "plan", lambda self: plans.append(1) or plan(self))
    for number in range(3):
        prompt: Any = LazyPrompt((range(40),), 50, 0)
        under_test.submit(f"r{number}", prompt, SamplingParams(max_tokens=30 + number))
    while under_test.num_unfinished:
        under_test.poll()
    assert under_test.liveness()["engine"]["steps"] == 32 and len(plans) == 1
