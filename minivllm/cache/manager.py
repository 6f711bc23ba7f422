"""The scheduler's view of the cache: may this request have room for that many tokens?"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from minivllm.cache.pool import BlockPool
from minivllm.cache.prefix import PrefixIndex, PrefixNode
from minivllm.cache.spec import NOTHING, CacheCounters, CacheLayout, Transfers
from minivllm.cache.tiers.offload import Disk, OffloadTiers

if TYPE_CHECKING:
    from minivllm.engine.request import Request
    from minivllm.engine.step import ScheduledRequest


@dataclass
class _Pending:
    saves: list[tuple[int, int]] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)
    loads: list[tuple[int, int]] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.saves or self.copies or self.loads)


class CacheManager:
    """Gives requests blocks as they grow and takes them back. Pure Python.

    Allocation is probe, then commit: either the whole growth fits or nothing changes. What has to be moved in
    memory for it is collected, and handed out once a step by `take_transfers`.

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

    def room(self, request: Request, done: int) -> int | None:
        """Tokens that the request may compute in one step after the first `done`; None: any number."""
        eviction = self.layout.eviction
        return None if eviction is None else eviction.capacity - (done - request.num_evicted_tokens)

    def admit(self, request: Request, most: int, spare: int = 0, whole: bool = False) -> int:
        """Give a request that holds nothing its first blocks: those known by its prefix (brought back from host
        memory if need be), those it was swapped out with, and new ones for up to `most` tokens to compute.

        Args:
            request: waits, and has an empty block table.
            most: tokens to compute in this step.
            spare: blocks that must stay free beside.
            whole: admit it only if all of its tokens can be computed in this step.

        Returns:
            How many tokens it may compute now; 0, and nothing changed, if there is no room.
        """
        nodes = self._reusable(request)
        done = request.num_computed_tokens or len(nodes) * self.block_size
        count = min(request.num_tokens - done, most)
        if (room := self.room(request, done)) is not None:
            count = min(count, room)
        fresh = self.blocks_for(done - request.num_evicted_tokens + count) - len(nodes)
        away = [node for node in nodes if not node.block]
        revived = sum(self.pool.is_free(node.block) for node in nodes if node.block) + len(away)
        if (
            count < 1
            or (whole and count < request.num_tokens - done)
            or fresh + revived + spare > self.pool.num_free
        ):
            return 0
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
        request.block_table.extend(node.block for node in nodes)
        request.block_table.extend(blocks)
        if request.host_slots:
            self._moves.loads += zip(request.host_slots, blocks, strict=False)
            self.counters.blocks_swapped_in += len(request.host_slots)
            request.host_slots = []
        elif self.prefix is not None and request.num_computed_tokens == 0:
            self.counters.prefix_tokens_looked_up += request.num_tokens
            self.counters.prefix_tokens_reused += done
        request.num_computed_tokens = done
        request.prefix_nodes = nodes
        return count

    def _reusable(self, request: Request) -> list[PrefixNode]:
        """Nodes on the device or in host memory that hold the request's first tokens."""
        nodes = []
        for node in self._known(request):
            if not node.block and node.slot is None:
                break
            nodes.append(node)
        return nodes

    def _known(self, request: Request) -> Iterable[PrefixNode]:
        """Nodes that hold the request's first tokens: never all, the last one must be computed."""
        if self.prefix is None or request.num_computed_tokens or not request.may_reuse_prefix:
            return ()
        most = (request.num_tokens - 1) // self.block_size
        if self.layout.eviction is not None:  # the blocks after those have lost some before them
            most = min(most, self.layout.eviction.budget - 1)
        return self.prefix.match(request, most)

    def prefetch(self, requests: Iterable[Request]) -> None:
        """Take note of what was read from disk since the last step, and start to read what these waiting requests
        will need, as far as the host has room for it. Only where there are tiers below the device."""
        assert self.tiers is not None
        self.tiers.settle()
        if self.layout.disk_records:
            for request in requests:
                if self.tiers.may_look_ahead and not request.was_looked_ahead:
                    request.was_looked_ahead = True
                    self.tiers.prefetch(list(self._known(request)))

    def is_fetched(self, request: Request) -> bool:
        """Whether the request whose turn it is need not wait for the disk. The first call starts to read what is
        still missing; whatever leaves the host after that is computed again, so that nobody waits twice."""
        if self.tiers is None or not self.layout.disk_records:
            return True
        if request.disk_ticket is None:
            request.disk_ticket = self.tiers.prefetch(list(self._known(request)))
        return self.tiers.has_read(request.disk_ticket)

    def grow(self, request: Request, num_tokens: int) -> bool:
        """Let `request` hold `num_tokens` tokens in all, and write those it has not computed yet; False, and
        nothing changed, if there is no room."""
        table = request.block_table
        missing = self.blocks_for(num_tokens - request.num_evicted_tokens) - len(table)
        copy = self.must_copy(request)
        if missing > 0 or copy:
            blocks = self.pool.allocate(max(missing, 0) + copy)
            if blocks is None:
                return False
            if copy:
                at = request.num_cached_tokens // self.block_size
                target = blocks.pop()
                source = table.replace(at, target)
                self._moves.copies.append((source, target))
                self.counters.blocks_copied += 1
                self.pool.release([source])
            table.extend(blocks)
        return True

    def must_copy(self, request: Request) -> bool:
        """Whether the block that `request` writes next is shared. Only the one that is partly full can be."""
        blocks, at = request.block_table.blocks, request.num_cached_tokens // self.block_size
        return at < len(blocks) and self.pool.ref_counts[blocks[at]] > 1

    def computed(self, request: Request) -> None:
        """Note that the request's `num_computed_tokens` were computed: full blocks may be found by others now."""
        if not self.layout.keeps:
            self.free(request)
            request.num_computed_tokens = 0
        elif self.prefix is not None and not request.num_evicted_tokens:
            nodes = request.prefix_nodes
            for index in range(len(nodes), request.num_computed_tokens // self.block_size):
                parent = nodes[-1] if nodes else self.prefix.root
                tokens = self.prefix.tokens(request, index)
                nodes.append(self.prefix.insert(parent, tokens, request.block_table.blocks[index]))
        self.evict(request)

    def evict(self, request: Request) -> None:
        """Drop blocks of a request that has filled its budget and goes on. (Its last token is never computed.)"""
        policy = self.layout.eviction
        if (
            policy is None
            or request.num_cached_tokens < policy.capacity
            or request.num_computed_tokens >= request.max_num_tokens - 1
        ):
            return
        scores = request.block_scores + [0.0] * (policy.budget - len(request.block_scores))
        indices = policy.drop(scores)
        self.pool.release(request.block_table.drop(indices))
        gone = set(indices)
        request.block_scores = [s for i, s in enumerate(scores) if policy.remembers and i not in gone]
        request.num_evicted_tokens += len(indices) * self.block_size
        self.counters.blocks_evicted += len(indices)
        self.counters.tokens_evicted += len(indices) * self.block_size

    def observe(self, scheduled: Sequence[ScheduledRequest], mass: Sequence[Sequence[float]]) -> None:
        """Add the attention that each block of each request got in a step. mass: as StepBatch has it."""
        policy = self.layout.eviction
        assert policy is not None
        for part, row in zip(scheduled, mass, strict=True):
            request = part.request
            self.counters.queries_observed += policy.observed(request.num_cached_tokens, part.num_tokens)
            known = request.block_scores + [0.0] * (len(request.block_table) - len(request.block_scores))
            request.block_scores = [old + new for old, new in zip(known, row, strict=False)]

    def fork(self, parent: Request, child: Request, num_tokens: int | None = None) -> None:
        """Let `child`, which holds nothing, share the blocks of `parent`'s first `num_tokens` computed tokens (None:
        all of them); whoever writes first gets a copy. Where what they share has been evicted in part, `child`
        computes its own."""
        computed = parent.num_computed_tokens
        if num_tokens is not None and num_tokens < computed:
            computed = 0 if parent.num_evicted_tokens else num_tokens
        if not computed:
            child.num_computed_tokens = 0
            return
        blocks = parent.block_table.blocks[: self.blocks_for(computed - parent.num_evicted_tokens)]
        for block in blocks:
            self.pool.share(block)
        child.block_table.extend(blocks)
        child.num_computed_tokens = computed
        child.num_evicted_tokens = parent.num_evicted_tokens
        child.block_scores = list(parent.block_scores)
        child.prefix_nodes = parent.prefix_nodes[: computed // self.block_size]
        self.counters.blocks_shared += len(blocks)

    def free(self, request: Request) -> None:
        """Take back everything `request` holds."""
        self.pool.release(request.block_table.truncate(0))
        request.prefix_nodes = []
        request.num_evicted_tokens = 0
        request.block_scores = []
        self._slots += request.host_slots
        request.host_slots = []

    def discard(self, request: Request) -> list[int]:
        """Take back everything `request` holds, and forget it as a prefix: its keys and values may be no numbers.

        Returns:
            The blocks that nobody else holds; they are to be cleared.
        """
        if request.prefix_nodes:
            self._lose(request.prefix_nodes[0])
        own = [block for block in request.block_table.blocks if self.pool.ref_counts[block] == 1]
        self.free(request)
        return own

    def swap_out(self, request: Request) -> bool:
        """Move what `request` has computed to host memory; False, and nothing changed, if that is full."""
        if request.host_slots:  # it had not come back yet
            return True
        count = self.blocks_for(request.num_cached_tokens)
        if not 0 < count <= len(self._slots):
            return False
        slots = [self._slots.pop() for _ in range(count)]
        self._moves.saves += zip(request.block_table.blocks[:count], slots, strict=True)
        self.counters.blocks_swapped_out += count
        self.pool.release(request.block_table.truncate(0))
        request.prefix_nodes = []
        request.host_slots = slots
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
        """The pool takes a cached block for something else: its content goes to a lower tier, if there is one."""
        assert self.prefix is not None
        node = self.prefix.displace(block)
        if self.tiers is None:
            self.prefix.detach(node)
        elif (slot := self.tiers.keep(node)) is not None:
            self._moves.saves.append((block, slot))

    def waste(self, requests: Iterable[Request]) -> int:
        """Slots of blocks in use that hold no token. A block that is shared counts once.

        Args:
            requests: all that hold blocks.
        """
        empty: dict[int, int] = {}  # by last block: only a table's end is not full, and it may be shared
        for request in requests:
            blocks = request.block_table.blocks
            if blocks:
                empty[blocks[-1]] = max(0, len(blocks) * self.block_size - request.num_cached_tokens)
        return sum(empty.values())
