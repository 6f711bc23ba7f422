"""What the cache keeps for one sequence."""

from __future__ import annotations

from minivllm.cache.pool import BlockTable
from minivllm.cache.prefix import PrefixNode


class CachedSequence:
    """Where the keys and values of one sequence lie. The cache alone changes it; its owner hands it
    in."""

    __slots__ = (
        "block_scores",
        "block_table",
        "disk_ticket",
        "host_slots",
        "num_evicted",
        "prefix_nodes",
        "was_looked_ahead",
    )

    def __init__(self) -> None:
        self.block_table = BlockTable()
        self.num_evicted = 0  # computed tokens that the cache no longer holds
        self.prefix_nodes: list[PrefixNode] = []  # of its full blocks, where prefixes are cached
        # attention that each block got, where eviction goes by it
        self.block_scores: list[float] = []
        self.host_slots: list[int] = []  # of its blocks in host memory, while it is swapped out
        self.was_looked_ahead = False  # its blocks on disk are being read, or were, before its turn
        self.disk_ticket: int | None = None  # to wait for the disk with; None until it is its turn
