"""Memory in pages: how it is had from the system, and what the system is told of it."""

from __future__ import annotations

import ctypes
import mmap
from contextlib import suppress

PAGE_BYTES = 4096
HUGE_PAGE = 2 << 20

HUGE, NOT_HUGE = 14, 15
"""Linux: pages of this memory are to be huge ones, where that can be; or never."""
POPULATE_READ, POPULATE_WRITE = 22, 23
"""Linux 5.14: make pages as a read or a write would, and leave what lies in them."""

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def private_memory(nbytes: int, advice: int, flags: int = 0) -> mmap.mmap:
    """Returns memory of this process, without pages yet; `advice` says which they shall be, where the system knows
    that. Raises as mmap.mmap does."""
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | flags)
    with suppress(AttributeError, OSError):
        memory.madvise(advice)
    return memory


def advise(address: int, nbytes: int, advice: int) -> bool:
    """Calls madvise(2) on whole pages; returns whether the system took it. If not, `ctypes.get_errno` says why."""
    taken: bool = _libc.madvise(address, nbytes, advice) == 0
    return taken
