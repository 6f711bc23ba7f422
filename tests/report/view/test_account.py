"""Where each request's time went, by hand and against the engine."""

from __future__ import annotations

import random
from functools import partial
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minivllm.cache.spec import CacheLayout
from minivllm.engine.batching import Continuous
from minivllm.engine.request import Request
from minivllm.engine.step import StepPlan
from minivllm.extras.observation.bundle import StepBundle
from minivllm.extras.observation.observer import StepObserver
from minivllm.report.view.account import MOST_ANSWERED, MOST_SERVED, Account
from minivllm.report.view.why import parts, sentence
from tests.engine.imaginary import make
from tests.report.view.recording import START, Timed, named, states, step


def by_part(account: Account, number: int) -> dict[str, float]:
    """Whole milliseconds by part."""
    return {part: round(ms, 6) for part, ms in account.lives[number].ms.items()}


def test_running_is_prefill_decode_stalled_and_between() -> None:
    account = Account.of(
        [
            START,
            step(
                0,
                0.010,
                0.020,
                new=[named(0, 0.004)],
                states=states((0, "waiting"), (0, "prefill")),
                scheduled=[[0, 0, 4, "budget"]],
                sizes=[[0, 6, 4]],
            ),
            step(
                1,
                0.021,
                0.030,
                states=states((0, "decode")),
                scheduled=[[0, 4, 2, "prefill"]],
                sizes=[[0, 7, 6]],
            ),
            {"gauges": {"time_s": 0.03, "memory_bytes": 1}},
            step(2, 0.032, 0.040),
            step(
                3,
                0.043,
                0.050,
                states=states((0, "done")),
                decoded=[0],
            ),
        ],
        keep_spans=True,
    )
    life = account.lives[0]
    assert by_part(account, 0) == {
        "queued": 6,
        "prefill": 19,
        "between": 6,
        "stalled": 8,
        "decode": 7,
    }
    assert life.end_s == 0.050 and sum(life.ms.values()) == pytest.approx(46)
    assert (life.num_tokens, life.num_computed) == (8, 7)
    assert life.steps == {"prefill": 2, "stalled": 1, "decode": 1}
    assert [(one.part, one.step) for one in life.spans] == [
        ("queued", None),
        ("prefill", 0),
        ("between", None),
        ("prefill", 1),
        ("between", None),
        ("stalled", 2),
        ("between", None),
        ("decode", 3),
    ]
    assert all(a.end_s == b.start_s for a, b in pairwise(life.spans))


@pytest.mark.parametrize(
    ("reason", "first", "second"),
    [
        ("seqs", ("queued", "seqs"), ("queued", "seqs")),
        ("budget", ("queued", "budget"), ("queued", "budget")),
        ("policy", ("queued", "policy"), ("queued", "policy")),
        ("preempted", ("queued", "preempted"), ("queued", "preempted")),
        ("blocks", ("blocks", "blocks"), ("blocks", "behind")),
        ("reserve", ("blocks", "reserve"), ("blocks", "behind")),
        ("disk", ("disk", None), ("queued", "disk")),
    ],
)
def test_waiting_is_for_the_reason_of_the_most_urgent_one(
    reason: str, first: tuple[str, str | None], second: tuple[str, str]
) -> None:
    """The gap after the step belongs to it, too."""
    account = Account.of(
        [
            START,
            step(
                0,
                0.0,
                0.010,
                new=[named(0, 0.0), named(1, 0.0)],
                states=states((0, "waiting"), (1, "waiting")),
                held=[0, reason, 3, 1, 2],
            ),
            step(1, 0.015, 0.020, states=states((0, "done"), (1, "done"))),
        ]
    )
    for number, (part, why) in enumerate((first, second)):
        assert by_part(account, number) == {part: 20}
        assert account.lives[number].reasons == ({why: pytest.approx(20)} if why else {})
    if reason == "blocks":
        assert "needed 3 with 1 free, of which 2 " in sentence(account.lives[0], account)


@pytest.mark.parametrize("swapped", [False, True])
def test_a_preemption_lasts_until_it_is_scheduled_again(swapped: bool) -> None:
    running = step(
        0,
        0.0,
        0.010,
        new=[named(0, 0.0)],
        states=states((0, "prefill"), (0, "decode")),
        scheduled=[[0, 0, 6, "prefill"]],
        sizes=[[0, 7, 6]],
    )
    computed = 6 if swapped else 0
    account = Account.of(
        [
            START,
            running,
            step(
                1,
                0.010,
                0.020,
                states=states((0, "preempted")),
                preempted=[[0, 5, swapped]],
                held=[0, "blocks", 2, 0, 0],
                sizes=[[0, 7, computed]],
            ),
            step(
                2,
                0.022,
                0.030,
                states=states((0, "prefill")),
                scheduled=[[0, computed, 4 - 3 * swapped, "prefill" if swapped else "budget"]],
            ),
        ]
    )
    where, again = ("swapped", "decode") if swapped else ("preempted", "recompute")
    assert by_part(account, 0) == {"prefill": 10, where: 12, again: 8}
    assert account.lives[0].end_s is None


