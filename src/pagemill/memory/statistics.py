"""Figures about one memory: its frames, how full they are, and how scattered a sequence's blocks lie."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from pagemill.memory.core import MemoryCore


@dataclass(frozen=True, slots=True)
class MemoryStats:
    """Frames now, and sums since the start. frames = frames_free + frames_cached + frames_active.

    blocks_streamed: active blocks beside these, in streamed frames.
    evictions_regretted: ghost hits: evicted blocks of one layer group that were computed or loaded again before as many
    others as the pool has frames were evicted.
    """

    frames: int
    frames_free: int
    frames_cached: int
    frames_active: int
    blocks_streamed: int
    evictions: int
    evictions_regretted: int
    copies: int


class Residency(NamedTuple):
    """Counts blocks by where they lie: in the pool, or in streamed frames."""

    resident: int
    streamed: int


class Occupancy(NamedTuple):
    """slots_reserved: slots of all blocks that tables hold; slots_written: those of them with a committed token.

    A block counts once, however many tables share it. Cached blocks that nobody holds are neither.
    """

    slots_reserved: int
    slots_written: int


class Scatter(NamedTuple):
    """table_steps: from one of a table's blocks to the next; table_steps_apart: those that lead to no neighbour."""

    table_steps: int
    table_steps_apart: int


def stats(core: MemoryCore) -> MemoryStats:
    """Implements `MemoryManager.stats`. O(tenants)."""
    frames, free, cached = core.frames.num_frames, core.frames.num_free, core.tenants.cached
    return MemoryStats(
        frames=frames,
        frames_free=free,
        frames_cached=cached,
        frames_active=frames - free - cached,
        blocks_streamed=core.streamed.active,
        evictions=sum(tenant.evictions for tenant in core.tenants),
        evictions_regretted=core.ghosts.hits,
        copies=core.num_copies,
    )


def residency(core: MemoryCore, blocks: Sequence[int]) -> Residency:
    """Counts blocks by where they lie. O(1) without streamed frames."""
    if not core.streamed.count:
        return Residency(len(blocks), 0)
    is_streamed = np.frombuffer(core.blocks.streamed, dtype=np.uint8)
    streamed = int(np.count_nonzero(is_streamed[np.array(blocks, dtype=np.int32)]))
    return Residency(len(blocks) - streamed, streamed)


def occupancy(core: MemoryCore) -> Occupancy:
    """Counts slots, O(tables and blocks reserved ahead). What only a step in flight holds counts as written.

    All entries before a table's last are full, so only the blocks from there on are looked at.
    """
    size, digest = core.block_size, core.index.digest
    written_in: dict[int, int] = {}  # of blocks that are not published, and therefore may have room
    for table in core.tables:
        tail, length = table.length // size, table.length
        for entries in table.blocks:
            for entry in range(tail, len(entries)):
                block = entries[entry]
                if not digest[block]:
                    written_in[block] = max(written_in.get(block, 0), length - entry * size)
    reserved = (core.frames.num_frames - core.num_available) * size
    empty = sum(size - max(written, 0) for written in written_in.values())
    return Occupancy(reserved, reserved - empty)


def scatter(core: MemoryCore) -> Scatter:
    """Counts steps between neighbours of all tables, O(their entries)."""
    frame = np.frombuffer(core.blocks.frame, dtype=np.int32)
    steps = apart = 0
    for table in core.tables:
        for entries, first in zip(table.blocks, table.first_held, strict=True):
            frames = frame[entries[first:]]
            steps += max(0, len(frames) - 1)
            apart += int(np.count_nonzero(np.diff(frames) != 1))
    return Scatter(steps, apart)
