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
    frame:      where its contents lie, -1 for an unused id.
    streamed:   1 if that is a streamed frame, 0 if it is one of the pool, and for an unused id.
    versions:   rises when a block is published, and when one moves, so that who reads a frame beside all this can see
                whether it held one block all the time.
    group:      its layer group.
    owner:      of a published block, the number of the tenant in whose namespace it is.
    num_shared: how many blocks have more than one reference.
    """

    def __init__(self, capacity: int) -> None:
        self.references = array("i")
        self.frame = array("i")
        self.streamed = bytearray()
        self.versions = array("I")
        self.group = array("i")
        self.owner = array("i")
        self.num_shared = 0
        self._unused = array("i")  # ids that are no block's; the next one to be given out comes last
        self.grow(capacity)

    def grow(self, capacity: int) -> None:
        """Makes room for ids below `capacity`, if there is less."""
        known = len(self.references)
        more = max(0, capacity - known)
        for column in (self.references, self.group, self.owner):
            column.extend(array("i", bytes(4 * more)))
        self.versions.extend(array("I", bytes(4 * more)))
        self.frame.extend(array("i", [-1]) * more)
        self.streamed.extend(bytes(more))
        self._unused.extend(range(known + more - 1, known - 1, -1))

    def new(self, group: int, frames: Sequence[int]) -> list[int]:
        """Makes one new block in each frame, each with one reference; see `set_streamed`."""
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
            elif count == 1:
                self.num_shared += 1
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
            elif count == 1:
                self.num_shared -= 1
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

    def set_streamed(self, blocks: Iterable[int], streamed: bool) -> None:
        """Says of new or ended blocks whether their frames are streamed ones."""
        for block in blocks:
            self.streamed[block] = streamed

    def in_use(self) -> list[int]:
        """Returns the ids of all blocks. O(capacity)."""
        return [block for block, frame in enumerate(self.frame) if frame >= 0]
