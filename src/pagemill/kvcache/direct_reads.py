"""DirectReads: reads a file past the system's memory, unless the system has it there.

Blocks that come up go into frames, so a copy of them in the system's memory is of little use, and in a virtual machine
whose host takes back free memory, finding pages for it may take longer than the disk takes to read.

What is read lies in huge pages, where the system has them: a virtual machine's disk takes a request apart at every gap
between pages, and fills small ones that lie scattered at less than half the speed.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from queue import LifoQueue

import numpy as np
from numpy.typing import NDArray

from pagemill.kvcache.pages import HUGE, HUGE_PAGE, POPULATE_WRITE, advise, private_memory

_CACHESTAT = 451
"""Linux 6.5's number of cachestat(2), for which the C library has no function."""
READS_AT_ONCE = 2
"""Reads that keep the disk busy. With one for each thread, all threads would wait for the disk together, and then the
disk would wait while all check what they have read."""
BUFFERS = 4
"""Threads that can use what they have read at a time; others wait."""
_libc = ctypes.CDLL(None, use_errno=True)


class DirectReads:
    """Reads the file at `path`, which another descriptor, `file`, has open too, at most `most_bytes` at once.
    Thread-safe. Its buffers have their pages from the start.
    """

    def __init__(self, path: Path, file: int, most_bytes: int) -> None:
        self._file = file
        self._reading = threading.Semaphore(READS_AT_ONCE)
        self._buffers = LifoQueue[NDArray[np.uint8]]()
        nbytes = -(-most_bytes // HUGE_PAGE) * HUGE_PAGE
        memory = np.frombuffer(private_memory(BUFFERS * nbytes + HUGE_PAGE, HUGE), dtype=np.uint8)
        memory = memory[-memory.ctypes.data % HUGE_PAGE :][: BUFFERS * nbytes]
        advise(memory.ctypes.data, memory.nbytes, POPULATE_WRITE)
        for buffer in memory.reshape(BUFFERS, nbytes):
            self._buffers.put(buffer)
        self._direct = -1
        with suppress(OSError, AttributeError):  # a system, or a file system, that cannot
            self._direct = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)

    @contextmanager
    def read(self, nbytes: int, offset: int) -> Iterator[NDArray[np.uint8]]:
        """Gives `nbytes` of the file from `offset` on, uint8 [nbytes], and reads directly what begins and ends where
        pages do. What would come from behind the file's end is undefined. Raises OSError."""
        buffer = self._buffers.get()
        try:
            self._fill(buffer[:nbytes], offset)
            yield buffer[:nbytes]
        finally:
            self._buffers.put(buffer)

    def _fill(self, memory: NDArray[np.uint8], offset: int) -> None:
        if self.direct and not self.has_pages(offset, memory.nbytes):
            with suppress(OSError), self._reading:  # not at pages' ends
                if os.preadv(self._direct, [memory.data], offset) == memory.nbytes:
                    return
        os.preadv(self._file, [memory.data], offset)

    def close(self) -> None:
        if self.direct:
            os.close(self._direct)

    @property
    def direct(self) -> bool:
        """True if the system lets this file be read past its memory."""
        return self._direct >= 0

    def has_pages(self, offset: int, nbytes: int) -> bool:
        """Returns whether the system has any of this in its memory, or does not say."""
        where, counts = (ctypes.c_uint64 * 2)(offset, nbytes), (ctypes.c_uint64 * 5)()
        known: bool = _libc.syscall(_CACHESTAT, self._file, where, counts, 0) == 0
        return not known or counts[0] > 0  # the first counts the pages in memory
