"""Blocks of the KV cache: those that another engine has computed, and how many of their slots are
empty. Free of torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import takewhile
from typing import TYPE_CHECKING

from minivllm.cache.manager import CacheManager
from minivllm.cache.prefix import CachedSequence, TokenSequence
from minivllm.engine.request import Request
from minivllm.parallel.handover import Content, HandoverFailed, taken

if TYPE_CHECKING:
    from minivllm.cache.tiers.transfer import BlockTransfers


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
    size, sequence = cache.layout.block_size, CachedSequence()
    length = len(token_ids) // size * size
    count, _ = cache.admit(sequence, length, 0, length, whole=True, reusable=token_ids)
    if count:
        first = (length - count) // size
        write(first, sequence.block_table.blocks[first:])
        cache.computed(sequence, token_ids, length, length)
        cache.free(sequence)
    return count


def take_prefix(cache: CacheManager, transfers: BlockTransfers, token_ids: TokenSequence) -> bytes:
    """A copy of the cached blocks of the first tokens, see `BlockTransfers.give`."""
    nodes = cache.prefix.match(token_ids, len(token_ids) // cache.layout.block_size)
    blocks = [node.block for node in takewhile(lambda node: node.block, nodes)]
    return transfers.give(blocks) if blocks else b""


def put_prefix(
    cache: CacheManager, transfers: BlockTransfers, token_ids: TokenSequence, content: Content
) -> int:
    """Put blocks that `take_prefix` gave into this engine's prefix cache. A file is deleted.

    Args:
        token_ids: of the prompt.
        content: of its first blocks.

    Returns:
        See insert_prefix.

    Raises:
        HandoverFailed: it is not whole blocks of this prompt; or see `taken`.
    """
    width = transfers.block_bytes
    data = taken(content, len(token_ids) // cache.layout.block_size * width)
    if not data:
        return 0
    if len(data) % width:
        raise HandoverFailed(
            f"{len(data)} bytes of keys and values were handed over, and a block has {width}: the "
            "replicas differ"
        )

    def write(first: int, blocks: Sequence[int]) -> None:
        transfers.run(cache.take_transfers())  # of cached blocks that these take the place of
        transfers.take(blocks, data[first * width :])

    return insert_prefix(cache, token_ids[: len(data) // width * cache.layout.block_size], write)


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
            held = len(blocks) * cache.layout.block_size
            empty[blocks[-1]] = max(0, held - request.num_cached_tokens)
    return sum(empty.values())
