"""Tells how much of the processors something else takes: other processes, and other guests of the host."""

from __future__ import annotations

import os
import time
from pathlib import Path

STAT = Path("/proc/stat")
BUSY = (0, 1, 2, 5, 6, 7)
"""The columns of a processor's line in which it did not idle: user, nice, system, interrupts of two kinds, and stolen
by the host (proc(5))."""


class OtherWork:
    """Measures, between two looks, the processors that this process may use. Only Linux says what they do."""

    def __init__(self, stat: Path = STAT) -> None:
        """stat: the file with the processors' counts."""
        self._stat = stat
        self._processors = {f"cpu{number}" for number in _usable()}
        self._last = self._read()

    def look(self) -> float | None:
        """Returns which share of the processors' time others took since the last look; None where nothing says it.

        Counts have a resolution of 10 ms, so looks should be a quarter of a second apart or more.
        """
        last, self._last = self._last, self._read()
        if last is None or self._last is None:
            return None
        passed, busy, own = (now - before for now, before in zip(self._last, last, strict=True))
        return max(0.0, (busy - own) / (passed * len(self._processors))) if passed > 0 else 0.0

    def _read(self) -> tuple[float, float, float] | None:
        """Returns seconds: of the clock, that the processors were busy, and that this process computed."""
        try:
            lines = self._stat.read_text().splitlines()
        except OSError:
            return None
        counts = [line.split()[1:] for line in lines if line.split(maxsplit=1)[0] in self._processors]
        ticks = sum(int(count[column]) for count in counts for column in BUSY)
        return time.perf_counter(), ticks / os.sysconf("SC_CLK_TCK"), time.process_time()


def _usable() -> set[int]:
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
