"""Compaction: makes a sequence's frames neighbours again, where that will save attention more than the copies cost.

A move changes a block's frame and nothing else, as in `moving`: tables, digests and references do not notice.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pagemill.memory.block_table import BlockTable
from pagemill.memory.core import MemoryCore
from pagemill.memory.work import Ints

SEGMENT = 32
"""Entries of a table that are made neighbours at once: long enough that its two ends do not matter, short enough to
find room, and to be copied within one step."""
PAYBACK_STEPS = 40
"""Decode steps after which one more pair of neighbours has saved the time of one copy: the longest that
`python -m benchmarks.compaction` has said, of 18 to 40."""


class Segment(NamedTuple):
    """Entries of a group's row, all movable: `blocks`, from entry `first` on, and those beside them, -1 for none."""

    group: int
    first: int
    blocks: Ints
    before: int
    after: int


class Compaction:
    """Moves segments of tables to where the fewest copies make their frames neighbours.

    What lies there and is cached takes the places that they leave. What is active in other tables stays, and so does
    what others share, has been pinned or is streamed.

    A pair of neighbours saves `1 / payback_steps` of a copy in each further step of its sequence, and a segment is
    moved if that is more than it takes.

    copies, sequences: made since the start, and the times that a sequence was moved.
    """

    payback_steps: float = PAYBACK_STEPS
    segment = SEGMENT

    def __init__(self, core: MemoryCore) -> None:
        self._core = core
        self.copies = 0
        self.sequences = 0

    def compact(self, table: BlockTable, steps_left: int, max_copies: int) -> int:
        """Moves what pays in `steps_left` further steps, with at most `max_copies` copies. Returns how many it took.

        What would take more than that is left as it is. Not while a step is in flight, and only as the last thing
        before `drain`: what is evicted after it would be saved from where it does not lie yet. O(entries), and O(pool)
        for each scattered segment that could pay.
        """
        # A block out of its place makes two steps lead elsewhere; to move less than it costs nothing can gain.
        if self._core.in_flight or 2 * steps_left <= self.payback_steps:
            return 0
        made, pool = 0, None
        for segment in list(self._scattered(table)):
            pool = pool or PoolMap(self._core)
            target = self._target(segment, pool, steps_left, max_copies - made)
            if target is not None and self._has_spare(table):
                made += self._move(table, segment, *target)
                pool = None
        self.copies += made
        self.sequences += made > 0
        return made

    def _scattered(self, table: BlockTable) -> Iterator[Segment]:
        core, size = self._core, self.segment
        frame = np.frombuffer(core.blocks.frame, dtype=np.int32)
        references = np.frombuffer(core.blocks.references, dtype=np.int32)
        is_streamed = np.frombuffer(core.blocks.streamed, dtype=np.uint8)
        for group, (entries, held) in enumerate(zip(table.blocks, table.first_held, strict=True)):
            blocks = np.array(entries[held:], dtype=np.int32)
            frames = frame[blocks]
            apart = np.diff(frames) != 1
            if not apart.any():
                continue
            stays = (references[blocks] != 1) | (is_streamed[blocks] != 0)
            # Segments begin at multiples of their size, wherever the window does.
            for start in range(-(held % size), len(blocks), size):
                first, end = max(start, 0), min(start + size, len(blocks))
                fixed = np.flatnonzero(stays[first:end])
                first += int(fixed[-1]) + 1 if len(fixed) else 0
                steps = apart[max(first - 1, 0) : end]
                if end - first >= 2 and steps.any():
                    before = int(blocks[first - 1]) if first else -1
                    after = int(blocks[end]) if end < len(blocks) else -1
                    yield Segment(group, held + first, blocks[first:end], before, after)

    def _target(self, segment: Segment, pool: PoolMap, steps_left: int, max_copies: int) -> tuple[int, int] | None:
        """Returns where it should begin, and how many copies may be made for that; None if no place pays."""
        frame_of, count = self._core.blocks.frame, len(segment.blocks)
        frames = np.frombuffer(frame_of, dtype=np.int32)[segment.blocks]
        # Where some blocks are in their places already, or where nothing is active.
        begins, in_place = np.unique(frames - np.arange(count, dtype=np.int32), return_counts=True)
        possible = (begins >= 0) & (begins + count <= self._core.frames.num_frames)
        begins, in_place = begins[possible], in_place[possible]
        own = ((frames >= begins[:, None]) & (frames < begins[:, None] + count)).sum(axis=1)
        fits = pool.active[begins + count] - pool.active[begins] == own
        empty = np.flatnonzero(pool.active[count:] == pool.active[:-count])
        starts = np.concatenate((begins[fits], empty))
        # Each block that is not in its place moves, and so does whatever else is there.
        copies = count + pool.occupied[starts + count] - pool.occupied[starts]
        copies[: np.count_nonzero(fits)] -= 2 * in_place[fits]
        cost = self.payback_steps * copies.astype(np.float64)
        now = steps_left * int(np.count_nonzero(np.diff(frames) != 1))
        for beside, offset, end in ((segment.before, 1, frames[0]), (segment.after, -count, frames[-1] - count + 1)):
            if beside >= 0:
                now += steps_left * int(frame_of[beside] + offset != end)
                cost += steps_left * (starts != frame_of[beside] + offset)
        cost[copies > max_copies] = np.inf
        best = int(np.argmin(cost)) if len(cost) else -1
        if best < 0 or cost[best] >= now:
            return None
        more = math.ceil((now - cost[best]) / self.payback_steps) - 1
        return int(starts[best]), min(max_copies, int(copies[best]) + more)

    def _has_spare(self, table: BlockTable) -> bool:
        """Returns whether a frame is free for others to change places through; evicts for it what would go next."""
        core = self._core
        if not core.frames.num_free and core.available(table.tenant):
            core.make_room(table.tenant, 1)
        return core.frames.num_free > 0

    def _move(self, table: BlockTable, segment: Segment, target: int, max_copies: int) -> int:
        """Moves a segment and returns the number of copies; 0, and no change, if it would be more than `max_copies`.

        Where hardly a frame is free, what makes way may have to do so twice.
        """
        core, occupant = self._core, occupants(self._core)
        pool, window = core.frames, range(target, target + len(segment.blocks))
        frame = {block: core.blocks.frame[block] for block in segment.blocks.tolist()}
        left: list[int] = []
        moves: list[tuple[int, int]] = []
        touched: list[int] = []

        def relocate(block: int, source: int, to: int) -> None:
            moves.append((block, to))
            occupant[source], occupant[to] = -1, block
            touched.extend((source, to))
            if block in frame:
                frame[block] = to

        for block, to in zip(segment.blocks.tolist(), window, strict=True):
            if frame[block] == to:
                continue
            if occupant[to] >= 0:
                relocate(int(occupant[to]), to, left.pop() if left else _spare(occupant, window))
            if frame[block] not in window:
                left.append(frame[block])
            relocate(block, frame[block], to)
        if len(moves) > max_copies:
            return 0
        for block, to in moves:
            core.move(block, to, streamed=False)
        changed = {at for at in touched if pool.is_free(at) == (occupant[at] >= 0)}
        pool.claim([at for at in changed if pool.is_free(at)])
        pool.give(sorted((at for at in changed if occupant[at] < 0), reverse=True))
        core.edit(table, segment.group, segment.first, window)
        return len(moves)


