"""Blocks of the KV cache: those that no request of this engine has computed, and how many of their
slots are empty. Pure Python."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from minivllm.cache.manager import CacheManager
from minivllm.cache.prefix import CachedSequence, TokenSequence
from minivllm.engine.request import Request


def insert_prefix(
    cache: CacheManager, token_ids: TokenSequence, write: Callable[[int, Sequence[int]], None]
) -> int:
    """Put the full blocks of some tokens into the prefix cache, as if a request had computed them
    and ended. Blocks that are cached already stay.

    Args:
        write: called with new blocks, which it fills, and the place of the first of them in the
            prompt.

    Returns:
        How many tokens the new blocks hold; 0 where the pool has no room for all of them.
    """
    size, sequence = cache.block_size, CachedSequence()
    length = len(token_ids) // size * size
    count, _ = cache.admit(sequence, length, 0, length, whole=True, reusable=token_ids)
    if count:
        first = (length - count) // size
        write(first, sequence.block_table.blocks[first:])
        cache.computed(sequence, token_ids, length, length)
        cache.free(sequence)
    return count


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
