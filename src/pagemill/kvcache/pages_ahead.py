"""PagesAhead: the pool's next pages are found and cleared by the system before the engine writes them.

The first write to a page costs far more than the write itself: a huge page is 2 MiB to find and clear, in a virtual
machine twice over. While an engine waits for its first request, a thread does that for the first frames. Later, all
cores do it together for the frames that a step is about to use: a thread beside a step would take a core from the
kernels, and those on the other cores would wait for that one.

Once huge pages have been slow to come, the later ones are small, so that a step waits less: a virtual machine whose
host takes back large pieces of free memory has small ones at hand. The system may join them to huge ones at leisure.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

from pagemill.kvcache.advice import HUGE, NOT_HUGE, POPULATE_WRITE, advise
from pagemill.kvcache.device_pool import DevicePool
from pagemill.kvcache.layout import PAGE_BYTES
from pagemill.machine import usable_cores

AHEAD_BYTES = 256 << 20
"""Of the frames that get their pages before the first request."""
SHARE = 8
"""Nor more than a pool's eighth."""
HUGE_PAGE = 2 << 20
SLOW_BYTES_PER_S = 1 << 30
"""Huge pages that one core makes more slowly are not waited for. Memory of one's own is cleared ten times as fast."""


class PagesAhead:
    """Of one pool, on CPU; elsewhere, and where the system can not do it, it does nothing. Not thread-safe."""

    def __init__(self, pool: DevicePool) -> None:
        self._pool = pool
        self._cores = usable_cores()
        self._step = max(1, HUGE_PAGE // pool.pieces[2])
        """Frames that get their pages together: of each piece about a huge page."""
        self._ready = 0 if pool.device.type == "cpu" else pool.num_frames  # frames below have their pages
        self._slow = False  # huge pages were
        self._stop = threading.Event()
        first = min(AHEAD_BYTES, pool.nbytes // SHARE) // pool.layout.frame_bytes
        # Neither the pool's end nor the process's waits for it: it holds the memory, and for a second at most.
        self._thread = threading.Thread(target=self._begin, args=(first,), daemon=True, name="pages ahead")
        self._thread.start()

    def reach(self, frame: int) -> None:
        """To be called before the first write to frames up to this one."""
        if frame < self._ready:
            return
        self._end()
        end = min((frame // self._step + 1) * self._step, self._pool.num_frames)
        regions = self._regions(self._ready, end)
        shares = [regions[core :: self._cores] for core in range(self._cores)]
        others = [threading.Thread(target=_populate, args=(share,)) for share in shares[1:]]
        begin = time.perf_counter()
        self._advise(regions, NOT_HUGE)
        for thread in others:
            thread.start()
        _populate(shares[0])
        for thread in others:
            thread.join()
        self._advise(regions, HUGE)
        self._note(sum(nbytes for _, nbytes in regions), self._cores * (time.perf_counter() - begin))
        self._ready = max(self._ready, end)

    def shrink(self, num_frames: int) -> None:
        """To be called before the pool gives back the pages of the frames from `num_frames` on."""
        self._end()
        self._ready = min(self._ready, num_frames)

    def _begin(self, frames: int) -> None:
        begin, made = time.thread_time(), 0
        while self._ready < frames:
            end = min(self._ready + self._step, frames)
            for address, nbytes in self._regions(self._ready, end):
                if self._stop.is_set():
                    return
                _populate([(address, nbytes)])
                made += nbytes
                self._note(made, time.thread_time() - begin)
            self._ready = end

    def _end(self) -> None:
        self._stop.set()
        self._thread.join()

    def _note(self, nbytes: int, seconds: float) -> None:
        self._slow |= nbytes < SLOW_BYTES_PER_S * seconds

    def _advise(self, regions: Sequence[tuple[int, int]], advice: int) -> None:
        for address, nbytes in regions if self._slow else ():
            advise(address, nbytes, advice)

    def _regions(self, begin: int, end: int) -> list[tuple[int, int]]:
        """Addresses and bytes of the huge pages that frames begin .. end - 1 touch, the lowest frames first."""
        pieces, piece_bytes, frame_bytes = self._pool.pieces
        found = []
        for first in range(begin, end, self._step):
            for piece in range(pieces):
                start = self._pool.storage.data_ptr() + piece * piece_bytes
                at = (start + first * frame_bytes) // HUGE_PAGE * HUGE_PAGE
                to = start + min(first + self._step, end) * frame_bytes
                at = max(at, start // PAGE_BYTES * PAGE_BYTES)
                to = min(-(-to // HUGE_PAGE) * HUGE_PAGE, start + self._pool.num_frames * frame_bytes)
                found.append((at, to - at))
        return found


def _populate(regions: Sequence[tuple[int, int]]) -> None:
    for address, nbytes in regions:
        if not advise(address, nbytes, POPULATE_WRITE):
            return  # an older system, or out of memory: the writes will tell
