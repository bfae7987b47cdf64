"""PagesAhead: the pool's next pages are found and cleared by the system before the engine writes them.

The first write to a page costs far more than the write itself: a huge page is 2 MiB to find and clear, in a virtual
machine twice over. A thread of its own does that for frames ahead of those in use, so that no step waits for it.
"""

from __future__ import annotations

import threading

from torch import Tensor

from pagemill.kvcache.advice import POPULATE_WRITE, advise
from pagemill.kvcache.device_pool import DevicePool
from pagemill.kvcache.layout import PAGE_BYTES

AHEAD_BYTES = 256 << 20
"""Of the frames that are kept ready beyond the highest in use."""
SHARE = 8
"""Nor more than a pool's eighth."""
HUGE_PAGE = 2 << 20


class PagesAhead:
    """Of one pool, on CPU; elsewhere, and where the system can not do it, it does nothing. Not thread-safe."""

    def __init__(self, pool: DevicePool) -> None:
        self._pool = pool
        on_cpu = pool.device.type == "cpu"
        self._margin = min(AHEAD_BYTES, pool.nbytes // SHARE) // pool.layout.frame_bytes if on_cpu else 0
        self._ready = 0  # frames below have their pages, or the thread is at it
        self._thread: threading.Thread | None = None
        self.reach(0)

    def reach(self, frame: int) -> None:
        """To be called when frames up to this one come into use."""
        goal = min(frame + self._margin, self._pool.num_frames)
        few = goal - self._ready < self._margin // 2 and goal < self._pool.num_frames
        if not self._margin or goal <= self._ready or few or self._busy():
            return
        begin, self._ready = self._ready, goal
        arguments = (self._pool.storage, *self._pool.pieces, begin, goal)
        # Neither the pool's end nor the process's waits for it: it holds the memory, and for a second at most.
        self._thread = threading.Thread(target=_populate, args=arguments, daemon=True, name="pages ahead")
        self._thread.start()

    def shrink(self, num_frames: int) -> None:
        """To be called before the pool gives back the pages of the frames from `num_frames` on."""
        if self._thread is not None:
            self._thread.join()
        self._ready = min(self._ready, num_frames)

    def _busy(self) -> bool:
        return self._thread is not None and self._thread.is_alive()


def _populate(storage: Tensor, pieces: int, piece_bytes: int, frame_bytes: int, begin: int, end: int) -> None:
    """Frames begin .. end - 1, the lowest first. `frame_bytes` between frames, `piece_bytes` between their pieces.

    A huge page at a time: the system's lock on the memory map is free in between.
    """
    step, base = max(1, HUGE_PAGE // frame_bytes), storage.data_ptr()
    last = base + storage.nbytes
    for first in range(begin, end, step):
        for piece in range(pieces):
            at = base + piece * piece_bytes + first * frame_bytes
            to = min(at + min(step, end - first) * frame_bytes, last)
            at = at // PAGE_BYTES * PAGE_BYTES
            if not advise(at, to - at, POPULATE_WRITE):
                return  # an older system, or out of memory: the writes will tell
