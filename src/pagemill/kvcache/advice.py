"""What the system is told of memory that Python has no object of."""

from __future__ import annotations

import ctypes

HUGE, NOT_HUGE = 14, 15
"""Linux: pages of this memory are to be huge ones, where that can be; or never."""
POPULATE_READ, POPULATE_WRITE = 22, 23
"""Linux 5.14: make pages as a read or a write would, and leave what lies in them."""

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def advise(address: int, nbytes: int, advice: int) -> bool:
    """madvise(2) of whole pages; whether the system took it. If not, `ctypes.get_errno` says why."""
    taken: bool = _libc.madvise(address, nbytes, advice) == 0
    return taken
