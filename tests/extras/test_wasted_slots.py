"""Slots of the KV cache that are allocated and empty."""

from __future__ import annotations

from minivllm.cache.eviction.policies import make_eviction
from minivllm.cache.options import PagedOptions
from minivllm.engine.batching import Continuous
from minivllm.extras.wasted_slots import wasted_slots
from tests.engine.imaginary import make


def test_waste_counts_a_shared_block_once_and_an_evicted_one_not() -> None:
    knobs = {"eviction_budget": 24, "eviction_sinks": 4, "eviction_window": 8}
    eviction = make_eviction(PagedOptions(block_size=4, eviction="streaming", **knobs))
    machine = make(Continuous(4, 64), blocks=40, eviction=eviction)
    cache = machine.scheduler.cache

    def waste() -> tuple[int, int]:
        return wasted_slots(cache, machine.scheduler.running), cache.pool.num_used

    machine.add([0] * 6, 10, n=3)
    machine.carry_out(machine.scheduler.plan())
    assert waste() == (2, 2)  # two blocks for all three
    machine.carry_out(machine.scheduler.plan())
    assert waste() == (3, 4)  # one full, shared; three of their own
    machine.run()
    assert waste() == (0, 0)
    machine.add([0] * 30, 10)
    machine.step()
    machine.step()
    assert waste() == (2, 5)  # 12 stayed of 24, and six more
