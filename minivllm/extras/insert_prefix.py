"""Blocks in the prefix cache that no request of this engine has computed. Pure Python."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from minivllm.cache.manager import CacheManager
from minivllm.cache.prefix import TokenSequence
from minivllm.cache.sequence import CachedSequence


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
