"""Keeps a server's event loop from pauses that the interpreter makes."""

from __future__ import annotations

import gc
import sys

THREAD_TURN_S = 0.001
"""Seconds after which a thread that tokenizes lets the event loop run; Python's own choice is five times as long."""


def spare_streams() -> None:
    """Spares running streams the pauses of the garbage collector, and of threads that hold the interpreter.

    A collection that visited all that was imported and loaded takes 25 ms, and so does one of 50,000 new objects while
    many requests begin. One of the older objects takes 100 ms while a few answers have many log probabilities, so these
    are rare: most objects are freed without a collection.
    """
    sys.setswitchinterval(THREAD_TURN_S)
    gc.collect()
    gc.freeze()
    gc.set_threshold(5_000, 10_000, 100)
