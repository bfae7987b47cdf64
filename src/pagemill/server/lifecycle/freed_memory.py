"""Makes the C library give the memory of large bodies back to the system when they are freed."""

from __future__ import annotations

import ctypes

MMAP_THRESHOLD, TRIM_THRESHOLD = -3, -1
"""Parameters of glibc's `mallopt`."""
LARGE_BYTES = 1 << 17


def give_back_freed_memory() -> None:
    """Gives each allocation of 128 KiB or more pages of its own, which go back when it is freed.

    glibc begins like this, but after the first such allocation is freed, it takes later ones of up to 32 MiB from its
    heap, which keeps what lies below anything still in use. Does nothing with another C library.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        for parameter in (MMAP_THRESHOLD, TRIM_THRESHOLD):
            mallopt(parameter, LARGE_BYTES)
