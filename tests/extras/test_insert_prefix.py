"""Blocks that come from elsewhere into the prefix cache."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from minivllm.cache.manager import CacheManager
from minivllm.cache.spec import CacheDemand
from minivllm.config.compose import build, compose
from minivllm.extras.insert_prefix import insert_prefix

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
