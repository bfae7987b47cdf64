"""Blocks that come free with a table: those that no other holds."""

from __future__ import annotations

from pagemill.memory.manager import MemoryManager


def test_blocks_that_others_hold_are_not_a_tables_own():
    memory = MemoryManager(32, 4, [None, 8])
    one, other, empty = (memory.open([], [], b"root", 0.0, 0).table for _ in range(3))
    memory.reserve(one, 16)
    memory.commit(one, 12, list(range(12)), [])
    memory.reserve(other, 4)
    assert not memory.shares_blocks
    assert memory.count_own([one, empty, other]).tolist() == [one.num_held, 0, 2]
    child = memory.fork(one, 12)
    memory.check()
    assert memory.shares_blocks
    assert memory.count_own([other, one, child]).tolist() == [2, one.num_held - child.num_held, 0]
    memory.close(child, 1.0)
    memory.check()
    assert not memory.shares_blocks
    assert memory.count_own([one]).tolist() == [one.num_held]
