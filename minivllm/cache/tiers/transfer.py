"""Moves of blocks between the device, host memory and disk."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from minivllm.cache.kv import KVCache, zeros
from minivllm.cache.spec import Transfers
from minivllm.cache.tiers.disk import DiskFile

STAGING_BYTES = 1 << 26  # most memory that one copy takes between host and device


class BlockTransfers:
    """Moves blocks between the tiers, and owns the memory of the tiers below the device.

    Attributes:
        row_bytes: what a block takes here.
        block_bytes: what it takes on all ranks, see `give`.

    Args:
        kv: the cache on the device, whose layout has slots in host memory and records on disk.
    """

    def __init__(self, kv: KVCache) -> None:
        self.blocks = blocks = kv.blocks
        # A row of bytes for each slot, all layers side by side: one copy across the bus, and a
        # record on disk.
        self._widths = [part[0].nbytes for part in blocks]
        self.row_bytes = self.block_bytes = sum(self._widths)
        rows = (kv.layout.host_slots + kv.layout.offload_slots, self.row_bytes)
        if blocks[0].is_cuda and rows[0]:
            self.host = torch.zeros(rows, dtype=torch.uint8, pin_memory=True)
        else:
            self.host = zeros(rows, torch.uint8, torch.device("cpu"))
        self.disk = DiskFile(kv.layout.offload_dir, rows[1]) if kv.layout.disk_records else None
        if self.disk is not None:  # for an engine without close()
            weakref.finalize(self, self.disk.close)
        # Moves of a call that failed: the next step makes them, since the pool relies on them.
        self.unfinished: deque[Callable[[], None]] = deque()

    def run(self, moves: Transfers) -> None:
        """Move blocks between device, host and disk and within the device, in the order of the
        fields of Transfers; first those that are `unfinished`, as a call may fail (out of memory,
        an interrupt)."""
        self.unfinished += [partial(self._spill, *pair) for pair in moves.spills]
        for pairs, move in (
            (moves.saves, self._save),
            (moves.copies, self._copy),
            (moves.loads, self._load),
        ):
            if pairs:
                pieces = torch.tensor(pairs).split(max(1, STAGING_BYTES // self.row_bytes))
                self.unfinished += [partial(move, *piece.unbind(1)) for piece in pieces]
        self.unfinished += [partial(self._read, *pair) for pair in moves.reads]
        while self.unfinished:
            self.unfinished[0]()
            self.unfinished.popleft()

    def _spill(self, slot: int, record: int) -> None:
        assert self.disk is not None
        self.disk.write(record, memoryview(self.host.numpy()[slot].tobytes()))

    def _read(self, record: int, slot: int) -> None:
        assert self.disk is not None
        self.disk.read(record, slot, memoryview(self.host.numpy()[slot]))

    def give(self, blocks: Sequence[int]) -> bytes:
        """A copy of blocks for another engine: one after the other, each with all layers side by
        side. Where there are several ranks, each block has their parts in the order of the ranks
        (`minivllm.extras.ranked_steps`)."""
        return self.rows(torch.tensor(blocks, dtype=torch.int64)).numpy().tobytes()

    def take(self, blocks: Sequence[int], content: bytes) -> None:
        """Write what `give` gave into blocks."""
        rows = torch.frombuffer(bytearray(content), dtype=torch.uint8).view(-1, self.row_bytes)
        self.fill(torch.tensor(blocks), rows)

    def rows(self, blocks: Tensor) -> Tensor:
        """A copy of blocks [n] on the host, uint8 [n, bytes]."""
        blocks = blocks.to(self.blocks[0].device)
        rows = [part[blocks].flatten(1).view(torch.uint8) for part in self.blocks]
        return torch.cat(rows, 1).cpu()

    def fill(self, blocks: Tensor, rows: Tensor) -> None:
        """Write rows of `rows` into blocks [n]."""
        blocks = blocks.to(self.blocks[0].device)
        for part, row in zip(
            self.blocks, rows.to(blocks.device).split(self._widths, 1), strict=True
        ):
            part[blocks] = row.contiguous().view(part.dtype).view(-1, *part.shape[1:])

    def _save(self, blocks: Tensor, slots: Tensor) -> None:
        self.host[slots] = self.rows(blocks)

    def _copy(self, sources: Tensor, targets: Tensor) -> None:
        for part in self.blocks:
            part[targets.to(part.device)] = part[sources.to(part.device)]

    def _load(self, slots: Tensor, blocks: Tensor) -> None:
        self.fill(blocks, self.host[slots])

    def close(self) -> None:
        """Remove the file on disk."""
        if self.disk is not None:
            self.disk.close()
