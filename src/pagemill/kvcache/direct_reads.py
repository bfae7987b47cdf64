"""DirectReads: reads a file from the disk straight into the memory of who asks, unless the system has it in its own.

Blocks that come up go into frames, so a copy of them in the system's memory is of little use, and in a virtual machine
whose host takes back free memory, finding pages for it may take longer than the disk takes to read.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pagemill.kvcache.layout import PAGE_BYTES

_CACHESTAT = 451
"""Linux 6.5's number of cachestat(2), for which the C library has no function."""
_libc = ctypes.CDLL(None, use_errno=True)


class _Range(ctypes.Structure):
    _fields_ = [("offset", ctypes.c_uint64), ("bytes", ctypes.c_uint64)]


class _Pages(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint64) for name in ("here", "unwritten", "in_writing", "gone", "gone_of_late")]


class DirectReads:
    """Of the file at `path`, which another descriptor, `file`, has open too. Thread-safe."""

    def __init__(self, path: Path, file: int) -> None:
        self._file = file
        self._direct = -1
        with suppress(OSError, AttributeError):  # a system, or a file system, that can not
            self._direct = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)

    def read(self, buffers: Sequence[Any], offset: int) -> None:
        """Reads the file from `offset` on into these arrays of bytes, one after the other. Reads directly what begins
        and ends where pages do, as do all buffers. Raises OSError; what would come from behind the file's end is
        undefined."""
        nbytes = sum(map(len, buffers))
        if self._direct >= 0 and not self._has_pages(offset, nbytes):
            with suppress(OSError):  # not at pages' ends
                if os.preadv(self._direct, buffers, offset) == nbytes:
                    return
        os.preadv(self._file, buffers, offset)

    def close(self) -> None:
        if self._direct >= 0:
            os.close(self._direct)

    def _has_pages(self, offset: int, nbytes: int) -> bool:
        """Whether the system has any of it in its memory, or does not say."""
        pages = _Pages()
        where = ctypes.byref(_Range(offset, nbytes))
        known: bool = _libc.syscall(_CACHESTAT, self._file, where, ctypes.byref(pages), 0) == 0
        return not known or pages.here > 0


def whole_pages(count: int, nbytes: int) -> NDArray[np.uint8]:
    """Uninitialised memory [count, nbytes] that begins where a page does."""
    memory = np.empty(count * nbytes + PAGE_BYTES, dtype=np.uint8)
    begin = -memory.ctypes.data % PAGE_BYTES
    return memory[begin : begin + count * nbytes].reshape(count, nbytes)
