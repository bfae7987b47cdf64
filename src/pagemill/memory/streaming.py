"""Streaming: blocks of a context longer than the pool stay in frames of a lower tier, where attention reads them.

They are moved there, or loaded straight into such frames. A move changes a block's frame and nothing else: tables,
digests and references do not notice.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from pagemill.memory.block_table import BlockTable
from pagemill.memory.moving import move

if TYPE_CHECKING:
    from pagemill.memory.manager import MemoryManager


class Places(NamedTuple):
    """Blocks by where they lie: in the pool, or in lower frames."""

    resident: int
    streamed: int


def places(manager: MemoryManager, table: BlockTable) -> Places:
    """Counted, O(entries) where there are lower frames."""
    if not manager.lower.count:
        return Places(table.num_held, 0)
    frame, first = np.frombuffer(manager._blocks.frame, dtype=np.int32), manager.lower.first
    held = (entries[start:] for entries, start in zip(table.blocks, table.first_held, strict=True))
    streamed = sum(int(np.count_nonzero(frame[np.array(ids, dtype=np.int32)] >= first)) for ids in held)
    return Places(table.num_held - streamed, streamed)


def places_of(manager: MemoryManager, blocks: Sequence[int]) -> Places:
    streamed = sum(manager._blocks.frame[block] >= manager.lower.first for block in blocks)
    return Places(len(blocks) - streamed, streamed)


def stream(manager: MemoryManager, table: BlockTable, count: int) -> bool:
    """Moves `count` of a table's blocks to lower frames, and makes theirs free; False, and no change, if it can not.

    The oldest go first, of those that are whole, in layers with full attention, and nobody else's: what others share
    or have pinned stays, and so does what a window sees. Not while a step is in flight, which reads them.
    """
    lower, blocks, residency = manager.lower, manager._blocks, manager._residency
    if residency.in_flight or count > lower.available:
        return False
    frame, references = (np.frombuffer(column, dtype=np.int32) for column in (blocks.frame, blocks.references))
    chosen: list[tuple[int, int]] = []
    for group, window in enumerate(manager.windows):
        if window is None:
            ids = np.array(table.blocks[group][: table.length // manager.block_size], dtype=np.int32)
            movable = np.flatnonzero((references[ids] == 1) & (frame[ids] < lower.first))
            chosen += [(int(entry), group) for entry in movable[:count]]
    if len(chosen) < count:
        return False
    chosen = sorted(chosen)[:count]
    entry, group = chosen[0]
    targets = take_lower(manager, count, table.blocks[group][entry - 1] if entry else -1)
    freed = []
    for (entry, group), target in zip(chosen, targets, strict=True):
        block = table.blocks[group][entry]
        freed.append(move(manager, block, target))
        manager._edit(table, group, entry, [blocks.frame[block]])
    manager._pool.give(freed)
    table.tenant.charged -= count
    return True


def take_lower(manager: MemoryManager, count: int, after: int) -> list[int]:
    """Lower frames, preferably behind that of block `after` (-1: none). So many must hold nothing active."""
    lower = manager.lower
    if (missing := count - lower.pool.num_free) > 0:
        manager._residency.evict_lower(missing)
    before = manager._blocks.frame[after] - lower.first if after >= 0 else -1
    frames = lower.pool.take(count, before if before >= 0 else None)
    assert frames is not None
    return [lower.first + frame for frame in frames]
