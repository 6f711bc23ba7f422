"""The block pool under arbitrary use, with its integrity checked after every step."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from minivllm.cache.pool import BlockPool, BlockTable


class PoolMachine(RuleBasedStateMachine):
    """Tables grow, shrink, share blocks and go, in any order."""

    tables = Bundle("tables")

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(9)
        self.live: list[BlockTable] = []

    @rule(target=tables)
    def create(self) -> BlockTable:
        table = BlockTable()
        self.live.append(table)
        return table

    @rule(table=tables, count=st.integers(0, 5))
    def grow(self, table: BlockTable, count: int) -> None:
        free = self.pool.num_free
        blocks = self.pool.allocate(count)
        if count > free:
            assert blocks is None
            assert self.pool.num_free == free
        else:
            assert blocks is not None
            assert len(set(blocks)) == count
            assert 0 not in blocks
            table.extend(blocks)

    @rule(target=tables, table=tables)
    def fork(self, table: BlockTable) -> object:
        copy = BlockTable()
        self.pool.share(table.blocks)
        copy.extend(table.blocks)
        self.live.append(copy)
        return multiple(copy)

    @rule(table=tables, length=st.integers(0, 4))
    def truncate(self, table: BlockTable, length: int) -> None:
        version, before = table.version, len(table.blocks)
        self.pool.release(table.truncate(length))
        assert len(table.blocks) == min(before, length)
        assert (table.version > version) == (before > length)

    @rule(table=consumes(tables))
    def drop(self, table: BlockTable) -> None:
        self.pool.release(table.truncate(0))
        self.live = [other for other in self.live if other is not table]

    @invariant()
    def holds_together(self) -> None:
        self.pool.check_integrity(self.live)
        assert self.pool.num_used + self.pool.num_free == self.pool.num_usable


TestPool = PoolMachine.TestCase


def test_blocks_in_turn_touch_no_more_memory_than_blocks_at_once() -> None:
    pool = BlockPool(100)
    touched: set[int] = set()
    for _ in range(20):
        blocks = pool.allocate(3)
        assert blocks is not None
        touched.update(blocks)
        pool.release(blocks[::-1])
    assert len(touched) == 3


@given(st.lists(st.tuples(st.sampled_from("alrsc"), st.integers(1, 8), st.booleans())))
def test_the_free_list_is_one_list_in_two_parts(actions: list[tuple[str, int, bool]]) -> None:
    cached: set[int] = set()
    pool = BlockPool(9, cached.__contains__, cached.discard)
    free, used = list(range(1, 9)), list[int]()
    for action, number, is_cached in actions:
        if action == "a":
            blocks = pool.allocate(number)
            assert blocks == (free[:number] if number <= len(free) else None)
            free, used = (free[number:], [*used, *blocks]) if blocks else (free, used)
        elif action == "l":
            cached.discard(number)  # a lost block of the prefix cache keeps its place
        elif action == "r" and number in used:
            used.remove(number)
            (cached.add if is_cached else cached.discard)(number)
            free = [*free, number] if is_cached else [number, *free]
            pool.release([number])
        elif action == "s" and number in free and number in cached:
            free.remove(number)
            used.append(number)
            pool.share([number])
        elif action == "c" and not used:
            cached.clear()
            free.sort()
            pool.recycle()
        assert pool.num_free == len(free) and pool.num_used == len(used)


def test_misuse_is_refused() -> None:
    pool = BlockPool(3)
    with pytest.raises(ValueError, match="released more often"):
        pool.release([1])
    with pytest.raises(ValueError, match="cannot be shared"):
        pool.share([2])
    with pytest.raises(ValueError, match="at least 2"):
        BlockPool(1)


def test_integrity_check_sees_a_leak() -> None:
    pool = BlockPool(4)
    pool.allocate(1)
    with pytest.raises(AssertionError, match="reference counts"):
        pool.check_integrity([])
