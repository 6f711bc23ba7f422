"""Swap space: host memory for requests that `batching.preemption=swap` moves out. Pure Python."""

from __future__ import annotations

from minivllm.cache.pool import BlockPool
from minivllm.cache.prefix import CachedSequence
from minivllm.cache.spec import CacheCounters, PendingTransfers


class SwapSpace:
    """The slots of host memory that hold the blocks of requests which are swapped out.

    Args:
        num_slots: blocks that fit; their numbers begin at 0.
        pool: gets the blocks of requests that are swapped out.
        counters: count the blocks.
        pending: gets the moves between device and host.
    """

    def __init__(
        self, num_slots: int, pool: BlockPool, counters: CacheCounters, pending: PendingTransfers
    ) -> None:
        self.pool, self.counters, self.pending = pool, counters, pending
        # A small model has millions of slots, most of which never hold anything.
        self._num_slots, self._num_touched = num_slots, 0
        self._free: list[int] = []  # that held something before
        self._free_after_step: list[int] = []

    @property
    def num_free(self) -> int:
        """Slots that hold nothing."""
        return len(self._free) + self._num_slots - self._num_touched

    def swap_out(self, sequence: CachedSequence, num_blocks: int) -> bool:
        """Move the first blocks of a sequence to host memory, and free all its blocks. False, and
        nothing changed, if host memory is full."""
        if sequence.host_slots:  # The sequence had not come back yet.
            return True
        if not 0 < num_blocks <= self.num_free:
            return False
        slots = [self._free.pop() for _ in range(min(num_blocks, len(self._free)))]
        first = self._num_touched
        self._num_touched += num_blocks - len(slots)
        slots += range(first, self._num_touched)
        self.pending.saves.extend(zip(sequence.block_table.blocks[:num_blocks], slots, strict=True))
        self.counters.blocks_swapped_out += num_blocks
        self.pool.release(sequence.block_table.truncate(0))
        sequence.prefix_nodes = []
        sequence.host_slots = slots
        return True

    def swap_in(self, sequence: CachedSequence, blocks: list[int]) -> None:
        """Move the sequence's content to the device, into the first of `blocks`."""
        self.pending.loads.extend(zip(sequence.host_slots, blocks, strict=False))
        self.counters.blocks_swapped_in += len(sequence.host_slots)
        # Not free yet: this step reads these slots after its saves.
        self._free_after_step += sequence.host_slots
        sequence.host_slots = []

    def drop(self, sequence: CachedSequence) -> None:
        """Forget what a sequence has in host memory."""
        self._free += sequence.host_slots
        sequence.host_slots = []

    def end_step(self) -> None:
        """Free the slots that the transfers of the planned step read."""
        self._free += self._free_after_step
        self._free_after_step = []
