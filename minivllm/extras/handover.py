"""Requests that go from one engine to another, with the keys and values of their prompts."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

from minivllm.cache.manager import CacheManager
from minivllm.cache.prefix import TokenSequence
from minivllm.cache.tiers.transfer import BlockTransfers
from minivllm.engine.engine import Engine
from minivllm.engine.request import Request
from minivllm.extras.cached_blocks import insert_prefix
from minivllm.parallel.handover import Content, HandoverFailed, taken


def take_prefix(cache: CacheManager, transfers: BlockTransfers, token_ids: TokenSequence) -> bytes:
    """A copy of the cached blocks of the first tokens, see `BlockTransfers.give`."""
    nodes = cache.prefix.match(token_ids, len(token_ids) // cache.block_size)
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
    data = taken(content, len(token_ids) // cache.block_size * width)
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

    return insert_prefix(cache, token_ids[: len(data) // width * cache.block_size], write)


def resume(engine: Engine, request: Request, token_ids: Sequence[int]) -> None:
    """Let a request that has just been added begin with tokens that another engine has given its
    answer, as if this one had: stops, penalties, grammars and text go on from there."""
    for token_id in token_ids:
        engine.accept(request, token_id, None)