def test_a_fork_has_lived_as_its_parent() -> None:
    account = Account.of(
        [
            START,
            step(
                0,
                0.010,
                0.020,
                new=[named(0, 0.0), named(1, 0.0, parent=0)],
                states=states((0, "decode"), (1, "decode")),
                scheduled=[[0, 0, 6, "prefill"]],
            ),
            step(1, 0.020, 0.025, decoded=[1]),
        ]
    )
    assert by_part(account, 0) == {"queued": 10, "prefill": 10, "stalled": 5}
    assert by_part(account, 1) == {"queued": 10, "prefill": 10, "decode": 5}


def test_time_before_the_whole_state_is_unseen() -> None:
    seen = {"new": [named(0, 0.0)], "states": states((0, "decode")), "sizes": [[0, 8, 7]]}
    account = Account.of(
        [
            {**START, "time_s": 0.010, "end_s": 0.010, **seen},
            step(0, 0.012, 0.020, decoded=[0]),
            {**START, "time_s": 0.050, "end_s": 0.050, **seen},
            {**START, "time_s": 0.060, "end_s": 0.060},
        ]
    )
    assert account.lives == {}
    account = Account.of(
        [
            {**START, "time_s": 0.010, "end_s": 0.010, **seen},
            step(0, 0.012, 0.020, decoded=[0]),
            {**START, "time_s": 0.050, "end_s": 0.050, **seen},
        ]
    )
    assert by_part(account, 0) == {"unseen": 40, "between": 2, "decode": 8}


@pytest.mark.parametrize("strategy", ["recompute", "swap", "reserve"])
def test_the_parts_of_each_request_sum_to_its_time(strategy: str) -> None:
    policy = Continuous(4, 8, watermark=0, preemption=strategy)
    machine = make(policy, blocks=10, host_slots=10)
    bundles: list[StepBundle] = []
    machine.observer.close()
    machine.observer = StepObserver(machine.scheduler, bundles.append)
    ends: dict[str, float] = {}
    carry_out = machine.carry_out

    def slowly(plan: StepPlan) -> list[Request]:
        machine.clock.time_s += 0.25
        ended = carry_out(plan)
        ends.update({one.request_id: machine.clock.time_s for one in ended})
        return ended

    machine.carry_out = slowly  # type: ignore[method-assign]
    for index in range(6):
        machine.add([index + 1] * (5 + index), 8)
        machine.clock.time_s += 0.5
    machine.run()
    account = Account.of(bundles)
    assert len(account.lives) == len(ends) == 6
    for life in account.lives.values():
        took = 1e3 * (ends[life.new.request_id] - life.new.arrival_s)
        assert sum(life.ms.values()) == pytest.approx(took)
    seen = {part for life in account.lives.values() for part in life.ms}
    assert {"queued", "blocks", "prefill", "decode", "between"} <= seen
    assert ({"preempted", "swapped"} & seen) == {
        "recompute": {"preempted"},
        "swap": {"swapped"},
        "reserve": set(),
    }[strategy]


@given(st.integers(0, 10_000), st.sampled_from(["recompute", "swap", "reserve"]))
@settings(max_examples=25)
def test_no_millisecond_is_lost_or_counted_twice(seed: int, strategy: str) -> None:
    """With samples, beams, aborts, and viewers that join in the middle."""
    rng = random.Random(seed)
    sizes = rng.choice([2, 4, 8]), rng.choice([4, 48])
    policy = Continuous(*sizes, watermark=0, preemption=strategy)
    machine = Timed(policy, CacheLayout(4, rng.choice([20, 40]), prefix_caching=True, host_slots=9))
    bundles: list[StepBundle] = []
    machine.observer.close()
    machine.observer = StepObserver(machine.scheduler, bundles.append)
    for _ in range(rng.randint(2, 8)):
        prompt = [rng.randrange(5) for _ in range(rng.randint(2, 14))]
        add = rng.choice([machine.add, machine.add, partial(machine.add, n=2), machine.add_beams])
        add(prompt, rng.randint(2, 8), *[2] * (add == machine.add_beams))
        for _ in range(rng.randint(0, 4)):
            machine.step()
        machine.clock.time_s += rng.random() / 100
        if rng.random() < 0.2:
            machine.scheduler.finish(rng.choice(machine.requests), "abort")
        if rng.random() < 0.1:
            machine.observer.tell_all()
    machine.run()
    machine.observer.flush()
    lives = Account.of(bundles, keep_spans=True).lives.values()
    assert lives
    for life in lives:
        assert life.end_s is not None
        took = 1e3 * (life.end_s - life.new.arrival_s)
        assert sum(life.ms.values()) == pytest.approx(took, abs=1e-6)
        assert all(a.end_s == b.start_s for a, b in pairwise(life.spans))


