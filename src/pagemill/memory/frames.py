"""Frames: which places for blocks are free, in the pool and where attention streams from.

Nothing here knows what lies in them. A sequence reads faster when its frames are neighbours, so the pool
gives neighbours where it can, and leaves room for each sequence to grow into.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from pagemill.memory.eviction import Lru

REGION = 8
"""Frames between two places where the pool likes to start a sequence, so that one can grow before it meets the next.

More of them leave longer runs, but spread what is in use over more memory, which the system has to find and clear when
it is first written.
"""


class FramePool:
    """Frames 0 .. num_frames - 1, each free or taken. `take` and `give` cost O(1) per frame, however large the pool.

    Free frames are marked in a byte map, and listed on one of two stacks: those at a region's start, where sequences
    preferably begin, and the others. A frame taken as a neighbour stays listed; whoever pops it later finds a
    run of no free frames there, and pops the next. Each frame is listed at most once, so the `give` that listed it has
    paid for the pop in vain.
    """

    def __init__(self, num_frames: int) -> None:
        self.num_frames = num_frames
        self.num_free = num_frames
        self._free = bytearray(b"\1" * num_frames + b"\0")  # the last byte ends every run
        self._listed = bytearray(b"\1" * num_frames)
        self._starts = array("i", range((num_frames - 1) // REGION * REGION, -1, -REGION))
        self._others = array("i", [frame for frame in range(num_frames - 1, -1, -1) if frame % REGION])

    def take(self, count: int, after: int | None = None) -> list[int] | None:
        """Takes `count` free frames and returns them in the order in which they are best used; None if there are fewer.

        Begins at the frame following `after` where that is free, and goes on with neighbours as long as it can.
        """
        if count > self.num_free:
            return None
        self.num_free -= count
        free = self._free
        if count == 1 and after is not None and free[after + 1]:  # a growing sequence, by far the most frequent
            free[after + 1] = 0
            return [after + 1]
        taken: list[int] = []
        frame = self.num_frames if after is None else after + 1
        while count:
            end = free.find(0, frame, frame + count)
            run = count if end < 0 else end - frame
            if run:
                free[frame : frame + run] = bytes(run)
                taken += range(frame, frame + run)
                count -= run
            if count:
                frame = (self._starts or self._others).pop()
                self._listed[frame] = 0
        return taken

    def claim(self, frames: Sequence[int]) -> None:
        """Takes just these frames, which must be free."""
        for frame in frames:
            self._free[frame] = 0
        self.num_free -= len(frames)

    def give(self, frames: Sequence[int]) -> None:
        """Makes frames free again. Runs given from their end to their beginning are taken from their beginning on."""
        free, listed = self._free, self._listed
        for frame in frames:
            free[frame] = 1
            if not listed[frame]:
                listed[frame] = 1
                (self._others if frame % REGION else self._starts).append(frame)
        self.num_free += len(frames)

    def resize(self, num_frames: int) -> None:
        """Changes the number of frames. New ones are free; those that go are not taken again, and must not be given.

        O(change).
        """
        before, new = self.num_frames, num_frames - len(self._listed)
        self.num_frames = num_frames
        if num_frames < before:
            self.num_free -= self._free.count(1, num_frames, before)
            self._free[num_frames:before] = bytes(before - num_frames)
            return
        if new > 0:
            self._free.extend(bytes(new))
            self._listed.extend(bytes(new))
        self.give(range(num_frames - 1, before - 1, -1))

    @property
    def numbers(self) -> range:
        return range(self.num_frames)

    def is_free(self, frame: int) -> bool:
        return bool(self._free[frame])

    def count_free(self) -> int:
        """Counts free frames in the map, O(num_frames). Equals `num_free` unless the books are wrong."""
        return self._free.count(1)


class StreamedFrames:
    """Frames beside the pool, in host memory or on disk, from which attention streams blocks of long contexts.

    They are numbered from `first` on, which is above every frame that the pool may get, so that a table on the device
    can name both. cached: blocks in them that nobody holds but the index finds, the least recently used first.
    """

    def __init__(self, first: int = 0, count: int = 0) -> None:
        self.first = first
        self.count = count
        self.cached = Lru()
        self._frames = FramePool(count)

    @property
    def numbers(self) -> range:
        return range(self.first, self.first + self.count)

    @property
    def num_free(self) -> int:
        return self._frames.num_free

    @property
    def available(self) -> int:
        """Returns how many frames hold nothing active."""
        return self.num_free + len(self.cached)

    @property
    def active(self) -> int:
        """Returns how many blocks are streamed: held, and here."""
        return self.count - self.available

    def take(self, count: int, after: int | None) -> list[int]:
        """Takes `count` frames, as `FramePool.take`. There must be so many."""
        frames = self._frames.take(count, None if after is None else after - self.first)
        assert frames is not None
        return [self.first + frame for frame in frames]

    def give(self, frames: Sequence[int]) -> None:
        """Makes frames free again."""
        self._frames.give([frame - self.first for frame in frames])

    def is_free(self, frame: int) -> bool:
        return self._frames.is_free(frame - self.first)

    def count_free(self) -> int:
        """Counts free frames, as `FramePool.count_free`."""
        return self._frames.count_free()
