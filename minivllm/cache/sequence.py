"""What the cache keeps for one sequence."""

from __future__ import annotations

from dataclasses import dataclass, field

from minivllm.cache.pool import BlockTable
from minivllm.cache.prefix import PrefixNode


@dataclass(eq=False, slots=True)
class CachedSequence:
    """Where the keys and values of one sequence are stored. Only the cache changes it; a request
    owns it."""

    block_table: BlockTable = field(default_factory=BlockTable)
    num_evicted: int = 0  # computed tokens that the cache no longer holds
    num_reused: int = 0  # tokens that other requests had computed when it was last admitted
    prefix_nodes: list[PrefixNode] = field(default_factory=list)  # of full, cached blocks
    # Attention scores of each block, where eviction needs them.
    block_scores: list[float] = field(default_factory=list)
    host_slots: list[int] = field(default_factory=list)  # of its blocks while it is swapped out
    was_looked_ahead: bool = False  # whether its blocks were read from disk ahead
    disk_ticket: int | None = None  # None until its blocks are requested
