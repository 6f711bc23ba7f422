"""Swap space: requests go to host memory and come back whole."""

from __future__ import annotations

from minivllm.cache.manager import CacheManager
from minivllm.cache.prefix import CachedSequence
from minivllm.cache.spec import CacheLayout


def admitted(cache: CacheManager, num_tokens: int, computed: int = 0) -> CachedSequence:
    sequence = CachedSequence()
    assert cache.admit(sequence, num_tokens, computed, num_tokens)[0] == num_tokens - computed
    return sequence


def test_a_slot_is_free_only_after_the_step_that_reads_it() -> None:
    cache = CacheManager(CacheLayout(block_size=4, num_blocks=5, host_slots=2))
    sequence = admitted(cache, 8)
    blocks = list(sequence.block_table.blocks)
    assert cache.swap_out(sequence, 8)
    assert (cache.swap.num_free, cache.pool.num_used) == (0, 0)
    assert [block for block, _ in cache.take_transfers().saves] == blocks
    assert cache.admit(sequence, 9, 8, 9) == (1, 8)
    assert cache.swap.num_free == 0
    loads = cache.take_transfers().loads
    assert [block for _, block in loads] == sequence.block_table.blocks[:2]
    assert cache.swap.num_free == 2 and not any(cache.take_transfers())
    assert (cache.counters.blocks_swapped_out, cache.counters.blocks_swapped_in) == (2, 2)


def test_nothing_changes_where_host_memory_is_full() -> None:
    cache = CacheManager(CacheLayout(block_size=4, num_blocks=9, host_slots=2))
    large, small = admitted(cache, 12), admitted(cache, 4)
    assert not cache.swap_out(large, 12)
    assert len(large.block_table.blocks) == 3 and not any(cache.take_transfers())
    assert cache.swap_out(small, 4) and cache.swap_out(small, 4)  # the second call has no effect
    assert cache.swap.num_free == 1
    cache.free(small)
    assert cache.swap.num_free == 2


def test_slots_cost_nothing_until_they_hold_something() -> None:
    cache = CacheManager(CacheLayout(block_size=4, num_blocks=9, host_slots=10**15))
    first, second, third = admitted(cache, 8), admitted(cache, 4), admitted(cache, 12)
    assert cache.swap_out(first, 8) and cache.swap_out(second, 4)
    assert sorted(first.host_slots + second.host_slots) == [0, 1, 2]
    cache.free(first)
    assert cache.swap_out(third, 12)
    assert sorted(third.host_slots + second.host_slots) == [0, 1, 2, 3], "used ones come first"
    assert cache.swap.num_free == 10**15 - 4
