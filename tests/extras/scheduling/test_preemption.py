"""What a preempted request computes again, by strategy."""

from __future__ import annotations

from minivllm.engine.batching import Continuous
from minivllm.extras.scheduling.batching import Static
from tests.engine.imaginary import make


def test_swapping_computes_nothing_twice() -> None:
    def computed(preemption: str) -> tuple[int, int]:
        machine = make(Continuous(4, 64, preemption=preemption, watermark=0), 4, 2, host_slots=8)
        for _ in range(2):
            machine.add([0] * 3, 5)
        tokens = 0
        while machine.scheduler.has_unfinished:
            plan = machine.scheduler.plan()
            tokens += plan.num_tokens
            machine.carry_out(plan)
        assert machine.scheduler.num_preemptions or preemption == "reserve"
        return tokens, machine.scheduler.cache.counters.blocks_swapped_in

    once = 2 * (3 + 5 - 1)
    assert computed("swap")[0] == once
    assert computed("swap")[1] > 0
    assert computed("reserve") == (once, 0)
    assert computed("recompute")[0] > once


def test_a_request_that_joined_without_tokens_may_be_swapped_out_again() -> None:
    machine = make(
        Static(3, 5, preemption="swap", watermark=0), blocks=6, block_size=2, host_slots=12
    )
    for _ in range(6):
        machine.add([0] * 4, 7)
    machine.run()
    machine.check()
    assert machine.scheduler.cache.counters.blocks_swapped_in > 0
