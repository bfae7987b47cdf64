"""Faults of a soak: a disk that is full, reads that fail, blocks that rot on disk, streamed blocks that cannot be
written or read or are lost later, steps that break, plans that cannot be carried out. Each kind has its turn alone."""

from __future__ import annotations

import errno
import os
import random
from collections import Counter

from pagemill.errors import KVStoreError
from pagemill.kvcache import read_ahead, streamed_file
from pagemill.kvcache.disk_store import DiskStore

ENDING = ("unplanned", "unwritten", "unread", "lost")
"""Faults that may end requests."""
DRAWS: tuple[dict[str, float], ...] = (
    {},
    {"full": 0.3},
    {"full": 1},
    {"unreadable": 0.5},
    {"broken steps": 0.3},
    {"full": 1, "unreadable": 1},
    {"full": 0.1, "unreadable": 0.1, "broken steps": 0.3},
    *({kind: 0.08} for kind in ENDING),
    dict.fromkeys(ENDING, 0.08),
)
"""How often each kind of fault happens: all that may happen at the same time."""


class Faults:
    """Makes the disk and steps fail, when `random` decides. `stop` ends all faults."""

    def __init__(self, core, seed: int) -> None:
        self.random = random.Random(seed)
        self.counts: Counter[str] = Counter()
        self._shares: dict[str, float] = {}
        self._next: list[dict[str, float]] = []
        self._disk: DiskStore = core.tiers.offload.tiers[-1]
        self._streamed = core.executor.pool.streamed_file
        executor = getattr(core.executor, "inner", core.executor)
        put, read, run, apply = self._disk.put, self._disk.read, executor.run, executor.apply
        write_below, read_below, read_layer = self._streamed.write, self._streamed.read, read_ahead.read_runs

        def failing_put(*args):
            if self._happens("full"):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return put(*args)

        def failing_read(*args):
            if self._happens("unreadable"):
                raise KVStoreError("the disk answers no more")
            return read(*args)

        def failing_run(plan):
            if self._happens("lost"):
                self._lose()
            # Of several rows: then the engine runs halves of it again. A row that fails alone would be an error.
            if len(plan.rows) > 1 and self._happens("broken steps"):
                raise RuntimeError("the device hiccups")
            return run(plan)

        def failing_apply(plan):
            if len(plan.rows) and self._happens("unplanned"):
                raise RuntimeError("the device is gone")
            return apply(plan)

        def failing_write_below(*args):
            if self._happens("unwritten"):
                raise KVStoreError("the disk takes no more")
            return write_below(*args)

        def failing_read_below(*args):
            if self._happens("unread"):
                raise KVStoreError("the disk answers no more")
            return read_below(*args)

        def failing_read_layer(*args):
            return not self._happens("unread", 1 / 30) and read_layer(*args)

        self._disk.put, self._disk.read = failing_put, failing_read
        executor.run, executor.apply = failing_run, failing_apply
        self._streamed.write, self._streamed.read = failing_write_below, failing_read_below
        self._patched = streamed_file.written_back, read_layer
        read_ahead.read_runs = failing_read_layer

    def _lose(self) -> None:
        """The system drops what it could not write of streamed blocks, and says so once."""
        taken, due, file = self._patched[0], [False], self._streamed.fileno()
        os.pwrite(file, self.random.randbytes(4096) * (os.fstat(file).st_size // 4096), 0)
        streamed_file.written_back = lambda *at: due.pop() if due else taken(*at)

    @property
    def ended(self) -> int:
        """Faults so far that may have ended requests."""
        return sum(self.counts[what] for what in ENDING)

    def _happens(self, what: str, among: float = 1.0) -> bool:
        happens = self.random.random() < self._shares.get(what, 0.0) * among
        if happens:  # counts of several threads: what does not happen must not be written
            self.counts[what] += 1
        return happens

    def change(self) -> None:
        """Goes on to other faults, in a random order in which all of them have their turn."""
        if not self._next:
            self._next = self.random.sample(DRAWS, len(DRAWS))
        self._shares = self._next.pop()

    def rot(self) -> None:
        """Overwrites a few bytes of a block on disk."""
        size = (self._disk.folder / "blocks.dat").stat().st_size
        if size:
            self.counts["rotten"] += 1
            with (self._disk.folder / "blocks.dat").open("r+b") as file:
                file.seek(self.random.randrange(size))
                file.write(b"rotten")

    def stop(self) -> None:
        self._shares = {}
        streamed_file.written_back, read_ahead.read_runs = self._patched
