"""Blocks: handles for contents, apart from the frames in which these lie.

A block is `block_size` tokens of K and V of one layer group. Tables name blocks, never frames, so a content can move
without its holders noticing. Here stands who holds a block and where it is, and in the prefix index what makes it
findable.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence


class Blocks:
    """One id space for the blocks of all groups. O(1) per block; columns are indexed by block id.

    references: block tables that name the block, and steps in flight that hold it. 0 for a block that is only findable,
                and for an unused id.
    frame:      its place, -1 for an unused id.
    group:      its layer group.
    """

    def __init__(self, capacity: int) -> None:
        self.references = array("i")
        self.frame = array("i")
        self.group = array("i")
        self._unused = array("i")
        self.grow(capacity)

    def grow(self, capacity: int) -> None:
        """Ids for so many blocks, if there are fewer."""
        known = len(self.references)
        more = max(0, capacity - known)
        self.references.extend(array("i", bytes(4 * more)))
        self.frame.extend(array("i", [-1]) * more)
        self.group.extend(array("i", bytes(4 * more)))
        self._unused.extend(range(known + more - 1, known - 1, -1))

    def new(self, group: int, frames: Sequence[int]) -> list[int]:
        """One new block in each frame, each with one reference."""
        references, frame_of, group_of, unused = self.references, self.frame, self.group, self._unused
        created = []
        for frame in frames:
            block = unused.pop()
            references[block] = 1
            frame_of[block] = frame
            group_of[block] = group
            created.append(block)
        return created

    def hold(self, blocks: Iterable[int]) -> list[int]:
        """Adds a reference to each; returns those that had none."""
        references = self.references
        woken = []
        for block in blocks:
            count = references[block]
            references[block] = count + 1
            if not count:
                woken.append(block)
        return woken

    def drop(self, blocks: Iterable[int]) -> list[int]:
        """Takes a reference from each; returns those that have none left, in the order given."""
        references = self.references
        idle = []
        for block in blocks:
            count = references[block] - 1
            references[block] = count
            if not count:
                idle.append(block)
        return idle

    def end(self, blocks: Iterable[int]) -> list[int]:
        """Ends blocks without references: their ids are unused again. Returns the frames they leave."""
        frame_of = self.frame
        frames = []
        for block in blocks:
            frames.append(frame_of[block])
            frame_of[block] = -1
            self._unused.append(block)
        return frames

    def in_use(self) -> list[int]:
        """Ids of all blocks, O(capacity)."""
        return [block for block, frame in enumerate(self.frame) if frame >= 0]