class PoolMap:
    """Counts, by frame and beyond the last, how many before it are occupied, and how many hold something active."""

    def __init__(self, core: MemoryCore) -> None:
        occupant = occupants(core)
        references = np.frombuffer(core.blocks.references, dtype=np.int32)
        self.occupied = _sums(occupant >= 0)
        self.active = _sums((occupant >= 0) & (references[occupant] > 0))


def occupants(core: MemoryCore) -> Ints:
    """Returns, by frame of the pool, the block in it, or -1."""
    frame = np.frombuffer(core.blocks.frame, dtype=np.int32)
    resident = np.frombuffer(core.blocks.streamed, dtype=np.uint8) == 0
    blocks = np.flatnonzero((frame >= 0) & resident).astype(np.int32)
    found = np.full(core.frames.num_frames, -1, dtype=np.int32)
    found[frame[blocks]] = blocks
    return found


def _sums(marked: NDArray[np.bool_]) -> Ints:
    sums = np.zeros(len(marked) + 1, dtype=np.int32)
    np.cumsum(marked, out=sums[1:])
    return sums


def _spare(occupant: Ints, window: range) -> int:
    """Returns a free frame, outside the window if there is one."""
    free = np.flatnonzero(occupant < 0)
    outside = free[(free < window.start) | (free >= window.stop)]
    return int((outside if len(outside) else free)[0])
