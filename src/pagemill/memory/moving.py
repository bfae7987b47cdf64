"""Moves blocks between frames: when the pool changes its size, and when a long context streams, or need not any more.

A move changes a block's frame and nothing else: tables, digests and references do not notice.
"""

from __future__ import annotations

from collections.abc import Set

import numpy as np

from pagemill.memory.block_table import BlockTable
from pagemill.memory.core import MemoryCore


def resize(core: MemoryCore, num_frames: int) -> None:
    """Evicts cached blocks that no longer fit, and moves the others out of the frames that go. O(pool + tables).

    There must be at least as many frames as blocks of the pool that are held, and no step in flight.
    """
    frames, blocks = core.frames, core.blocks
    blocks.grow(num_frames + core.streamed.count)
    core.index.grow(num_frames + core.streamed.count)
    if (excess := frames.num_frames - frames.num_free - num_frames) > 0:
        for tenant, count in core.tenants.shrinking(excess).items():
            core.evict(tenant, count)
    frames.resize(num_frames)
    core.ghosts.resize(num_frames)
    frame_of = blocks.frame
    outside = [block for block in blocks.in_use() if frame_of[block] >= num_frames and not blocks.streamed[block]]
    leaving = sorted(outside, key=frame_of.__getitem__)
    targets = frames.take(len(leaving)) or []
    for block, target in zip(leaving, targets, strict=True):
        core.move(block, target, streamed=False)
    moved = set(leaving)
    for table in core.tables if moved else ():
        for group, entries in enumerate(table.blocks):
            for entry, block in enumerate(entries):
                if block in moved:
                    core.edit(table, group, entry, [frame_of[block]])


def stream(core: MemoryCore, table: BlockTable, count: int) -> bool:
    """Implements `MemoryManager.stream`."""
    if core.in_flight or count > core.streamed.available:
        return False
    chosen = _movable(core, table, slice(table.length // core.block_size), slice(count), streamed=False)
    if len(chosen) < count:
        return False
    entry, group = chosen[0]
    targets = core.take_streamed(count, table.blocks[group][entry - 1] if entry else -1)
    freed = []
    for (entry, group), target in zip(chosen, targets, strict=True):
        freed.append(core.move(table.blocks[group][entry], target, streamed=True))
        core.edit(table, group, entry, [target])
    core.frames.give(freed)
    table.tenant.charged -= count
    return True


def unstream(core: MemoryCore, table: BlockTable, count: int) -> int:
    """Implements `MemoryManager.unstream`."""
    tenant = table.tenant
    count = min(count, core.available(tenant), tenant.room)
    if core.in_flight or count <= 0:
        return 0
    chosen = _movable(core, table, slice(None), slice(-count, None), streamed=True)
    if not chosen:
        return 0
    core.make_room(tenant, len(chosen))
    tenant.charged += len(chosen)
    freed = []
    for entry, group in chosen:
        held = table.blocks[group]
        (target,) = core.take(1, held[entry - 1] if entry else -1)
        freed.append(core.move(held[entry], target, streamed=False))
        core.edit(table, group, entry, [target])
    core.streamed.give(freed)
    return len(chosen)


def _movable(
    core: MemoryCore, table: BlockTable, entries: slice, part: slice, *, streamed: bool
) -> list[tuple[int, int]]:
    """Returns a part of the blocks that a table alone holds, of those that are streamed or that are not, in groups with
    full attention: entries, of the given ones, and their groups, the oldest first."""
    references = np.frombuffer(core.blocks.references, dtype=np.int32)
    lies_there = np.frombuffer(core.blocks.streamed, dtype=np.uint8) == streamed
    found: list[tuple[int, int]] = []
    for group, window in enumerate(core.windows):
        if window is None:
            ids = np.array(table.blocks[group][entries], dtype=np.int32)
            movable = np.flatnonzero((references[ids] == 1) & lies_there[ids])
            found += [(int(entry), group) for entry in movable[part]]
    return sorted(found)[part]


def forget_lost(core: MemoryCore, frames: Set[int]) -> None:
    """Implements `MemoryManager.forget_lost`."""
    core.saves = [save for save in core.saves if save.frame not in frames]
    index, blocks, lost = core.index, core.blocks, set[tuple[int, bytes]]()
    published = [block for block in blocks.in_use() if index.digest[block]]
    for block in sorted(published, key=index.depth.__getitem__):
        group, digest = blocks.group[block], index.digest[block]
        if blocks.frame[block] in frames or (group, index.parent[block]) in lost:
            lost.add((group, digest))
            core.forget(block)
