"""Blocks of the KV cache: which request owns a block, and which block is allocated next. Pure
Python, no tensors."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable


class BlockTable:
    """The cache blocks of one request, in order of position.

    A table grows at the end; only rollback and eviction change it otherwise. Each such change
    increases `version`, so that a copy on the device knows when it is stale."""

    __slots__ = ("blocks", "version")

    def __init__(self) -> None:
        self.blocks: list[int] = []
        self.version = 0

    def extend(self, blocks: Iterable[int]) -> None:
        """Add blocks at the end. A mirror of the first blocks stays valid."""
        self.blocks.extend(blocks)

    def replace(self, index: int, block: int) -> int:
        """Put another block at `index`, and return the block that it replaces."""
        old, self.blocks[index] = self.blocks[index], block
        self.version += 1
        return old

    def drop(self, indices: Iterable[int]) -> list[int]:
        """Remove the blocks at `indices`, and return them, the last one first."""
        removed = [self.blocks.pop(index) for index in sorted(indices, reverse=True)]
        self.version += bool(removed)
        return removed

    def truncate(self, length: int) -> list[int]:
        """Keep the first `length` blocks and return the others, last one first."""
        removed = self.blocks[length:][::-1]
        del self.blocks[length:]
        self.version += bool(removed)
        return removed


class BlockPool:
    """A fixed number of blocks with reference counts and a free list.

    Block 0 is never allocated: padding points at it. Allocation takes free blocks from the front of
    the list. A block whose content cannot be used again goes back to the front: then the memory in
    use is that of the requests running at once, not of all requests so far. A block of the prefix
    cache goes to the back, so that the least recently used one is taken first. The list is kept in
    two parts, as only the back needs removal at any place; the front takes four bytes a block.
    Design after vLLM's block pool.

    Args:
        num_blocks: all blocks, the reserved one included; at least 2.
        is_cached: whether the prefix cache may still use a block's content.
        on_reuse: called with each cached block before its content is overwritten.
    """

    def __init__(
        self,
        num_blocks: int,
        is_cached: Callable[[int], bool] = lambda _: False,
        on_reuse: Callable[[int], None] = lambda _: None,
    ) -> None:
        if num_blocks < 2:
            raise ValueError(
                f"a block pool needs at least 2 blocks (one is reserved), got {num_blocks}"
            )
        self.num_blocks = num_blocks
        self._is_cached, self._on_reuse = is_cached, on_reuse
        self.ref_counts = [0] * num_blocks
        self._front = array("i", range(num_blocks - 1, 0, -1))  # the next block is its last
        self._back: OrderedDict[int, None] = OrderedDict()
        self.allocated_total = 0  # liveness counter: blocks allocated so far

    @property
    def num_free(self) -> int:
        """Blocks that can be allocated now."""
        return len(self._front) + len(self._back)

    @property
    def num_usable(self) -> int:
        """Blocks that can ever be allocated."""
        return self.num_blocks - 1

    @property
    def num_used(self) -> int:
        """Blocks held by at least one request."""
        return self.num_usable - self.num_free

    def allocate(self, count: int) -> list[int] | None:
        """Take `count` blocks, or none of them (None) if too few are free."""
        if count > self.num_free:
            return None
        front, back = self._front, self._back
        blocks = [front.pop() if front else back.popitem(last=False)[0] for _ in range(count)]
        for block in blocks:
            self.ref_counts[block] = 1
            if self._is_cached(block):
                self._on_reuse(block)
        self.allocated_total += count
        return blocks

    def share(self, blocks: Iterable[int]) -> None:
        """Add a reference to each block, in use or cached; a cached one leaves the free list."""
        counts, is_cached = self.ref_counts, self._is_cached
        for block in blocks:
            if counts[block] < 1:
                if not is_cached(block):
                    raise ValueError(f"block {block} is free and cannot be shared")
                del self._back[block]
            counts[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """Drop one reference to each block, in the order given; unreferenced ones become free."""
        counts, is_cached = self.ref_counts, self._is_cached
        for block in blocks:
            if counts[block] < 1:
                raise ValueError(f"block {block} was released more often than it was taken")
            counts[block] -= 1
            if counts[block] == 0 and is_cached(block):
                self._back[block] = None
            elif counts[block] == 0:
                self._front.append(block)

    def recycle(self) -> None:
        """Sort the free blocks, once no block is cached any more."""
        self._front = array("i", sorted([*self._front, *self._back], reverse=True))
        self._back.clear()

    def check_integrity(self, tables: Iterable[BlockTable]) -> None:
        """Assert that references, tables and the free list agree. Costs O(blocks); for tests."""
        references = [0] * self.num_blocks
        for table in tables:
            for block in table.blocks:
                references[block] += 1
        assert references == self.ref_counts, "reference counts differ from the block tables"
        assert references[0] == 0, "the reserved block is in use"
        unused = [block for block in range(1, self.num_blocks) if not references[block]]
        free = sorted([*self._front, *self._back])
        assert free == unused, "a block is free and used, neither, or free twice"
        assert not any(map(self._is_cached, self._front)), "a cached block is not in the back"
