"""A prefix cache that should be cold: what prompts share is no warmth, what a server has kept
is."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minivllm.bench.driver import drive, warm_up
from minivllm.bench.metrics.metrics import compute
from minivllm.bench.metrics.prefix_sharing import (
    PrefixTree,
    check_cold,
    common,
    shareable_tokens,
)
from minivllm.bench.metrics.request_trace import RequestTrace
from minivllm.bench.metrics.validity import Evidence, check
from minivllm.bench.workloads.arrivals import Concurrency
from minivllm.bench.workloads.lazy_prompt import JoinedPrompt, LazyPrompt
from minivllm.bench.workloads.multi_turn import MultiTurn
from minivllm.bench.workloads.workload import Workload, WorkloadRequest
from minivllm.engine.options import SamplingParams
from tests.bench.scripted import ScriptedClock, ScriptedEngine


def made(*prompts: tuple[int, ...]) -> Workload:
    return Workload(
        tuple(WorkloadRequest(f"r{i}", prompt, 2, True) for i, prompt in enumerate(prompts))
    )


@given(
    st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6).map(tuple), min_size=1, max_size=6)
)
def test_what_prompts_share_is_what_each_has_with_its_nearest(
    prompts: list[tuple[int, ...]],
) -> None:
    expected = sum(
        max((common(prompt, other) for j, other in enumerate(prompts) if j != i), default=0)
        for i, prompt in enumerate(prompts)
    )
    assert shareable_tokens(made(*prompts)) == expected


def test_what_is_known_by_positions_is_shared_by_positions() -> None:
    runs = [(range(0, 50),), (range(0, 50), range(90, 99)), (range(7, 9),), (range(0, 20),)]
    work = Workload(
        tuple(
            WorkloadRequest(f"r{i}", LazyPrompt(each, 99, 0), 1, True)
            for i, each in enumerate(runs)
        )
    )
    assert shareable_tokens(work) == shareable_tokens(Workload(work.requests[::-1])) == 50 + 20


def test_turns_before_are_shared_by_right() -> None:
    work = MultiTurn(1, 3, 4, 5).generate(None, 1000, 2048, 0)
    assert shareable_tokens(work) == 0 + (4 + 5) + 2 * (4 + 5)


@pytest.mark.parametrize(("cached", "warm"), [(0, False), (200, False), (201, False), (400, True)])
def test_more_than_prompts_share_was_kept_from_before(cached: int, warm: bool) -> None:
    work = made((*range(100), 7), (*range(100), 8), tuple(range(500, 699)))
    traces = [RequestTrace("r", 401, 0.0)]
    notes = check_cold(work, {"cache": {"cached_prompt_tokens": float(cached)}}, traces)
    assert bool(notes) is warm
    assert notes == check_cold(work, {"cache": {"prefix_tokens_reused": float(cached)}}, traces)
    traces[0].cached_tokens = cached  # of an engine that keeps no counter of it
    assert notes == check_cold(work, {}, traces)
    if warm:
        assert (
            "400 of 401 prompt tokens came from it, and prompts share at most 200 with each "
            "other" in notes[0]
        )


@pytest.mark.parametrize(
    ("group", "counter", "value"),
    [("batching", "preemptions", 1.0), ("parallel", "tokens_handed_over", 400.0)],
)
def test_what_a_request_finds_of_its_own_is_no_warmth(
    group: str, counter: str, value: float
) -> None:
    work = made(tuple(range(400)))
    traces = [RequestTrace("r0", 400, 0.0, cached_tokens=400)]
    assert check_cold(work, {}, traces)
    assert not check_cold(work, {group: {counter: value}}, traces)


def test_prompts_share_with_what_the_cache_was_primed_with() -> None:
    prompts, primed = made((1, 2, 3, 4), (9, 8)), made((1, 2, 3), (1, 2, 3, 4, 5))
    assert shareable_tokens(prompts) == 0
    assert shareable_tokens(Workload(prompts.requests, priming=primed.requests)) == 4


@pytest.mark.parametrize("cold", [True, False])
def test_a_warm_cache_is_noted_where_it_should_be_cold(cold: bool) -> None:
    work, clock = made((1, 2, 3), (4, 5, 6)), ScriptedClock()
    traces = drive(ScriptedEngine(clock), work, Concurrency(2), SamplingParams(), clock)
    liveness: dict[str, dict[str, Any]] = {"cache": {"cached_prompt_tokens": 6.0}}
    found = check(Evidence(traces, work, compute(traces, {}, 2), liveness=liveness, cold=cold))
    assert found.ok and any("prefix cache was not cold" in note for note in found.notes) is cold


def test_a_warm_up_may_keep_the_prompts_to_itself() -> None:
    work, clock = made((1, 2, 3), (4, 5, 6)), ScriptedClock()
    for others, first in ((False, [1, 2, 3]), (True, [3, 2, 1])):
        engine = ScriptedEngine(clock)
        warm_up(engine, work, Concurrency(2), SamplingParams(), clock, others=others)
        assert engine.submitted["warmup-0"][0] == first
        prompts = [tuple(prompt) for prompt, _ in engine.submitted.values()]
        pairs = itertools.product(prompts, (request.prompt_token_ids for request in work.requests))
        assert any(common(a, b) for a, b in pairs) is not others


# ---- the tree of prompts


@given(st.lists(st.lists(st.integers(0, 2), max_size=8), max_size=12))
def test_the_tree_knows_the_longest_beginning_of_any_prompt(prompts: list[list[int]]) -> None:
    tree = PrefixTree()
    for i, prompt in enumerate(prompts):
        longest = max((common(prompt, earlier) for earlier in prompts[:i]), default=0)
        assert tree.insert(prompt) == longest


@given(st.lists(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 5)), max_size=5), max_size=9))
def test_the_tree_compares_positions(pieces: list[list[tuple[int, int]]]) -> None:
    """Of stretches that begin at the same positions, however they are cut into runs."""
    tree, known = PrefixTree(), []
    for each in pieces:
        runs = tuple(range(10 * k, 10 * k + length) for k, length in each)
        prompt = [position for run in runs for position in run]
        longest = max((common(prompt, earlier) for earlier in known), default=0)
        assert tree.insert(LazyPrompt(runs, 9, 0)) == longest
        known.append(prompt)


def test_a_token_is_no_position() -> None:
    tree = PrefixTree()
    tree.insert(LazyPrompt((range(5, 9),), 9, 0))
    assert tree.insert((5, 6)) == 0
    assert tree.insert(JoinedPrompt((LazyPrompt((range(5, 7),), 9, 0), (1, 2)))) == 2
    assert tree.insert(JoinedPrompt((LazyPrompt((range(5, 7),), 9, 0), (1, 3)))) == 3
