"""The scheduler under arbitrary requests, budgets and cache sizes."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from minivllm.cache.manager import CacheLayout, CacheManager
from minivllm.engine.batching import BatchingPolicy, Continuous, Sequential
from minivllm.engine.events import BlocksChanged, EventBus, StateChanged, StepPlanned
from minivllm.engine.params import SamplingParams
from minivllm.engine.request import Request, RequestState
from minivllm.engine.scheduler import Scheduler
from minivllm.errors import BadInput


def make(policy: BatchingPolicy, blocks: int = 8, block_size: int = 4) -> Scheduler:
    return Scheduler(policy, CacheManager(CacheLayout(block_size, blocks + 1)), EventBus())


def request(name: str, prompt: int, output: int) -> Request:
    return Request(name, list(range(prompt)), SamplingParams(), max_num_tokens=prompt + output, seed=0)


def step(scheduler: Scheduler) -> list[Request]:
    """Run one step with an imaginary model; the requests that ended."""
    plan = scheduler.plan()
    done = []
    for part in plan.scheduled:
        samples = part.samples
        scheduler.computed(part)
        if samples and part.request.append(7) is not None:
            scheduler.finish(part.request, "length")
            done.append(part.request)
    return done


class SchedulerMachine(RuleBasedStateMachine):
    """Requests come and are aborted at any time, while steps are taken."""

    @initialize(
        max_num_seqs=st.integers(1, 4),
        budget=st.integers(1, 12),
        blocks=st.integers(1, 8),
        block_size=st.sampled_from([1, 3, 4]),
    )
    def start(self, max_num_seqs: int, budget: int, blocks: int, block_size: int) -> None:
        self.policy = Continuous(max_num_seqs, budget)
        self.scheduler = make(self.policy, blocks, block_size)
        self.admitted: list[Request] = []
        self.idle_steps = 0

    @rule(prompt=st.integers(1, 12), output=st.integers(1, 8))
    def add(self, prompt: int, output: int) -> None:
        new = request(str(len(self.admitted)), prompt, output)
        if prompt + output - 1 > self.scheduler.cache.capacity_tokens:
            with pytest.raises(BadInput, match="KV cache holds"):
                self.scheduler.add(new)
        else:
            self.scheduler.add(new)
            self.admitted.append(new)

    @precondition(lambda self: any(r.state is not RequestState.DONE for r in self.admitted))
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        open_ = [r for r in self.admitted if r.state is not RequestState.DONE]
        self.scheduler.finish(data.draw(st.sampled_from(open_)), "abort")

    @rule()
    def advance(self) -> None:
        had_work = self.scheduler.has_unfinished
        plan = self.scheduler.plan()
        assert plan.num_tokens <= self.policy.max_num_batched_tokens
        assert len(plan.scheduled) <= self.policy.max_num_seqs
        assert bool(plan.scheduled) == had_work, "work is waiting and nothing is done"
        assert len({part.request.request_id for part in plan.scheduled}) == len(plan.scheduled)
        for part in plan.scheduled:
            assert part.num_tokens >= 1
            assert part.start == part.request.num_computed_tokens
            table = part.request.block_table
            assert len(table) * self.scheduler.cache.block_size >= part.end
            assert part.request not in plan.preempted
        for part in plan.scheduled:
            samples = part.samples
            self.scheduler.computed(part)
            if samples and part.request.append(7) is not None:
                self.scheduler.finish(part.request, "length")

    @invariant()
    def nothing_is_lost(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        self.scheduler.cache.pool.check_integrity(r.block_table for r in self.admitted)
        open_ = {r.request_id for r in self.admitted if r.state is not RequestState.DONE}
        known = [r.request_id for r in (*self.scheduler.waiting, *self.scheduler.running)]
        assert sorted(known) == sorted(open_)
        for r in self.admitted:
            assert r.num_computed_tokens <= r.num_tokens <= r.max_num_tokens

    def teardown(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        # Every admitted request ends, and the cache is empty again.
        for _ in range(10_000):
            if not self.scheduler.has_unfinished:
                break
            step(self.scheduler)
        assert not self.scheduler.has_unfinished
        assert self.scheduler.cache.pool.num_used == 0


TestScheduler = SchedulerMachine.TestCase


def test_chunked_prefill_shares_a_step_with_decoding() -> None:
    scheduler = make(Continuous(max_num_seqs=4, max_num_batched_tokens=4), blocks=16)
    scheduler.add(request("a", 2, 5))
    step(scheduler)
    scheduler.add(request("b", 8, 2))
    plan = scheduler.plan()
    assert [(p.request.request_id, p.start, p.num_tokens) for p in plan.scheduled] == [
        ("a", 2, 1),
        ("b", 0, 3),
    ]


def test_without_chunking_a_prompt_waits_for_a_step_of_its_own() -> None:
    scheduler = make(Continuous(4, max_num_batched_tokens=8, chunked_prefill=False), blocks=16)
    scheduler.add(request("a", 5, 3))
    scheduler.add(request("b", 6, 2))
    assert [p.request.request_id for p in scheduler.plan().scheduled] == ["a"]
    with pytest.raises(BadInput, match="chunked_prefill=true"):
        scheduler.add(request("c", 9, 2))


def test_sequential_runs_one_request_at_a_time() -> None:
    scheduler = make(Sequential(), blocks=16)
    for name in "abc":
        scheduler.add(request(name, 3, 3))
    order = []
    while scheduler.has_unfinished:
        assert len(scheduler.plan().scheduled) == 1
        order += [r.request_id for r in step(scheduler)]
    assert order == ["a", "b", "c"]


def test_preemption_takes_the_last_and_gives_it_the_front_of_the_queue() -> None:
    scheduler = make(Continuous(4, 64), blocks=4, block_size=2)
    for name in ("a", "b"):
        scheduler.add(request(name, 3, 5))
    scheduler.add(request("late", 2, 2))
    preempted: list[str] = []
    finished: list[str] = []
    while scheduler.has_unfinished:
        plan = scheduler.plan()
        preempted += [r.request_id for r in plan.preempted]
        for part in plan.scheduled:
            samples = part.samples
            scheduler.computed(part)
            if samples and part.request.append(7):
                scheduler.finish(part.request, "length")
                finished.append(part.request.request_id)
    assert preempted[0] == "b"
    assert finished == ["a", "b", "late"]
    assert scheduler.num_preemptions == len(preempted)


@settings(deadline=None, max_examples=20)
@given(st.lists(st.tuples(st.integers(1, 20), st.integers(1, 6)), min_size=1, max_size=12))
def test_requests_start_in_order_of_arrival(lengths: list[tuple[int, int]]) -> None:
    scheduler = make(Continuous(2, 16), blocks=8)
    events: list[object] = []
    scheduler.events.subscribe(events.append)
    for index, (prompt, output) in enumerate(lengths):
        scheduler.add(request(str(index), prompt, output))
    while scheduler.has_unfinished:
        step(scheduler)
    started = [
        e.request_id for e in events if isinstance(e, StateChanged) and e.state is RequestState.PREFILL
    ]
    assert list(dict.fromkeys(started)) == [str(i) for i in range(len(lengths))]
    assert any(isinstance(e, StepPlanned) for e in events)
    assert any(isinstance(e, BlocksChanged) and e.used > 0 for e in events)


def test_a_bus_without_listeners_is_false() -> None:
    bus = EventBus()
    assert not bus
    stop = bus.subscribe(lambda event: None)
    assert bus
    stop()
    assert not bus
