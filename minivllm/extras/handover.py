"""Requests that go from one engine to another, with the keys and values of their prompts, through
host memory."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

import torch

from minivllm.cache.manager import CacheManager
from minivllm.cache.prefix import TokenSequence
from minivllm.cache.tiers.transfer import BlockTransfers
from minivllm.engine.engine import Engine
from minivllm.engine.request import Request
from minivllm.extras.insert_prefix import insert_prefix


def take_prefix(cache: CacheManager, transfers: BlockTransfers, token_ids: TokenSequence) -> bytes:
    """A copy of the cached blocks of the first tokens, one after the other: all layers of a block
    side by side."""
    nodes = cache.prefix.match(token_ids, len(token_ids) // cache.block_size)
    blocks = [node.block for node in takewhile(lambda node: node.block, nodes)]
    return transfers.rows(torch.tensor(blocks, dtype=torch.int64)).numpy().tobytes()


def put_prefix(
    cache: CacheManager, transfers: BlockTransfers, token_ids: TokenSequence, content: bytes
) -> int:
    """Put blocks that `take_prefix` gave into this engine's prefix cache.

    Args:
        token_ids: of the prompt.
        content: of its first blocks.

    Returns:
        See insert_prefix.
    """
    if not content:
        return 0
    rows = torch.frombuffer(bytearray(content), dtype=torch.uint8).view(-1, transfers.row_bytes)

    def write(first: int, blocks: Sequence[int]) -> None:
        transfers.fill(torch.tensor(blocks), rows[first:])

    return insert_prefix(cache, token_ids[: len(rows) * cache.block_size], write)


def resume(engine: Engine, request: Request, token_ids: Sequence[int]) -> None:
    """Let a request that has just been added begin with tokens that another engine has given its
    answer, as if this one had: stops, penalties, grammars and text go on from there."""
    for token_id in token_ids:
        engine.accept(request, token_id, None)
