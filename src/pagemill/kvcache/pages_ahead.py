"""PagesAhead and PooledFrames: the pool's next pages are found and cleared by the system before the engine writes them.

The first write to a page costs far more than the write itself: a huge page is 2 MiB to find and clear, in a virtual
machine twice over. While an engine waits for its first request, a thread does that for the first frames. Later, all
cores do it together for the frames that a step is about to use: a thread beside a step would take a core from the
kernels, and those on the other cores would wait for that one. For frames that blocks from offload stores go to, the
threads that read those do it, one while another waits for the disk.

Once huge pages have been slow to come, the later ones are small, so that a step waits less: a virtual machine whose
host takes back large pieces of free memory has small ones at hand. The system may join them to huge ones at leisure.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from itertools import groupby
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pagemill.kvcache.device_pool import DevicePool
from pagemill.kvcache.frame_access import Places, Reading
from pagemill.kvcache.pages import HUGE, HUGE_PAGE, NOT_HUGE, PAGE_BYTES, POPULATE_WRITE, advise
from pagemill.machine import usable_cores

AHEAD_BYTES = 256 << 20
"""Bytes of the frames that get their pages before the first request."""
SHARE = 4
"""Nor more than a pool's quarter."""
FRAMES_AT_ONCE = 16
"""A step gets the pages of so many frames together, if pages are small."""
SLOW_BYTES_PER_S = 1 << 30
"""Huge pages that one core makes more slowly are not waited for. Memory of one's own is cleared ten times as fast."""


class PagesAhead:
    """Makes pages of one pool, on CPU; elsewhere, and where the system cannot do it, it does nothing."""

    def __init__(self, pool: DevicePool) -> None:
        self._pool = pool
        self._cores = usable_cores()
        self._starts = [piece.data_ptr() for piece in pool.frames.bytes]
        self._together = max(1, HUGE_PAGE // pool.layout.piece_bytes)
        """The neighbouring frames that fill about a huge page in each piece."""
        self._ready = 0 if pool.device.type == "cpu" else pool.capacity  # frames below have their pages
        self._made: set[int] = set()  # of the others, those that have
        self._lock = threading.Lock()
        self._slow = False  # huge pages were
        self._users = 0  # between `begin` and `end`
        self._small = False  # pages are to be
        self._stop = threading.Event()
        first = min(AHEAD_BYTES, pool.nbytes // SHARE) // pool.layout.frame_bytes
        # Neither the pool's end nor the process's waits for it: it holds the memory, and for a second at most.
        self._thread = threading.Thread(target=self._make_first, args=(first,), daemon=True, name="pages ahead")
        self._thread.start()

    def begin(self) -> None:
        """Prepares for `make`. What pages shall be is said once, of the whole pool: to say it, the system stops all who
        make some."""
        with self._lock:
            self._users += 1
            self._say()

    def end(self) -> None:
        """Ends what `begin` began, when the pages are there."""
        with self._lock:
            self._users -= 1
            self._say()

    def reach(self, frame: int) -> None:
        """Makes the pages of frames up to this one, before a step first writes to them; called by one thread."""
        if frame < self._ready:
            return
        self._stop_first()
        while self._ready in self._made:
            self._made.remove(self._ready)
            self._ready += 1
        together = FRAMES_AT_ONCE if self._slow else self._together
        end = min((frame // together + 1) * together, self._pool.num_frames)
        self.begin()
        self._make(self._regions(self._ready, end), self._cores)
        self.end()
        self._ready = max(self._ready, end)

    def make(self, frames: Sequence[int]) -> None:
        """Makes the pages of these frames before the first write to them beside steps, after `begin`; called by any
        thread."""
        self._stop.set()
        wanted = sorted(frame for frame in frames if self._ready <= frame < self._pool.num_frames)
        for _, neighbours in groupby(enumerate(wanted), lambda at: at[1] - at[0]):
            run = [frame for _, frame in neighbours]
            self._make(self._regions(run[0], run[-1] + 1))
        self._made.update(wanted)

    def shrink(self, num_frames: int) -> None:
        """Forgets the pages of the frames from `num_frames` on, before the pool gives them back. Nobody writes to those
        frames meanwhile."""
        if self._pool.device.type != "cpu":
            return
        self._stop_first()
        self._ready = min(self._ready, num_frames)
        self._made = {frame for frame in self._made.copy() if frame < num_frames}

    def _make_first(self, frames: int) -> None:
        self.begin()
        try:
            while self._ready < frames:
                end = min(self._ready + self._together, frames)
                for region in self._regions(self._ready, end):
                    if self._stop.is_set():
                        return
                    self._make([region])
                self._ready = end
        finally:
            self.end()

    def _stop_first(self) -> None:
        self._stop.set()
        self._thread.join()

    def _make(self, regions: Sequence[tuple[int, int]], threads: int = 1) -> None:
        others = [threading.Thread(target=self._populate, args=(regions[i::threads],)) for i in range(1, threads)]
        for thread in others:
            thread.start()
        self._populate(regions[::threads])
        for thread in others:
            thread.join()

    def _populate(self, regions: Sequence[tuple[int, int]]) -> None:
        for address, nbytes in regions:
            begin = time.thread_time()
            if not advise(address, nbytes, POPULATE_WRITE):
                return  # an older system, or out of memory: the writes will tell
            if not self._slow and nbytes < SLOW_BYTES_PER_S * (time.thread_time() - begin):
                with self._lock:
                    self._slow = True
                    self._say()

    def _say(self) -> None:
        small = self._slow and self._users > 0
        if small == self._small:
            return
        self._small = small
        for start in self._starts:
            at = start // PAGE_BYTES * PAGE_BYTES
            advise(at, self._pool.first_streamed * self._pool.layout.piece_bytes, NOT_HUGE if small else HUGE)

    def _regions(self, begin: int, end: int) -> list[tuple[int, int]]:
        """Returns address and bytes of the pages that frames begin .. end - 1 touch, the lowest frames first."""
        size = self._pool.layout.piece_bytes
        page = PAGE_BYTES if self._slow else HUGE_PAGE
        found = []
        for first in range(begin, end, self._together):
            for start in self._starts:
                at = (start + first * size) // page * page
                to = start + min(first + self._together, end) * size
                at = max(at, start // PAGE_BYTES * PAGE_BYTES)
                to = min(-(-to // page) * page, start + self._pool.num_frames * size)
                found.append((at, to - at))
        return found


class PooledFrames:
    """Gives `FrameAccess` to a pool in this process; `pages` makes the memory that is written."""

    def __init__(self, pool: DevicePool, pages: PagesAhead) -> None:
        self._pool = pool
        self._pages = pages

    def read(self, frames: Sequence[int]) -> tuple[NDArray[np.uint8], list[bool]]:
        return self._pool.frames.read(frames)

    def begin_read(self, frames: Sequence[int]) -> Reading:
        return self._pool.frames.begin_read(frames)

    def mark(self) -> object | None:
        return self._pool.frames.mark()

    def begin_writes(self) -> None:
        self._pages.begin()

    def end_writes(self) -> None:
        self._pages.end()

    def write(self, frames: Sequence[int], after: Any) -> AbstractContextManager[Places]:
        self._pages.make(frames)
        return self._pool.frames.write(frames, after)
