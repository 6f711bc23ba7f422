"""The cache manager: whether a request can have room for so many tokens, and in which blocks."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

from minivllm.cache.pool import BlockPool
from minivllm.cache.prefix import (
    CachedSequence,
    PrefixIndex,
    PrefixNode,
    TokenSequence,
    block_keys,
)
from minivllm.cache.spec import NOTHING, CacheCounters, CacheLayout, PendingTransfers, Transfers

if TYPE_CHECKING:
    from minivllm.cache.eviction.evictor import Evictor
    from minivllm.cache.tiers.offload import Disk, OffloadTiers
    from minivllm.cache.tiers.swap import SwapSpace


class CacheManager:
    """Gives requests blocks as they grow, and takes the blocks back. Pure Python.

    Allocation is probe, then commit: either the whole growth fits or nothing changes. An allocation
    collects the moves in memory that it needs, and `take_transfers` hands them out once a step.

    Args:
        layout: how the memory is cut up.
        disk: the lowest tier, if the layout has one and memory is real; see OffloadTiers.

    Attributes:
        content: what holds the content of cached blocks: the tiers if there are some, or `prefix`.
        tiers: for cold blocks of the prefix cache; None: there are none.
        evictor: limits what a request holds; None: requests have no limit.
    """

    def __init__(self, layout: CacheLayout, disk: Disk | None = None) -> None:
        self.layout = layout
        self.counters, self._pending = CacheCounters(), PendingTransfers([], [], [], [], [])
        self.prefix = prefix = PrefixIndex(layout.block_size, layout.most_reusable_blocks)
        self.tiers: OffloadTiers | None = None
        if layout.prefix_caching and layout.offload_slots:
            from minivllm.cache.tiers.offload import OffloadTiers

            self.tiers = OffloadTiers(layout, prefix, self.counters, self._pending, disk)
        self.content = self.tiers or prefix
        is_cached = prefix.by_block.__contains__
        self.pool = BlockPool(layout.num_blocks, is_cached, self.content.displace)
        self.evictor: Evictor | None = None
        if layout.eviction is not None:
            from minivllm.cache.eviction.evictor import Evictor

            self.evictor = Evictor(layout.eviction, self.pool, self.counters)

    @cached_property
    def swap(self) -> SwapSpace:
        """Host memory for requests, made for the first that needs it."""
        from minivllm.cache.tiers.swap import SwapSpace

        return SwapSpace(self.layout.host_slots, self.pool, self.counters, self._pending)

    @property
    def capacity_tokens(self) -> int:
        """Tokens that the cache holds if one request has all blocks."""
        return self.pool.num_usable * self.layout.block_size

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` tokens."""
        return -(-num_tokens // self.layout.block_size)

    def footprint(self, num_tokens: int) -> int:
        """Tokens that a request of `num_tokens` tokens holds at most."""
        eviction = self.layout.eviction
        return num_tokens if eviction is None else min(num_tokens, eviction.capacity)

    def reusable_nodes(self, token_ids: TokenSequence) -> list[PrefixNode]:
        """The cached blocks that a request with these tokens may begin with, in order; none without
        prefix caching."""
        return self.content.known(token_ids) if self.layout.prefix_caching else []

    def admit(
        self,
        sequence: CachedSequence,
        num_tokens: int,
        computed: int,
        most: int,
        *,
        spare: int = 0,
        whole: bool = False,
        reusable: TokenSequence = (),
    ) -> tuple[int, int]:
        """Give a sequence that holds nothing its first blocks: cached blocks of its prefix
        (restored from host memory if necessary), the blocks that it was swapped out with, and new
        blocks for up to `most` tokens to compute.

        Args:
            sequence: has an empty block table.
            num_tokens: tokens of the sequence.
            computed: number of its first tokens that host memory holds.
            most: tokens to compute in this step.
            spare: blocks that must stay free.
            whole: admit the sequence only if this step can compute all of its tokens.
            reusable: the tokens of the sequence, if other requests may have computed their keys and
                values; otherwise none.

        Returns:
            How many tokens it may compute now, after how many; the first is 0, and nothing changed,
            if there is no room.
        """
        nodes = self.reusable_nodes(reusable)
        on_device = [node.block for node in nodes if node.block]
        done = computed or len(nodes) * self.layout.block_size
        count = min(num_tokens - done, most)
        if self.evictor is not None:
            count = min(count, self.evictor.room(sequence, done))
        missing = self.blocks_for(done - sequence.num_evicted + count) - len(on_device)
        revived = [self.pool.ref_counts[block] for block in on_device].count(0)
        has_room = missing + revived + spare <= self.pool.num_free
        if not has_room or count < 1 or (whole and count < num_tokens - done):
            return 0, computed
        self.pool.share(on_device)
        if self.tiers is not None:
            self.tiers.hold(nodes)
        blocks = self.pool.allocate(missing)
        assert blocks is not None
        if self.tiers is not None:
            self.tiers.load(nodes, blocks)
        sequence.block_table.extend([node.block for node in nodes])
        sequence.block_table.extend(blocks)
        if sequence.host_slots:
            self.swap.swap_in(sequence, blocks)
        elif self.layout.prefix_caching and computed == 0:
            self.counters.prefix_tokens_looked_up += num_tokens
            self.counters.prefix_tokens_reused += done
        sequence.prefix_nodes, sequence.num_reused = nodes, len(nodes) * self.layout.block_size
        return count, done

    def grow(self, sequence: CachedSequence, computed: int, num_tokens: int) -> bool:
        """Give a sequence the blocks that `num_tokens` tokens in all need, of which those after the
        first `computed` are written next. False, and nothing changed, if there is no room."""
        table, size = sequence.block_table, self.layout.block_size
        missing = -((sequence.num_evicted - num_tokens) // size) - len(table.blocks)
        copy = self.must_copy(sequence, computed)
        if missing > 0 or copy:
            blocks = self.pool.allocate(max(missing, 0) + copy)
            if blocks is None:
                return False
            if copy:
                target = blocks.pop()
                source = table.replace((computed - sequence.num_evicted) // size, target)
                self._pending.copies.append((source, target))
                self.counters.blocks_copied += 1
                self.pool.release([source])
            table.extend(blocks)
        return True

    def must_copy(self, sequence: CachedSequence, computed: int) -> bool:
        """Whether the next block to write is shared. Only a block that is partly full can be."""
        blocks = sequence.block_table.blocks
        index = (computed - sequence.num_evicted) // self.layout.block_size
        return index < len(blocks) and self.pool.ref_counts[blocks[index]] > 1

    def computed(
        self, sequence: CachedSequence, token_ids: TokenSequence, computed: int, most: int
    ) -> int:
        """Note that the first `computed` tokens are computed: other requests may reuse the full
        blocks from now on.

        Args:
            sequence: holds the tokens.
            token_ids: all known tokens.
            computed: number of computed tokens.
            most: tokens that the sequence may come to have.

        Returns:
            How many are computed when the next step begins: none where nothing is kept.
        """
        if not self.layout.retains_kv:
            self.free(sequence)
            return 0
        if self.layout.prefix_caching and not sequence.num_evicted:
            nodes = sequence.prefix_nodes
            if new := range(len(nodes), computed // self.layout.block_size):
                keys = block_keys(token_ids, self.layout.block_size, new)
                for key, block in zip(keys, sequence.block_table.blocks[new.start :], strict=False):
                    parent = nodes[-1] if nodes else self.prefix.root
                    nodes.append(self.prefix.insert(parent, key, block))
        if self.evictor is not None:
            self.evictor.evict(sequence, computed, most)
        return computed

    def fork(
        self,
        parent: CachedSequence,
        computed: int,
        child: CachedSequence,
        num_tokens: int | None = None,
    ) -> int:
        """Let `child`, which holds nothing, share the blocks of `parent`'s first `num_tokens` of
        its `computed` tokens (None: all of them). The first of the two that writes gets a copy.
        Where a part of the shared tokens is evicted, `child` computes its own.

        Returns:
            How many tokens of `child` are computed.
        """
        if num_tokens is not None and num_tokens < computed:
            computed = 0 if parent.num_evicted else num_tokens
        if not computed:
            return 0
        blocks = parent.block_table.blocks[: self.blocks_for(computed - parent.num_evicted)]
        self.pool.share(blocks)
        child.block_table.extend(blocks)
        child.num_evicted = parent.num_evicted
        child.block_scores = list(parent.block_scores)
        child.prefix_nodes = parent.prefix_nodes[: computed // self.layout.block_size]
        self.counters.blocks_shared += len(blocks)
        return computed

    def free(self, sequence: CachedSequence) -> None:
        """Take back everything that a sequence holds."""
        self.pool.release(sequence.block_table.truncate(0))
        sequence.prefix_nodes = []
        sequence.num_evicted = 0
        sequence.block_scores = []
        if sequence.host_slots:
            self.swap.drop(sequence)

    def discard(self, sequence: CachedSequence) -> list[int]:
        """Take back everything that a sequence holds, and forget it as a prefix: its keys and
        values may be NaN.

        Returns:
            The blocks that nobody else holds; they are to be cleared.
        """
        if sequence.prefix_nodes:
            self.content.lose(sequence.prefix_nodes[0])
        own = [block for block in sequence.block_table.blocks if self.pool.ref_counts[block] == 1]
        self.free(sequence)
        return own

    def swap_out(self, sequence: CachedSequence, computed: int) -> bool:
        """Move what a sequence has computed to host memory; see SwapSpace."""
        return self.swap.swap_out(sequence, self.blocks_for(computed - sequence.num_evicted))

    def take_transfers(self) -> Transfers:
        """The moves to make before the planned step computes. Each is handed out once."""
        if self.tiers is not None:
            self.tiers.end_step()
        if not any(self._pending):
            return NOTHING
        if self.layout.host_slots:
            self.swap.end_step()
        return self._pending.take()

    def reset_prefix_cache(self) -> None:
        """Forget all prefixes. Only while no request holds blocks."""
        for node in list(self.prefix.root.children.values()):
            self.content.lose(node)
        self.pool.recycle()
