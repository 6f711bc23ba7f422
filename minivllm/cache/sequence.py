"""What the cache keeps for one sequence."""

from __future__ import annotations

from minivllm.cache.pool import BlockTable
from minivllm.cache.prefix import PrefixNode


class CachedSequence:
    """Where the keys and values of one sequence are stored. Only the cache changes it; a request
    owns it."""

    __slots__ = (
        "block_scores",
        "block_table",
        "disk_ticket",
        "host_slots",
        "num_evicted",
        "num_reused",
        "prefix_nodes",
        "was_looked_ahead",
    )

    def __init__(self) -> None:
        self.block_table = BlockTable()
        self.num_evicted = 0  # computed tokens that the cache no longer holds
        self.num_reused = 0  # tokens that other requests had computed when it was last admitted
        self.prefix_nodes: list[PrefixNode] = []  # of full blocks, where prefixes are cached
        # Attention scores of each block, where eviction needs them.
        self.block_scores: list[float] = []
        self.host_slots: list[int] = []  # of the blocks of a sequence that is swapped out
        self.was_looked_ahead = False  # whether its blocks were read from disk ahead
        self.disk_ticket: int | None = None  # None until its blocks are requested
