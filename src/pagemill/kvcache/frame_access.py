"""FrameAccess: how lower tiers read and write frames of the pool, whatever device that lies on."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from pagemill.kvcache.device_pool import DevicePool
from pagemill.kvcache.pages_ahead import PagesAhead
from pagemill.kvcache.records import Places


class FrameAccess(Protocol):
    """Copies records, uint8 [record bytes], out of frames and into them."""

    def read(self, frames: Sequence[int]) -> tuple[NDArray[np.uint8], list[bool]]:
        """Returns the records [n, record bytes] of these frames, and which of them could be read."""
        ...

    def mark(self) -> object | None:
        """Returns a mark of what the device has been asked to do so far; None on a device that does it at once."""
        ...

    def begin_writes(self) -> None:
        """Prepares for `write`; each call is followed by one of `end_writes`."""
        ...

    def end_writes(self) -> None: ...

    def write(self, frames: Sequence[int], after: Any) -> AbstractContextManager[Places]:
        """Gives a place for each frame's record, to be filled by any thread; the frames hold them when the context
        ends. What `after` marks comes first. Raises KVStoreError, on leaving, if a disk does not take them."""
        ...


class PooledFrames:
    """Gives access to the frames of a pool in this process; `pages` makes the memory that is written."""

    def __init__(self, pool: DevicePool, pages: PagesAhead) -> None:
        self._pool = pool
        self._pages = pages

    def read(self, frames: Sequence[int]) -> tuple[NDArray[np.uint8], list[bool]]:
        return self._pool.read_frames(frames)

    def mark(self) -> object | None:
        return self._pool.mark()

    def begin_writes(self) -> None:
        self._pages.begin()

    def end_writes(self) -> None:
        self._pages.end()

    def write(self, frames: Sequence[int], after: Any) -> AbstractContextManager[Places]:
        self._pages.make(frames)
        return self._pool.records(frames, after)
