"""The scheduler under arbitrary requests, policies, budgets and cache sizes."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from minivllm.cache.eviction.policies import make_eviction
from minivllm.cache.options import PagedOptions
from minivllm.engine.batching import BatchingPolicy, Continuous
from minivllm.engine.events import KINDS, EventBus, StateChanged, StepEnded, StepPlanned
from minivllm.engine.request import Request, RequestState
from minivllm.engine.step import StepPlan
from minivllm.errors import BadInput
from minivllm.extras.scheduling.batching import Dynamic, Sequential, Static
from tests.engine.imaginary import hypotheses, make


@st.composite
def policies(draw: st.DrawFn) -> BatchingPolicy:
    """Any policy with any of its knobs."""
    seqs, budget = draw(st.integers(1, 4)), draw(st.integers(1, 12))
    common = {
        "preemption": draw(st.sampled_from(["recompute", "swap", "reserve"])),
        "watermark": draw(st.sampled_from([0.0, 0.01, 0.3])),
        "shed": draw(st.booleans()),
        "aging_s": draw(st.sampled_from([0.005, 60.0])),
    }
    kind = draw(st.sampled_from(["sequential", "static", "dynamic", "continuous"]))
    if kind == "sequential":
        return Sequential(budget, shed=common["shed"])  # type: ignore[arg-type]
    if kind == "continuous":
        order = {"prefill_first": draw(st.booleans()), "fair_prefill": draw(st.booleans())}
        return Continuous(seqs, budget, **order, **common)  # type: ignore[arg-type]
    common["group_by_length"] = draw(st.booleans())
    if kind == "static":
        return Static(seqs, budget, **common)  # type: ignore[arg-type]
    return Dynamic(seqs, budget, max_wait_ms=draw(st.sampled_from([0.0, 3.0])), **common)  # type: ignore[arg-type]


class SchedulerMachine(RuleBasedStateMachine):
    """Requests come and are aborted at any time, while steps are taken."""

    @initialize(
        policy=policies(),
        blocks=st.integers(1, 8),
        block_size=st.sampled_from([1, 3, 4]),
        prefix_caching=st.booleans(),
        retains=st.booleans(),
        host_slots=st.integers(0, 6),
        offload_slots=st.sampled_from([0, 1, 3, 9]),
        disk_records=st.sampled_from([0, 1, 3, 9]),
        eviction=st.sampled_from(["none", "none", "streaming", "h2o", "snapkv"]),
        kept=st.tuples(st.integers(0, 1), st.integers(1, 2), st.integers(1, 3)),
    )
    def start(
        self,
        policy: BatchingPolicy,
        blocks: int,
        block_size: int,
        prefix_caching: bool,
        retains: bool,
        host_slots: int,
        offload_slots: int,
        disk_records: int,
        eviction: str,
        kept: tuple[int, int, int],
    ) -> None:
        self.policy = policy
        if policy.preemption != "swap" or not retains:  # cache=none refuses to swap
            host_slots = 0
        sinks, window, between = (count * block_size for count in kept)
        total = sinks + window + between
        prefix_caching = prefix_caching and retains and eviction not in ("h2o", "snapkv")
        self.machine = make(
            policy,
            blocks,
            block_size,
            prefix_caching=prefix_caching,
            retains_kv=retains,
            host_slots=host_slots,
            offload_slots=offload_slots,
            disk_records=disk_records,
            eviction=make_eviction(
                PagedOptions(
                    block_size=block_size,
                    prefix_caching=prefix_caching,
                    eviction=eviction,
                    eviction_budget=total,
                    eviction_sinks=sinks,
                    eviction_window=window,
                )
            )
            if retains and eviction != "none"
            else None,
        )

    @rule(
        prompt=st.lists(st.integers(0, 2), min_size=1, max_size=12),
        output=st.integers(1, 8),
        n=st.sampled_from([1, 1, 1, 2, 3]),
        priority=st.integers(-1, 1),
        deadline_ms=st.sampled_from([None, None, 1.0, 20.0]),
    )
    def add(
        self, prompt: list[int], output: int, n: int, priority: int, deadline_ms: float | None
    ) -> None:
        scheduler, longest = self.machine.scheduler, len(prompt) + output - 1
        held = scheduler.cache.footprint(longest)
        if (
            held > scheduler.cache.capacity_tokens
            or (not scheduler.chunks and held < longest)
            or (not scheduler.chunks and longest > self.policy.max_num_batched_tokens)
            or n > self.policy.max_num_samples
            or (
                self.policy.preemption == "reserve"
                and n * -(-held // scheduler.cache.layout.block_size)
                > scheduler.cache.pool.num_usable
            )
        ):
            with pytest.raises(BadInput):
                self.machine.add(prompt, output, n, priority=priority, deadline_ms=deadline_ms)
        else:
            self.machine.add(prompt, output, n, priority=priority, deadline_ms=deadline_ms)

    @rule(
        prompt=st.lists(st.integers(0, 2), min_size=1, max_size=12),
        output=st.integers(1, 8),
        width=st.integers(2, 3),
        deadline_ms=st.sampled_from([None, None, 20.0]),
    )
    def add_beams(
        self, prompt: list[int], output: int, width: int, deadline_ms: float | None
    ) -> None:
        scheduler, longest = self.machine.scheduler, len(prompt) + output - 1
        size, retains = scheduler.cache.layout.block_size, scheduler.cache.layout.retains_kv
        held = scheduler.cache.footprint(longest)
        needed = -(-held // size)
        if self.policy.preemption == "reserve":
            needed *= width
        elif retains:
            needed += (width - 1) * (needed - (len(prompt) // size if held == longest else 0))
        if (
            needed > scheduler.cache.pool.num_usable
            or (not scheduler.chunks and longest > self.policy.max_num_batched_tokens)
            or width > self.policy.max_num_samples
        ):
            with pytest.raises(BadInput):
                self.machine.add_beams(prompt, output, width, deadline_ms=deadline_ms)
        else:
            self.machine.add_beams(prompt, output, width, deadline_ms=deadline_ms)

    @precondition(lambda self: self.open())
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(self.open()))
        for one in (*request.unstarted, request):
            self.machine.scheduler.finish(one, "abort")

    @rule(count=st.integers(1, 3), broken=st.sampled_from([False, False, False, True]))
    def work_of_the_disk(self, count: int, broken: bool) -> None:
        self.machine.disk.work(count, broken)

    @precondition(lambda self: not self.open())
    @rule()
    def forget_prefixes(self) -> None:
        self.machine.scheduler.cache.reset_prefix_cache()

    @rule()
    def advance(self) -> None:
        scheduler, clock = self.machine.scheduler, self.machine.clock
        had_work = scheduler.has_unfinished
        plan = scheduler.plan()
        assert plan.num_tokens == sum(part.num_tokens for part in plan.scheduled)
        assert plan.num_prefill_tokens == sum(
            part.num_tokens for part in plan.scheduled if part.prefill
        )
        assert plan.num_tokens <= self.policy.max_num_batched_tokens
        assert len(plan.scheduled) <= max(
            self.policy.max_num_seqs, 3 * isinstance(self.policy, Sequential)
        )
        busy = plan.scheduled or plan.shed or plan.preempted or plan.next_poll_s is not None
        assert bool(busy) == had_work, "work is waiting and nothing is done"
        assert len({part.request.request_id for part in plan.scheduled}) == len(plan.scheduled)
        for part in plan.scheduled:
            assert part.num_tokens >= 1
            assert part.start == part.request.num_computed_tokens
            assert part.request not in [one.request for one in plan.preempted]
        if self.policy.preemption == "reserve":
            assert not plan.preempted
        self.machine.carry_out(plan)
        clock.time_s = max(clock.time_s + 0.001, plan.next_poll_s or 0.0)

    def open(self) -> list[Request]:
        return [r for r in self.machine.requests if r.state is not RequestState.DONE]

    @invariant()
    def nothing_is_lost(self) -> None:
        if not hasattr(self, "machine"):
            return
        self.machine.check()
        for r in self.machine.requests:
            assert r.num_computed_tokens <= r.num_tokens <= r.max_num_tokens
            eviction = self.machine.scheduler.cache.layout.eviction
            assert eviction is None or len(r.cache.block_table.blocks) <= eviction.budget

    def teardown(self) -> None:
        if not hasattr(self, "machine"):
            return
        # Every admitted request ends, and the cache is empty again.
        self.machine.run()
        for first in (r for r in self.machine.requests if r.is_joint and r is r.joint_members[0]):
            if first.finish_reason == "stop":
                output = first.max_num_tokens - first.num_prompt_tokens
                alone = self.machine.run_alone(
                    first.token_ids[: first.num_prompt_tokens], output, len(first.joint_members)
                )
                assert hypotheses(first) == alone
        cache = self.machine.scheduler.cache
        assert cache.pool.num_used == 0
        assert cache.swap.num_free == cache.layout.host_slots


TestScheduler = SchedulerMachine.TestCase


def names(parts: object) -> list[str]:
    return [part.request.request_id for part in parts]  # type: ignore[attr-defined]


def test_chunked_prefill_shares_a_step_with_decoding() -> None:
    machine = make(Continuous(max_num_seqs=4, max_num_batched_tokens=4), blocks=16)
    machine.add([0] * 2, 5)
    machine.step()
    machine.add([0] * 8, 2)
    plan = machine.scheduler.plan()
    assert [(p.request.request_id, p.start, p.num_tokens) for p in plan.scheduled] == [
        ("0.0", 2, 1),
        ("1.0", 0, 3),
    ]


def test_prefill_first_serves_the_prompt_before_the_decoding_request() -> None:
    machine = make(Continuous(4, max_num_batched_tokens=4, prefill_first=True), blocks=16)
    machine.add([0] * 2, 5)
    machine.step()
    machine.add([0] * 8, 2)
    assert names(machine.scheduler.plan().scheduled) == ["1.0"]


def test_fair_prefill_shares_the_step_between_prompts() -> None:
    machine = make(Continuous(4, max_num_batched_tokens=9, fair_prefill=True), blocks=32)
    for _ in range(3):
        machine.add([0] * 8, 2)
    assert [part.num_tokens for part in machine.scheduler.plan().scheduled] == [3, 3, 3]


def test_without_chunking_a_prompt_waits_for_a_step_of_its_own() -> None:
    machine = make(Continuous(4, max_num_batched_tokens=8, chunked_prefill=False), blocks=16)
    machine.add([0] * 5, 3)
    machine.add([0] * 6, 2)
    assert names(machine.scheduler.plan().scheduled) == ["0.0"]
    with pytest.raises(BadInput, match="chunked_prefill=true"):
        machine.add([0] * 9, 2)


def test_a_request_starts_with_the_first_step_that_computes_some_of_it() -> None:
    """Not when it joins the batch: what it waits from then on is waiting, too."""
    machine = make(Static(max_num_seqs=3, max_num_batched_tokens=4), blocks=32)
    events: list[object] = []
    machine.scheduler.events.subscribe(events.append)
    for _ in range(3):
        machine.add([0] * 4, 6)
    for time_s in (1.0, 2.0, 3.0, 4.0):
        machine.clock.time_s = time_s
        machine.step()
    started = [
        (event.request.request_id, event.time_s)
        for event in events
        if isinstance(event, StateChanged) and event.state is RequestState.PREFILL
    ]
    assert started == [("0.0", 1.0), ("1.0", 2.0), ("2.0", 3.0)]


def test_requests_that_have_left_are_not_kept_in_line() -> None:
    machine = make(Static(max_num_seqs=2), blocks=32)
    for _ in range(6):
        machine.add([0] * 3, 2)
    while machine.scheduler.has_unfinished:
        machine.step()
    assert not machine.scheduler.waiting._heap


def test_the_more_urgent_priority_is_served_first_until_the_other_has_waited_long_enough() -> None:
    machine = make(Continuous(max_num_seqs=1, aging_s=1.0), blocks=32)
    machine.add([0], 1, priority=1)
    machine.add([0], 1, priority=0)
    assert [r.request_id for r in machine.run()] == ["1.0", "0.0"]
    machine.add([0], 1, priority=1)
    machine.clock.time_s += 1.5
    machine.add([0], 1, priority=0)
    assert [r.request_id for r in machine.run()] == ["2.0", "3.0"]


def test_among_equals_the_earliest_deadline_is_served_first() -> None:
    machine = make(Continuous(max_num_seqs=1), blocks=32)
    for deadline in (None, 900.0, 300.0):
        machine.add([0], 1, deadline_ms=deadline)
    assert [r.request_id for r in machine.run()] == ["2.0", "1.0", "0.0"]


def test_preemption_takes_the_last_and_gives_it_the_front_of_the_queue() -> None:
    machine = make(Continuous(4, 64, watermark=0), blocks=4, block_size=2)
    for _ in range(2):
        machine.add([0] * 3, 5)
    machine.add([0] * 2, 2)
    preempted: list[str] = []
    finished: list[str] = []
    while machine.scheduler.has_unfinished:
        plan = machine.scheduler.plan()
        preempted += [one.request.request_id for one in plan.preempted]
        finished += [r.request_id for r in machine.carry_out(plan)]
    assert preempted[0] == "1.0"
    assert finished == ["0.0", "1.0", "2.0"]
    assert machine.scheduler.num_preemptions == len(preempted)


def test_a_watermark_keeps_newcomers_from_taking_the_last_blocks() -> None:
    def running(watermark: float) -> int:
        machine = make(Continuous(8, 64, watermark=watermark), blocks=10)
        for _ in range(4):
            machine.add([0] * 11, 4)
        machine.step()
        return len(machine.scheduler.running)

    assert (running(0.0), running(0.2)) == (3, 2)


def test_a_known_prefix_is_not_computed_again() -> None:
    machine = make(Continuous(4, 64), blocks=16, prefix_caching=True)
    prompt = [1, 2, 3, 4, 5, 6, 7, 8, 9]
    machine.add(prompt, 1)
    machine.run()
    machine.add(prompt, 1)
    (part,) = machine.scheduler.plan().scheduled
    assert (part.start, part.num_tokens) == (8, 1)
    machine.add([1, 2, 3, 4, 0, 0], 1)
    second = machine.scheduler.plan().scheduled[-1]
    assert (second.start, second.num_tokens) == (4, 2)
    assert machine.scheduler.cache.counters.prefix_tokens_reused == 12


def test_a_hit_never_covers_the_whole_prompt() -> None:
    machine = make(Continuous(4, 64), blocks=16, prefix_caching=True)
    for _ in range(2):
        machine.add([1, 2, 3, 4], 1)
        (part,) = machine.scheduler.plan().scheduled
        assert (part.start, part.num_tokens) == (0, 4)
        machine.carry_out(machine.scheduler.plan())
    machine.add([1, 2, 3, 4], 1)


def test_samples_of_one_prompt_compute_it_once() -> None:
    machine = make(Continuous(8, 64), blocks=32)
    machine.add([0] * 6, 5, n=4)
    tokens = 0
    while machine.scheduler.has_unfinished:
        plan = machine.scheduler.plan()
        tokens += plan.num_tokens
        machine.carry_out(plan)
    assert tokens == 6 + 4 * 4
    counters = machine.scheduler.cache.counters
    assert machine.scheduler.num_forks == 3
    assert counters.blocks_copied == 3  # the last to write keeps the block they shared
    assert counters.blocks_shared == 3 * 2


def test_more_samples_than_sequences_are_refused() -> None:
    with pytest.raises(BadInput, match="max_num_seqs=2"):
        make(Continuous(2)).add([0], 1, n=3)


@settings(deadline=None, max_examples=20)
@given(st.lists(st.tuples(st.integers(1, 20), st.integers(1, 6)), min_size=1, max_size=12))
def test_requests_start_in_order_of_arrival(lengths: list[tuple[int, int]]) -> None:
    machine = make(Continuous(2, 16), blocks=8)
    events: list[object] = []
    machine.scheduler.events.subscribe(events.append)
    for prompt, output in lengths:
        machine.add([0] * prompt, output)
    machine.run()
    started = [
        e.request.request_id
        for e in events
        if isinstance(e, StateChanged) and e.state is RequestState.PREFILL
    ]
    assert list(dict.fromkeys(started)) == [r.request_id for r in machine.requests]
    planned = [e.plan for e in events if isinstance(e, StepPlanned)]
    assert sum(plan.num_tokens for plan in planned) >= sum(prompt for prompt, _ in lengths)


def test_a_bus_says_who_listens_to_what() -> None:
    bus, all_of_them, some = EventBus(), list[object](), list[object]()
    assert not any(bus.listeners[kind] for kind in KINDS)
    stop = bus.subscribe(some.append, StepEnded)
    assert [kind for kind in KINDS if bus.listeners[kind]] == [StepEnded]
    stop_all = bus.subscribe(all_of_them.append)
    plan, request = StepPlan(()), make(Continuous(1)).request([0], 1)
    told = [StepEnded(0.0, plan), StateChanged(0.0, request, RequestState.DONE)]
    for event in told:
        bus.emit(event)
    assert (some, all_of_them) == (told[:1], told)
    stop()
    stop_all()
    assert not any(bus.listeners[kind] for kind in KINDS)


def test_each_knob_counts_its_work() -> None:
    """Counters that the report takes for a knob's sign of life: at rest without it, moving with
    it."""

    def counted(policy: BatchingPolicy, counter: str, blocks: int = 10) -> int:
        machine = make(policy, blocks)
        for output in (9, 2, 8, 3):
            machine.add([0] * 7, output)
        machine.step()
        machine.add([0] * 7, 3, priority=-1)
        machine.run()
        return int(getattr(machine.scheduler, counter))

    assert counted(Continuous(2, 64), "num_overtaken") > 0  # by priority
    assert counted(Continuous(2, 64, aging_s=1e-6), "num_overtaken") == 0
    assert counted(Continuous(4, 8), "num_deferred") == 0
    assert counted(Continuous(4, 8, prefill_first=True), "num_deferred") > 0
    assert counted(Continuous(4, 64, watermark=0.5), "num_held") > counted(
        Continuous(4, 64, watermark=0), "num_held"
    )
    assert counted(Dynamic(8, max_wait_ms=5), "num_waits") > 0
    assert counted(Continuous(4, 4), "num_chunks") > 0
    assert counted(Continuous(4, 64), "num_chunks") == 0
