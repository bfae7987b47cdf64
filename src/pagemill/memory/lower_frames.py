"""LowerFrames: places below the pool, in a lower tier, in which attention can read a block."""

from __future__ import annotations

from pagemill.memory.eviction import Lru
from pagemill.memory.frames import FramePool

NO_LOWER = 2**31 - 1
"""Number of the first lower frame where there is none: above every frame of a pool."""


class LowerFrames:
    """`count` frames, numbered from `first` on, which is above every frame that the pool may get.

    cached: blocks in them that nobody holds but the index finds, the least recently used first.
    """

    def __init__(self, first: int, count: int) -> None:
        self.first = first
        self.count = count
        self.pool = FramePool(count)
        self.cached = Lru()

    @property
    def numbers(self) -> range:
        """Of all of them."""
        return range(self.first, self.first + self.count)

    @property
    def available(self) -> int:
        """Frames that hold nothing active."""
        return self.pool.num_free + len(self.cached)

    @property
    def active(self) -> int:
        """Blocks that are streamed: held, and here."""
        return self.count - self.available
