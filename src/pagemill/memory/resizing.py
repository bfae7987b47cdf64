"""Shrinks and grows a memory manager's pool under its tables, which do not notice: blocks move, their holders stay."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pagemill.memory.moving import move

if TYPE_CHECKING:
    from pagemill.memory.manager import MemoryManager


def change_frames(manager: MemoryManager, num_frames: int) -> None:
    """Evicts cached blocks that no longer fit, and moves the others out of the frames that go. O(pool + tables).

    There must be at least as many frames as blocks that are held, and no step in flight.
    """
    pool, blocks = manager._pool, manager._blocks
    blocks.grow(num_frames + manager.lower.count)
    manager._index.grow(num_frames + manager.lower.count)
    while (excess := pool.num_frames - pool.num_free - num_frames) > 0:
        manager._residency.evict(*manager.tenants.loser(excess))
    pool.resize(num_frames)
    manager._residency.regret.resize(num_frames)
    frame_of = blocks.frame
    gone = range(num_frames, manager.lower.first)
    leaving = sorted((block for block in blocks.in_use() if frame_of[block] in gone), key=frame_of.__getitem__)
    targets = pool.take(len(leaving)) or []
    for block, target in zip(leaving, targets, strict=True):
        move(manager, block, target)
    moved = set(leaving)
    for table in manager._tables if moved else ():
        for group, entries in enumerate(table.blocks):
            for entry, block in enumerate(entries):
                if block in moved:
                    manager._edit(table, group, entry, [frame_of[block]])
