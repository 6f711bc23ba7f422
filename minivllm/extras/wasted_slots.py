"""How much of the KV cache is allocated and empty."""

from __future__ import annotations

from collections.abc import Iterable

from minivllm.cache.manager import CacheManager
from minivllm.engine.request import Request


def wasted_slots(cache: CacheManager, requests: Iterable[Request]) -> int:
    """Slots of blocks in use that hold no token. A shared block counts once.

    Args:
        cache: holds the blocks.
        requests: all that hold blocks.
    """
    # Keyed by a table's last block: no other block is partly full, and tables may share it.
    empty: dict[int, int] = {}
    for request in requests:
        blocks = request.cache.block_table.blocks
        if blocks:
            held = len(blocks) * cache.block_size
            empty[blocks[-1]] = max(0, held - request.num_cached_tokens)
    return sum(empty.values())
