"""The block map: for each frame what lies in it, whose it is and how many hold it, summed up in cells for people."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from pagemill.memory.block_table import BlockTable
from pagemill.memory.core import MemoryCore
from pagemill.memory.tenants import Tenant

STATES = ("cached", "active", "shared", "pinned", "loading")
"""States of a block as the map shows them: of those that fit, the last. A frame that is in none of them is free."""
MAP_COLUMNS = (*STATES, "owner", "holders")
"""What a cell says: how many blocks it has in each state; the most holders that one of them has, and its owner."""
OTHERS = (1 << 13) - 1
"""The owner of blocks of tenants that must not be told apart. Else it is a tenant's number + 1, and 0 is nobody."""
MOST = (1 << 16) - 1
"""The largest number in a cell, which stands for any beyond it."""

_CACHED, _ACTIVE, _SHARED, _PINNED, _LOADING = range(1, len(STATES) + 1)
_OWNER_BITS, _STATE_BITS = 13, 3
_ANY_STATE = (1 << _STATE_BITS) - 1
_CHUNK = 1 << 15
"""Blocks that are looked at together: as many as stay in a core's cache."""


class TierMap(NamedTuple):
    """The frames of one tier, in order, `frames_per_cell` to a cell. cells: one row per cell, see `MAP_COLUMNS`."""

    first_frame: int
    num_frames: int
    frames_per_cell: int
    cells: npt.NDArray[np.uint16]


def block_map(
    core: MemoryCore,
    pinned: Iterable[BlockTable],
    arriving: Sequence[int],
    seen_by: Tenant | None,
    max_cells: int,
) -> tuple[TierMap, TierMap]:
    """Implements `MemoryManager.block_map`."""
    place, pool_size, streamed = _Places(core, seen_by), core.frames.num_frames, core.streamed
    owners = np.frombuffer(core.blocks.owner, np.int32)
    for begin in range(0, len(owners), _CHUNK):
        ids = slice(begin, begin + _CHUNK)
        place.put(ids, owners[ids])
    for tenant, blocks in _unpublished(core):
        place.put(np.array(blocks, np.int32), tenant.number)
    for table in pinned:
        place.mark(np.frombuffer(table.held, np.int32), _PINNED)
    place.mark(np.array(arriving, np.int32), _LOADING)
    return (
        _tier(0, place.by_frame[:pool_size], max_cells),
        _tier(streamed.first, place.by_frame[pool_size:-1], max_cells),
    )


def _unpublished(core: MemoryCore) -> Iterator[tuple[Tenant, Sequence[int]]]:
    """Yields blocks whose owner stands in the tables and steps that hold them, since they may not be published yet."""
    for table in core.tables:
        for entries, first in zip(table.blocks, table.first_held, strict=True):
            if unpublished := entries[max(first, table.published) :]:
                yield table.tenant, unpublished
    for _, tenant, blocks in core.held:
        yield tenant, blocks


class _Places:
    """By frame, what lies in it as one number: from the highest bits on holders, owner, state. Pool first.

    The last entry is no frame's: ids that are no block's have frame -1, and write it.
    """

    def __init__(self, core: MemoryCore, seen_by: Tenant | None) -> None:
        self._references = np.frombuffer(core.blocks.references, np.int32)
        self._frame = np.frombuffer(core.blocks.frame, np.int32)
        self._streamed, self._pool_size = core.streamed, core.frames.num_frames
        self._own = None if seen_by is None else seen_by.number + 1
        self.by_frame = np.zeros(self._pool_size + core.streamed.count + 1, np.uint32)

    def put(self, ids: slice | npt.NDArray[np.int32], tenant: npt.NDArray[np.int32] | int) -> None:
        """Puts blocks of tenants of these numbers where they lie."""
        holders, owner = self._references[ids], np.add(tenant, 1, dtype=np.int32)
        state = np.minimum(holders, _SHARED - _CACHED) + _CACHED
        if self._own is not None:
            strange = owner != self._own
            state = np.where(strange, np.minimum(state, _ACTIVE), state)
            holders = np.where(strange, np.minimum(holders, 1), holders)
            owner = np.where(strange, OTHERS, owner)
        packed = np.minimum(holders, MOST)
        packed <<= _OWNER_BITS
        packed |= owner
        packed <<= _STATE_BITS
        packed |= state
        self.by_frame[self._place(self._frame[ids]).astype(np.intp)] = packed.view(np.uint32)

    def mark(self, ids: npt.NDArray[np.int32], state: int) -> None:
        """Gives blocks another state, unless they are another tenant's and must not be told apart."""
        places = self._place(self._frame[ids])
        packed = self.by_frame[places]
        owner = (packed >> _STATE_BITS) & OTHERS
        self.by_frame[places] = np.where(owner == OTHERS, packed, packed & ~np.uint32(_ANY_STATE) | state)

    def _place(self, frame: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
        if not self._streamed.count:
            return frame
        return np.where(frame >= self._streamed.first, frame - self._streamed.first + self._pool_size, frame)


def _tier(first_frame: int, by_frame: npt.NDArray[np.uint32], max_cells: int) -> TierMap:
    """Sums up the frames of a tier."""
    per_cell = max(1, -(-len(by_frame) // max_cells))
    num_cells = -(-len(by_frame) // per_cell)
    cells = np.zeros((num_cells, len(MAP_COLUMNS)), np.uint16)
    if num_cells:
        padded = np.zeros(num_cells * per_cell, np.uint32)
        padded[: len(by_frame)] = by_frame
        state, each = (padded & _ANY_STATE).astype(np.uint8), np.ones(per_cell, np.float32)
        for column in range(len(STATES)):
            found = state == column + 1
            if found.any():
                counts = found.astype(np.float32).reshape(num_cells, per_cell) @ each  # exact up to 2**24
                cells[:, column] = np.minimum(counts, MOST)
        most_held = np.maximum.reduceat(padded, np.arange(0, len(padded), per_cell))
        cells[:, -2] = (most_held >> _STATE_BITS) & OTHERS
        cells[:, -1] = most_held >> (_STATE_BITS + _OWNER_BITS)
    return TierMap(first_frame, len(by_frame), per_cell, cells)
