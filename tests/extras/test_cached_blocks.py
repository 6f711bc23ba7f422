"""Blocks that come from elsewhere into the prefix cache, and empty slots of blocks."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from minivllm import LLM, SamplingParams
from minivllm.cache.eviction.policies import make_eviction
from minivllm.cache.manager import CacheManager
from minivllm.cache.options import PagedOptions
from minivllm.cache.spec import CacheDemand
from minivllm.config.compose import build, compose
from minivllm.engine.batching import Continuous
from minivllm.extras.cached_blocks import (
    insert_prefix,
    put_prefix,
    take_prefix,
    wasted_slots,
)
from tests.engine.imaginary import make

PROMPTS = st.lists(st.lists(st.integers(0, 1), max_size=14), max_size=12)


@given(PROMPTS)
def test_every_block_is_written_once_and_found(prompts: list[list[int]]) -> None:
    config = compose(["cache.prefix_caching=true", "cache.block_size=2", "cache.num_blocks=9"])
    layout = build(config["cache"]).layout(CacheDemand(1 << 24, 1 << 40, 64, 4))
    cache, held = CacheManager(layout), dict[int, tuple[int, ...]]()
    for prompt in prompts:

        def write(first: int, blocks: list[int], prompt: list[int] = prompt) -> None:
            for place, block in enumerate(blocks, first):
                held[block] = tuple(prompt[: 2 * place + 2])

        count = insert_prefix(cache, prompt, write)  # type: ignore[arg-type]
        cache.pool.check_integrity([])
        found = [node.block for node in cache.prefix.match(prompt, len(prompt) // 2)]
        for place, block in enumerate(found):
            assert held[block] == tuple(prompt[: 2 * place + 2])
        assert count % 2 == 0 and cache.pool.num_used == 0
        assert len(found) == len(prompt) // 2


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


KNOBS = ["quant=fp32", "runtime.threads=1", "cache.prefix_caching=true", "cache.block_size=8"]
OWN, OTHER = list(range(2, 40)), list(range(50, 95))
PARAMS = SamplingParams(max_tokens=6, ignore_eos=True)


def tokens(llm: LLM, prompt: list[int]) -> list[int]:
    return llm.generate([prompt], PARAMS)[0].outputs[0].token_ids


def test_what_a_prefix_takes_the_place_of_is_saved_first() -> None:
    """The pool holds one of the two prompts; the other one's blocks are offloaded to the host."""
    with LLM("tiny", overrides=[*KNOBS, "cache.num_blocks=32"]) as first:
        known, others = tokens(first, OWN), tokens(first, OTHER)
        content = take_prefix(first.engine.cache, first.engine.transfers, OTHER)
    knobs = [*KNOBS, "cache.num_blocks=8", "cache.offload_gb=0.1", "model.max_model_len=56"]
    with LLM("tiny", overrides=knobs) as second:
        engine = second.engine
        assert tokens(second, OWN) == known
        assert put_prefix(engine.cache, engine.transfers, OTHER, content) == 40
        counters = engine.cache.counters
        assert counters.blocks_offloaded > 0
        assert tokens(second, OTHER) == others
        before = counters.blocks_restored
        assert tokens(second, OWN) == known
        assert counters.blocks_restored > before
