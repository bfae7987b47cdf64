"""How much of the memory that sequences hold is filled with tokens, and how scattered it lies."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from pagemill.memory.manager import MemoryManager


class Occupancy(NamedTuple):
    """reserved: slots of all blocks that tables hold; written: those of them with a committed token. A block counts
    once, however many tables share it. Cached blocks that nobody holds are neither."""

    reserved: int
    written: int


def occupancy(memory: MemoryManager) -> Occupancy:
    """Counted from the tables, O(tables and blocks reserved ahead). What only a step in flight holds counts as written.

    All entries before a table's last are full, so only the blocks from there on are looked at.
    """
    size, digest = memory.block_size, memory._index.digest
    written_in: dict[int, int] = {}  # of blocks that are not published, and therefore may have room
    for table in memory._tables:
        tail, length = table.length // size, table.length
        for entries in table.blocks:
            for entry in range(tail, len(entries)):
                block = entries[entry]
                if not digest[block]:
                    written_in[block] = max(written_in.get(block, 0), length - entry * size)
    reserved = memory.stats().frames_active * size
    empty = sum(size - max(written, 0) for written in written_in.values())
    return Occupancy(reserved, reserved - empty)


class Scatter(NamedTuple):
    """steps: from one of a table's blocks to the next; apart: those that do not lead to the neighbouring frame."""

    steps: int
    apart: int


def scatter(memory: MemoryManager) -> Scatter:
    """Counted from the tables, O(their entries)."""
    frame = np.frombuffer(memory._blocks.frame, dtype=np.int32)
    steps = apart = 0
    for table in memory._tables:
        for entries, first in zip(table.blocks, table.first_held, strict=True):
            frames = frame[entries[first:]]
            steps += max(0, len(frames) - 1)
            apart += int(np.count_nonzero(np.diff(frames) != 1))
    return Scatter(steps, apart)
