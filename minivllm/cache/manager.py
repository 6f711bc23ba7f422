"""The scheduler's view of the cache: may this request have room for that many tokens?"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from minivllm.cache.pool import BlockPool

if TYPE_CHECKING:
    from minivllm.engine.request import Request


@dataclass(frozen=True)
class CacheLayout:
    """How the cache's memory is cut up."""

    block_size: int  # tokens a block
    num_blocks: int  # blocks, the reserved block 0 included


class CachePolicy(Protocol):
    """A `cache` option: decides the layout. Everything else is the same for all of them."""

    name: str

    def layout(
        self, *, bytes_per_token: int, available_bytes: int, max_model_len: int, max_num_seqs: int
    ) -> CacheLayout:
        """Cut the memory available into blocks. Raises BadInput if it holds not even one request."""


class CacheManager:
    """Gives requests blocks as they grow and takes them back. Pure Python.

    Allocation is probe, then commit: either the whole growth fits or nothing changes.
    """

    def __init__(self, layout: CacheLayout) -> None:
        self.block_size = layout.block_size
        self.pool = BlockPool(layout.num_blocks)

    @property
    def capacity_tokens(self) -> int:
        """Tokens that one request alone could keep."""
        return self.pool.num_usable * self.block_size

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    def grow(self, request: Request, num_tokens: int) -> bool:
        """Let `request` hold `num_tokens` tokens in all; False, and nothing changed, if there is no room."""
        table = request.block_table
        missing = self.blocks_for(num_tokens) - len(table)
        if missing > 0:
            blocks = self.pool.allocate(missing)
            if blocks is None:
                return False
            table.extend(blocks)
        return True

    def free(self, request: Request) -> None:
        """Take back everything `request` holds."""
        self.pool.release(request.block_table.truncate(0))

    def waste(self, requests: Iterable[Request]) -> tuple[int, int]:
        """(slots allocated but holding no token, slots allocated) over `requests`."""
        allocated = used = 0
        for request in requests:
            allocated += len(request.block_table) * self.block_size
            used += request.num_computed_tokens
        return allocated - used, allocated
