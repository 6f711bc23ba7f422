"""The tiers below the device: cold blocks of the prefix cache in host memory and on disk. Pure
Python."""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Iterable
from itertools import takewhile
from typing import NamedTuple, Protocol

from minivllm.cache.prefix import CachedSequence, PrefixIndex, PrefixNode, TokenSequence
from minivllm.cache.spec import CacheCounters, CacheLayout, PendingTransfers


class Finished(NamedTuple):
    """One finished job of the disk: a write, or a read into a host slot."""

    record: int
    slot: int | None  # None: a write
    error: str | None = None


class Disk(Protocol):
    """What the tiers need of a disk. Jobs come with Transfers, and end in the order in which they
    came."""

    @property
    def backlogged(self) -> bool:
        """Whether too many writes are waiting to add another."""

    def poll(self) -> list[Finished]:
        """The jobs that ended since the last call, failed jobs included."""


class OffloadTiers:
    """Keeps blocks that the device has overwritten. The least recently used block goes down a tier,
    and out, first.

    A block's content never changes, so a tier keeps its copy when the tier above restores the
    block: a block that leaves the device again costs nothing. Slots that this step's transfers read
    or write belong to that step (`_busy`): no other block gets them before `end_step`, since all
    saves are made before any load.

    Args:
        layout: how many blocks host memory and disk hold.
        prefix: the tree whose nodes are kept.
        counters: count what is moved.
        pending: gets the moves between the tiers.
        disk: does the reading and writing; None (no memory is real): every job ends before the next
            step is planned.
    """

    def __init__(
        self,
        layout: CacheLayout,
        prefix: PrefixIndex,
        counters: CacheCounters,
        pending: PendingTransfers,
        disk: Disk | None = None,
    ) -> None:
        self.prefix, self.counters, self.pending, self._disk = prefix, counters, pending, disk
        self._has_disk = layout.disk_records > 0
        self._most_ahead = layout.offload_slots // 2
        # Nodes by slot, the least recently used first.
        self.host: OrderedDict[int, PrefixNode] = OrderedDict()
        # Nodes by record, without those being read.
        self.disk: OrderedDict[int, PrefixNode] = OrderedDict()
        self.reading: dict[int, PrefixNode] = {}  # by target slot
        self._ahead: set[int] = set()  # slots that hold unused read-ahead
        self._free_slots: list[int] = []
        self._unused_slots = iter(
            range(layout.host_slots, layout.host_slots + layout.offload_slots)
        )
        self._free_records: list[int] = []
        self._unused_records = iter(range(layout.disk_records))
        self._busy: set[int] = set()
        self._freed_late: list[int] = []
        self._handed: list[Finished] = []
        self._num_reads = self._num_reads_done = 0

    def known(self, token_ids: TokenSequence) -> list[PrefixNode]:
        """The nodes that a request with these tokens may begin with in this step: not those that
        only the disk holds."""
        nodes = self.prefix.known(token_ids)
        return [*takewhile(lambda node: node.block or node.slot is not None, nodes)]

    def displace(self, block: int) -> None:
        """Note that the device overwrites a cached block. Its content is saved to a host slot,
        unless a tier holds it already or there is no slot."""
        node = self.prefix.take_block(block)
        if node.slot is None:
            slot = self._take_slot()
            if slot is not None and node.attached:  # making room may remove an ancestor
                self._busy.add(slot)
                self.host[slot] = node
                node.slot = slot
                self.counters.blocks_offloaded += 1
                self.pending.saves.append((block, slot))
            elif slot is not None:
                self._free_slots.append(slot)
        self._lose_if_nowhere(node)

    def hold(self, nodes: Iterable[PrefixNode]) -> None:
        """Keep what the tiers hold of these nodes for this step: a request uses them. The nodes are
        in order from the root."""
        for node in list(nodes)[::-1]:  # a parent outlives its children
            if node.slot is not None:
                self._ahead.discard(node.slot)
                self.host.move_to_end(node.slot)
                self._busy.add(node.slot)
            if node.record is not None and node.record in self.disk:
                self.disk.move_to_end(node.record)

    def load(self, nodes: Iterable[PrefixNode], blocks: list[int]) -> None:
        """Restore the nodes that are not on the device. Each takes the last of `blocks`."""
        for node in nodes:
            if not node.block:
                assert node.slot is not None
                self.prefix.place(node, blocks.pop())
                self.pending.loads.append((node.slot, node.block))
                self.counters.blocks_restored += 1

    def look_ahead(self, sequences: Iterable[tuple[CachedSequence, TokenSequence]]) -> None:
        """Note what was read from disk since the last step, and start to read what these sequences
        will need, as far as host memory has room.

        Args:
            sequences: waiting sequences, each with its tokens as in the manager's `admit`.
        """
        self.settle()
        for sequence, token_ids in sequences if self._has_disk else ():
            if self.may_look_ahead and not sequence.was_looked_ahead:
                sequence.was_looked_ahead = True
                self.prefetch(token_ids)

    def must_wait(self, sequence: CachedSequence, token_ids: TokenSequence) -> bool:
        """Whether the next sequence to admit has to wait for the disk. The first call starts to
        read the missing blocks. Blocks that leave host memory after that are computed again, so
        that no sequence waits twice."""
        if not self._has_disk:
            return False
        if sequence.disk_ticket is None:
            sequence.disk_ticket = self.prefetch(token_ids)
        return not self.has_read(sequence.disk_ticket)

    def prefetch(self, token_ids: TokenSequence) -> int:
        """Start to read the blocks of these tokens that are on disk only, as far as there are
        slots. Returns the ticket for `has_read`."""
        nodes = self.prefix.known(token_ids)
        self.hold(nodes)
        ticket, reads = 0, []
        for node in nodes:
            if node.block or node.slot is not None:
                continue
            if node.record is None:  # removed, to make room for the nodes before it
                break
            if node.record in self.disk:
                del self.disk[node.record]
                slot = self._take_slot()
                if slot is None:
                    self.disk[node.record] = node
                    break
                self.reading[slot] = node
                reads.append((node.record, slot))
                self._num_reads += 1
            ticket = self._num_reads
        self.pending.reads.extend(reads[::-1])  # a parent outlives its children
        return ticket

    @property
    def may_look_ahead(self) -> bool:
        """Whether to read for requests that are not the next: their blocks may take half of the
        host slots."""
        return len(self.reading) + len(self._ahead) < self._most_ahead

    def has_read(self, ticket: int) -> bool:
        """Whether all reads up to this ticket have ended, failed reads included."""
        return self._num_reads_done >= ticket

    def settle(self) -> None:
        """Process the disk's finished jobs. A block that the disk has lost is computed again by the
        next request that needs it."""
        finished, self._handed = self._handed if self._disk is None else self._disk.poll(), []
        for record, slot, error in finished:
            if error is not None:
                if not self.counters.disk_errors:
                    warnings.warn(
                        f"cache.offload_disk_gb: {error}; such blocks are computed again (told "
                        "once)",
                        stacklevel=2,
                    )
                self.counters.disk_errors += 1
            if slot is None:
                self._forget_record(self.disk.pop(record, None) if error is not None else None)
                continue
            self._num_reads_done += 1
            node = self.reading.pop(slot)
            if node.record != record or error is not None or node.slot is not None:
                # The node was removed while it was read, or is in host memory already.
                self._free_slots.append(slot)
            else:
                node.slot = slot
                self.host[slot] = node
                self._ahead.add(slot)
                self.counters.blocks_from_disk += 1
            if node.record == record:
                self.disk[record] = node
                if error is not None:
                    self._forget_record(self.disk.pop(record))

    def end_step(self) -> None:
        """Release the slots that the planned step's transfers use. To be called before the
        transfers are taken."""
        self._handed += [Finished(record, slot) for record, slot in self.pending.reads]
        self._busy.clear()
        self._free_slots += self._freed_late
        self._freed_late = []

    def lose(self, node: PrefixNode) -> None:
        """Remove a node, and the nodes below it, which no look-up would reach, from the tree and
        from all tiers."""
        for lost in self.prefix.lose(node):
            if lost.slot is not None:
                del self.host[lost.slot]
                self._ahead.discard(lost.slot)
                (self._freed_late if lost.slot in self._busy else self._free_slots).append(
                    lost.slot
                )
                lost.slot = None
            if lost.record is not None:
                self.disk.pop(lost.record, None)
                self._free_records.append(lost.record)
                lost.record = None

    def _lose_if_nowhere(self, node: PrefixNode) -> None:
        if not node.block and node.slot is None and node.record is None:
            self.lose(node)

    def _forget_record(self, node: PrefixNode | None) -> None:
        """Free the record of `node`, which is unreadable."""
        if node is not None and node.record is not None:
            self._free_records.append(node.record)
            node.record = None
            self._lose_if_nowhere(node)

    def _take_slot(self) -> int | None:
        """A slot to write to, from the least recently used node if none is free; None if all are
        busy."""
        slot = self._free_slots.pop() if self._free_slots else next(self._unused_slots, None)
        if slot is None and self.host:
            slot = next(iter(self.host))
            if slot in self._busy:  # then all slots are: a busy slot moves to the end
                return None
            self._ahead.discard(slot)
            self._sink(slot, self.host.pop(slot))
        return slot

    def _sink(self, slot: int, node: PrefixNode) -> None:
        """Move a node from host memory to disk, unless another tier holds it."""
        node.slot = None
        if (
            not node.block
            and node.record is None
            and not (self._disk is not None and self._disk.backlogged)
        ):
            record = self._take_record()
            if record is not None and node.attached:
                node.record = record
                self.disk[record] = node
                self.pending.spills.append((slot, record))
                self.counters.blocks_to_disk += 1
            elif record is not None:
                self._free_records.append(record)
        self._lose_if_nowhere(node)

    def _take_record(self) -> int | None:
        """A record to write to, from the least recently used node if none is free; None if all are
        being read, or there is no disk."""
        record = (
            self._free_records.pop() if self._free_records else next(self._unused_records, None)
        )
        if record is None and self.disk:
            record, node = self.disk.popitem(last=False)
            node.record = None
            self._lose_if_nowhere(node)
        return record