def test_a_request_of_http_is_accounted_for_from_its_call_to_the_end_of_its_answer() -> None:
    """The process of HTTP says when it came before the engine does, and at its end; here the last
    of that comes before the bundle of its last step, for another request after it."""
    first, other = ["r0", 0.001, 0.004], ["r1", 0.002, 0.004]
    items = [
        START,
        {"http": [*first, None]},
        {"http": [*other, None]},
        step(
            0,
            0.010,
            0.020,
            new=[named(0, 0.009), named(1, 0.009)],
            states=states((0, "decode"), (1, "decode")),
            scheduled=[[0, 0, 6, "prefill"], [1, 0, 6, "prefill"]],
        ),
        {"http": [*first, 0.034]},
        step(1, 0.020, 0.030, states=states((0, "done"), (1, "done")), decoded=[0, 1]),
        {"http": [*other, 0.033]},
        {"http": [*other, 0.050]},
        {"http": ["unknown", 0.0, 0.0, 1.0]},
    ]
    early = sorted(items, key=lambda one: "http" not in one)  # a short one: before any bundle of it
    for account in (Account.of(items), Account.of(early)):
        assert by_part(account, 0) == {"http": 3 + 4, "queued": 6, "prefill": 10, "decode": 10}
        assert by_part(account, 1) == {"http": 2 + 3, "queued": 6, "prefill": 10, "decode": 10}


def completion(number: int, name: str, arrival_s: float) -> list[object]:
    return [number, name, *named(number, arrival_s)[2:]]


def test_a_completion_that_is_forgotten_holds_up_no_other_of_its_answer() -> None:
    """One of two ends in bundles that the viewer has lost; the whole state then names the other."""
    both = [completion(0, "r0.0", 0.004), completion(1, "r0.1", 0.004)]
    running = states((0, "decode"), (1, "decode"))
    account = Account.of(
        [
            START,
            {"http": ["r0", 0.001, 0.004, None]},
            step(0, 0.010, 0.020, new=both, states=running),
            {**START, "time_s": 0.03, "end_s": 0.03, "new": both[:1], "states": running[:1]},
            step(1, 0.030, 0.040, states=states((0, "done")), decoded=[0]),
            {"http": ["r0", 0.001, 0.004, 0.045]},
        ]
    )
    assert by_part(account, 0)["http"] == 3 + 5
    assert not account._served


def test_requests_that_the_engine_never_names_push_out_none_that_runs() -> None:
    """Those of other replicas, for one."""
    account = Account.of([START, {"http": ["r0", 0.001, 0.004, None]}])
    account.take(step(0, 0.010, 0.020, new=[named(0, 0.004)], states=states((0, "decode"))))
    for number in range(MOST_SERVED + 1):
        for answered_s in (None, 0.021):
            account.take({"http": [f"other{number}", 0.02, 0.02, answered_s]})
    account.take(step(1, 0.020, 0.030, states=states((0, "done")), decoded=[0]))
    account.take({"http": ["r0", 0.001, 0.004, 0.037]})
    assert by_part(account, 0)["http"] == 3 + 7
    assert not account._served
    assert len(account._answered) == MOST_ANSWERED


def test_a_token_that_arrives_a_step_later_is_the_requests_own() -> None:
    """With overlapping steps: beside a step that is only others' and faster than they cost."""
    account = Account.of([START, step(0, 0.0, 0.1, new=[named(0, 0.0), named(1, 0.0)])])
    account.take(
        step(
            1,
            0.1,
            0.101,
            states=states((0, "decode"), (1, "decode")),
            scheduled=[[1, 0, 9, "prefill"]],
            sizes=[[0, 7, 6]],
        )
    )
    assert account.lives[0].beside["decode"].own == 1
    assert parts(account.lives[0], account)["decode"] > 0
