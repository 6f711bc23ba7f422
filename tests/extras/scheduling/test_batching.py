"""Who may join a batch, by policy."""

from __future__ import annotations

import pytest

from minivllm.engine.request import Request
from minivllm.extras.scheduling.batching import Dynamic, Sequential, Static
from tests.engine.imaginary import make


def names(parts: object) -> list[str]:
    return [part.request.request_id for part in parts]  # type: ignore[attr-defined]


def test_sequential_runs_one_request_at_a_time() -> None:
    machine = make(Sequential(), blocks=16)
    for _ in range(3):
        machine.add([0] * 3, 3)
    order: list[Request] = []
    while machine.scheduler.has_unfinished:
        done = machine.step()
        assert len(machine.scheduler.running) <= 1
        order += done
    assert order == machine.requests


def test_static_lets_nobody_join_a_batch() -> None:
    machine = make(Static(max_num_seqs=2), blocks=16)
    for output in (2, 6, 2):
        machine.add([0] * 3, output)
    sizes = []
    while machine.scheduler.has_unfinished:
        plan = machine.scheduler.plan()
        sizes.append(names(plan.scheduled))
        machine.carry_out(plan)
    assert sizes == [["0.0", "1.0"]] * 2 + [["1.0"]] * 4 + [["2.0"]] * 2


def test_static_starts_a_batch_together_though_one_step_cannot_hold_its_prompts() -> None:
    machine = make(Static(max_num_seqs=3, max_num_batched_tokens=4), blocks=32)
    for _ in range(3):
        machine.add([0] * 4, 6)
    machine.step()
    assert len(machine.scheduler.running) == 3


def test_grouping_by_length_puts_long_outputs_together() -> None:
    machine = make(Static(max_num_seqs=2, group_by_length=True), blocks=32)
    for output in (9, 2, 8, 3):
        machine.add([0] * 3, output)
    first = machine.scheduler.plan()
    assert names(first.scheduled) == ["0.0", "2.0"]


def test_dynamic_waits_for_a_full_batch_but_not_for_long() -> None:
    machine = make(Dynamic(max_num_seqs=2, max_wait_ms=10), blocks=32)
    machine.add([0] * 3, 2)
    plan = machine.scheduler.plan()
    assert not plan.scheduled
    assert plan.next_poll_s == pytest.approx(0.01)
    machine.clock.time_s = 0.01
    assert names(machine.scheduler.plan().scheduled) == ["0.0"]
    full = make(Dynamic(max_num_seqs=2, max_wait_ms=1e6), blocks=32)
    full.add([0] * 3, 2)
    full.add([0] * 3, 2)
    assert names(full.scheduler.plan().scheduled) == ["0.0", "1.0"]
    alone = make(Dynamic(max_num_seqs=2, max_wait_ms=1e6), blocks=32)
    alone.add([0] * 3, 2, n=2)
    assert names(alone.scheduler.plan().scheduled) == ["0.0"]
