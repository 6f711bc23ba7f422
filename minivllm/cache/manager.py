"""The scheduler's view of the cache: may this request have room for that many tokens?"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from minivllm.cache.pool import BlockPool
from minivllm.cache.prefix import PrefixIndex, PrefixNode, TokenSequence
from minivllm.cache.sequence import CachedSequence
from minivllm.cache.spec import NOTHING, CacheCounters, CacheLayout, Transfers
from minivllm.cache.tiers.offload import Disk, OffloadTiers


@dataclass
class _Pending:
    saves: list[tuple[int, int]] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)
    loads: list[tuple[int, int]] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.saves or self.copies or self.loads)


class CacheManager:
    """Gives requests blocks as they grow and takes them back. Pure Python.

    Allocation is probe, then commit: either the whole growth fits or nothing changes. What has to
    be moved in memory for it is collected, and handed out once a step by `take_transfers`.

    Args:
        layout: how the memory is cut up.
        disk: of the lowest tier, if the layout has one and memory is real; see OffloadTiers.
    """

    def __init__(self, layout: CacheLayout, disk: Disk | None = None) -> None:
        self.layout = layout
        self.block_size = layout.block_size
        self.prefix = PrefixIndex(layout.block_size) if layout.prefix_caching else None
        cached = {} if self.prefix is None else self.prefix.by_block
        self.pool = BlockPool(layout.num_blocks, cached.__contains__, self._forget)
        self.counters = CacheCounters()
        self.tiers: OffloadTiers | None = None
        if self.prefix is not None and layout.offload_slots:
            self.tiers = OffloadTiers(layout, self.prefix, self.counters, disk)
        self._slots = list(range(layout.host_slots))[::-1]
        self._moves = _Pending()

    @property
    def capacity_tokens(self) -> int:
        """Tokens that one request alone could keep."""
        return self.pool.num_usable * self.block_size

    @property
    def num_free_slots(self) -> int:
        """Host slots for requests that are swapped out, as far as they hold nothing."""
        return len(self._slots)

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    def footprint(self, num_tokens: int) -> int:
        """Tokens that a request of `num_tokens` tokens holds at most."""
        eviction = self.layout.eviction
        return num_tokens if eviction is None else min(num_tokens, eviction.capacity)

    def room(self, sequence: CachedSequence, computed: int) -> int | None:
        """Tokens that the sequence may compute in one step after the first `computed`; None: any
        number."""
        eviction = self.layout.eviction
        return None if eviction is None else eviction.capacity - (computed - sequence.num_evicted)

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
        """Give a sequence that holds nothing its first blocks: those known by its prefix (brought
        back from host memory if need be), those it was swapped out with, and new ones for up to
        `most` tokens to compute.

        Args:
            sequence: has an empty block table.
            num_tokens: that it has.
            computed: of these, what it has in host memory.
            most: tokens to compute in this step.
            spare: blocks that must stay free beside.
            whole: admit it only if all of its tokens can be computed in this step.
            reusable: its tokens, if others may have computed their keys and values; else none.

        Returns:
            How many tokens it may compute now, after how many; the first is 0, and nothing changed,
            if there is no room.
        """
        nodes = self._reusable(reusable)
        done = computed or len(nodes) * self.block_size
        count = min(num_tokens - done, most)
        if (room := self.room(sequence, done)) is not None:
            count = min(count, room)
        fresh = self.blocks_for(done - sequence.num_evicted + count) - len(nodes)
        away = [node for node in nodes if not node.block]
        revived = sum(self.pool.is_free(node.block) for node in nodes if node.block) + len(away)
        if (
            count < 1
            or (whole and count < num_tokens - done)
            or fresh + revived + spare > self.pool.num_free
        ):
            return 0, computed
        for node in nodes:
            if node.block:
                self.pool.share(node.block)
        if self.tiers is not None:
            self.tiers.hold(nodes)
        blocks = self.pool.allocate(fresh + len(away))
        assert blocks is not None
        for node in away:
            assert self.prefix is not None and node.slot is not None
            self.prefix.place(node, blocks.pop())
            self._moves.loads.append((node.slot, node.block))
        self.counters.blocks_restored += len(away)
        sequence.block_table.extend(node.block for node in nodes)
        sequence.block_table.extend(blocks)
        if sequence.host_slots:
            self._moves.loads += zip(sequence.host_slots, blocks, strict=False)
            self.counters.blocks_swapped_in += len(sequence.host_slots)
            sequence.host_slots = []
        elif self.prefix is not None and computed == 0:
            self.counters.prefix_tokens_looked_up += num_tokens
            self.counters.prefix_tokens_reused += done
        sequence.prefix_nodes = nodes
        return count, done

    def _reusable(self, token_ids: TokenSequence) -> list[PrefixNode]:
        """Nodes on the device or in host memory that hold the first tokens."""
        nodes = []
        for node in self._known(token_ids):
            if not node.block and node.slot is None:
                break
            nodes.append(node)
        return nodes

    def _known(self, token_ids: TokenSequence) -> Iterable[PrefixNode]:
        """Nodes that hold the first tokens: never all, the last one must be computed."""
        if self.prefix is None or not token_ids:
            return ()
        most = (len(token_ids) - 1) // self.block_size
        if self.layout.eviction is not None:  # the blocks after those have lost some before them
            most = min(most, self.layout.eviction.budget - 1)
        return self.prefix.match(token_ids, most)

    def prefetch(self, sequences: Iterable[tuple[CachedSequence, TokenSequence]]) -> None:
        """Take note of what was read from disk since the last step, and start to read what these
        sequences will need, as far as the host has room for it. Only where there are tiers below
        the device.

        Args:
            sequences: that wait, each with its tokens as in `admit`'s `reusable`.
        """
        assert self.tiers is not None
        self.tiers.settle()
        if self.layout.disk_records:
            for sequence, token_ids in sequences:
                if self.tiers.may_look_ahead and not sequence.was_looked_ahead:
                    sequence.was_looked_ahead = True
                    self.tiers.prefetch(list(self._known(token_ids)))

    def is_fetched(self, sequence: CachedSequence, reusable: TokenSequence) -> bool:
        """Whether the sequence whose turn it is need not wait for the disk. The first call starts
        to read what is still missing; whatever leaves the host after that is computed again, so
        that nobody waits twice."""
        if self.tiers is None or not self.layout.disk_records:
            return True
        if sequence.disk_ticket is None:
            sequence.disk_ticket = self.tiers.prefetch(list(self._known(reusable)))
        return self.tiers.has_read(sequence.disk_ticket)

    def grow(self, sequence: CachedSequence, computed: int, num_tokens: int) -> bool:
        """Let a sequence hold `num_tokens` tokens in all, and write those after the first
        `computed`; False, and nothing changed, if there is no room."""
        table = sequence.block_table
        missing = self.blocks_for(num_tokens - sequence.num_evicted) - len(table)
        copy = self.must_copy(sequence, computed)
        if missing > 0 or copy:
            blocks = self.pool.allocate(max(missing, 0) + copy)
            if blocks is None:
                return False
            if copy:
                target = blocks.pop()
                source = table.replace((computed - sequence.num_evicted) // self.block_size, target)
                self._moves.copies.append((source, target))
                self.counters.blocks_copied += 1
                self.pool.release([source])
            table.extend(blocks)
        return True

    def must_copy(self, sequence: CachedSequence, computed: int) -> bool:
        """Whether the block that is written next is shared. Only the one that is partly full can
        be."""
        blocks, at = (
            sequence.block_table.blocks,
            (computed - sequence.num_evicted) // self.block_size,
        )
        return at < len(blocks) and self.pool.ref_counts[blocks[at]] > 1

    def computed(
        self, sequence: CachedSequence, token_ids: TokenSequence, computed: int, most: int
    ) -> int:
        """Note that the first `computed` tokens were computed: full blocks may be found by others
        now.

        Args:
            sequence: whose tokens they are.
            token_ids: all tokens that are known.
            computed: how many of them.
            most: tokens that it may come to have.

        Returns:
            How many are computed when the next step begins: none where nothing is kept.
        """
        if not self.layout.retains_kv:
            self.free(sequence)
            return 0
        if self.prefix is not None and not sequence.num_evicted:
            nodes = sequence.prefix_nodes
            for index in range(len(nodes), computed // self.block_size):
                parent = nodes[-1] if nodes else self.prefix.root
                tokens = self.prefix.tokens(token_ids, index)
                nodes.append(self.prefix.insert(parent, tokens, sequence.block_table.blocks[index]))
        self.evict(sequence, computed, most)
        return computed

    def evict(self, sequence: CachedSequence, computed: int, most: int) -> None:
        """Drop blocks of a sequence that has filled its budget and goes on. (Its last token is
        never computed.)"""
        policy = self.layout.eviction
        if (
            policy is None
            or computed - sequence.num_evicted < policy.capacity
            or computed >= most - 1
        ):
            return
        scores = sequence.block_scores + [0.0] * (policy.budget - len(sequence.block_scores))
        indices = policy.drop(scores)
        self.pool.release(sequence.block_table.drop(indices))
        gone = set(indices)
        sequence.block_scores = [
            s for i, s in enumerate(scores) if policy.remembers and i not in gone
        ]
        sequence.num_evicted += len(indices) * self.block_size
        self.counters.blocks_evicted += len(indices)
        self.counters.tokens_evicted += len(indices) * self.block_size

    def observe(
        self, steps: Iterable[tuple[CachedSequence, int, int]], scores: Sequence[Sequence[float]]
    ) -> None:
        """Add the attention that each block of each sequence got in a step.

        Args:
            steps: sequences, the tokens that each held before, and those that it computed.
            scores: a row a sequence, a number a block.
        """
        policy = self.layout.eviction
        assert policy is not None
        for (sequence, held, count), row in zip(steps, scores, strict=True):
            self.counters.queries_observed += policy.observed(held, count)
            known = sequence.block_scores + [0.0] * (
                len(sequence.block_table) - len(sequence.block_scores)
            )
            sequence.block_scores = [old + new for old, new in zip(known, row, strict=False)]

    def fork(
        self,
        parent: CachedSequence,
        computed: int,
        child: CachedSequence,
        num_tokens: int | None = None,
    ) -> int:
        """Let `child`, which holds nothing, share the blocks of `parent`'s first `num_tokens` of
        its `computed` tokens (None: all of them); whoever writes first gets a copy. Where what they
        share has been evicted in part, `child` computes its own.

        Returns:
            How many tokens of `child` are computed.
        """
        if num_tokens is not None and num_tokens < computed:
            computed = 0 if parent.num_evicted else num_tokens
        if not computed:
            return 0
        blocks = parent.block_table.blocks[: self.blocks_for(computed - parent.num_evicted)]
        for block in blocks:
            self.pool.share(block)
        child.block_table.extend(blocks)
        child.num_evicted = parent.num_evicted
        child.block_scores = list(parent.block_scores)
        child.prefix_nodes = parent.prefix_nodes[: computed // self.block_size]
        self.counters.blocks_shared += len(blocks)
        return computed

    def free(self, sequence: CachedSequence) -> None:
        """Take back everything that a sequence holds."""
        self.pool.release(sequence.block_table.truncate(0))
        sequence.prefix_nodes = []
        sequence.num_evicted = 0
        sequence.block_scores = []
        self._slots += sequence.host_slots
        sequence.host_slots = []

    def discard(self, sequence: CachedSequence) -> list[int]:
        """Take back everything that a sequence holds, and forget it as a prefix: its keys and
        values may be no numbers.

        Returns:
            The blocks that nobody else holds; they are to be cleared.
        """
        if sequence.prefix_nodes:
            self._lose(sequence.prefix_nodes[0])
        own = [block for block in sequence.block_table.blocks if self.pool.ref_counts[block] == 1]
        self.free(sequence)
        return own

    def swap_out(self, sequence: CachedSequence, computed: int) -> bool:
        """Move what a sequence has computed to host memory; False, and nothing changed, if that is
        full."""
        if sequence.host_slots:  # it had not come back yet
            return True
        count = self.blocks_for(computed - sequence.num_evicted)
        if not 0 < count <= len(self._slots):
            return False
        slots = [self._slots.pop() for _ in range(count)]
        self._moves.saves += zip(sequence.block_table.blocks[:count], slots, strict=True)
        self.counters.blocks_swapped_out += count
        self.pool.release(sequence.block_table.truncate(0))
        sequence.prefix_nodes = []
        sequence.host_slots = slots
        return True

    def take_transfers(self) -> Transfers:
        """What must be moved before the step that was planned; each is handed out once."""
        if self.tiers is None and not self._moves:
            return NOTHING
        moves, self._moves = self._moves, _Pending()
        # Free only now: what is saved in this step must not go where this step still reads.
        self._slots += [slot for slot, _ in moves.loads if slot < self.layout.host_slots]
        spills, reads = ([], []) if self.tiers is None else self.tiers.take()
        return Transfers(*map(tuple, (spills, moves.saves, moves.copies, moves.loads, reads)))

    def reset_prefix_cache(self) -> None:
        """Forget all prefixes. Only while no request holds blocks."""
        if self.prefix is not None:
            for node in list(self.prefix.root.children.values()):
                self._lose(node)
            self.pool.recycle()

    def _lose(self, node: PrefixNode) -> None:
        """Forget a prefix and all that follow it, in every tier."""
        assert self.prefix is not None
        if self.tiers is None:
            self.prefix.detach(node)
        else:
            self.tiers.lose(node)

    def _forget(self, block: int) -> None:
        """The pool takes a cached block for something else: its content goes to a lower tier, if
        there is one."""
        assert self.prefix is not None
        node = self.prefix.displace(block)
        if self.tiers is None:
            self.prefix.detach(node)
        elif (slot := self.tiers.keep(node)) is not None:
            self._moves.saves.append((block, slot))

    def waste(self, sequences: Iterable[tuple[CachedSequence, int]]) -> int:
        """Slots of blocks in use that hold no token. A block that is shared counts once.

        Args:
            sequences: all that hold blocks, each with how many tokens are computed.
        """
        # by last block: only a table's end is not full, and it may be shared
        empty: dict[int, int] = {}
        for sequence, computed in sequences:
            blocks = sequence.block_table.blocks
            if blocks:
                held = computed - sequence.num_evicted
                empty[blocks[-1]] = max(0, len(blocks) * self.block_size - held)
        return sum(empty.values())
