"""Transfers: moves blocks between the device pool and the offload stores, beside the engine's steps.

A block that is saved is copied out of its frame at once, so that the frame can be used again; it is stored later, but
found from then on. A block that is loaded goes straight into a frame that nobody else has until the load has finished.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import compress
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pagemill.errors import KVStoreError
from pagemill.kvcache.frame_access import FrameAccess
from pagemill.kvcache.load_time import LoadTime
from pagemill.kvcache.offload_tiers import OffloadTiers
from pagemill.memory.work import BlockName, Load, Save

logger = logging.getLogger(__name__)

THREADS = 4
"""Threads that read blocks from tiers, and as many more that fetch them from other engines."""
BATCH_BYTES = 16 << 20
"""The size of the pieces that a save is cut into."""
LEAST_PIECE_BYTES, PIECE_BYTES = 4 << 20, (32 << 20) - 4096
"""The sizes of the pieces that a load is cut into, as many as there are threads, or more. Each piece takes as much of
the interpreter whatever its size, so that small ones cannot fill a GPU's bus. With the numbers of its frames, the
largest takes pinned memory of 32 MiB, which comes in powers of two."""

PATIENCE_S = 0.5
"""Beside twice the seconds in which a load's blocks are computed, how long those of other engines may take."""
UNMEASURED_BLOCK_S = 0.01


@dataclass(frozen=True, slots=True)
class TransferStats:
    """Counts blocks since the start, and seconds in which loads were under way.

    blocks_dropped: not saved, because storing could not keep up, or failed, or because they could not be read.
    blocks_missed:  not there, or broken, when they were to be loaded.
    """

    blocks_saved: int = 0
    blocks_dropped: int = 0
    blocks_loaded: int = 0
    blocks_missed: int = 0
    loading_s: float = 0.0


class Piece(NamedTuple):
    """A part of a load: from which tier each of its blocks came, None for those that did not; when it began and
    ended."""

    sources: list[int | None]
    begin_s: float
    end_s: float


class UnderWay(NamedTuple):
    """A load, and its pieces; None for those that are not over."""

    load: Load
    pieces: list[Piece | None]


def piece_of(blocks: int, record_bytes: int, threads: int) -> int:
    """Returns how many blocks each piece of a load of so many has: all threads have as many pieces."""
    least, most = (max(1, nbytes // record_bytes) for nbytes in (LEAST_PIECE_BYTES, PIECE_BYTES))
    rounds = max(1, -(-blocks // (threads * most)))
    return max(least, -(-blocks // (threads * rounds)))


def started(threads: int, name: str) -> ThreadPoolExecutor:
    """Returns an executor whose threads have all started: where one could not, what was submitted would stay in the
    queue, and write to frames that are others' by then. Raises KVStoreError where the system starts no more."""
    executor, may_go_on = ThreadPoolExecutor(threads, name), threading.Event()
    try:
        for _ in range(threads):
            executor.submit(may_go_on.wait)
    except RuntimeError as error:
        raise KVStoreError(
            f"{1 + 2 * THREADS} threads move KV blocks to and from tiers, and the system starts no more for this "
            f"process: {error}; raise its limit of threads (ulimit -u, or the container's pids limit), or leave out "
            f"kv_host_memory and kv_disk_memory"
        ) from error
    finally:
        may_go_on.set()
    return executor


class Transfers:
    """Saves and loads blocks. Its methods belong to one thread, the engine's.

    load_times: by source (`OffloadTiers.where`); a load counts for the lowest one that a block of it came from.
    block_s: seconds in which a block is computed, which bound how long others' are waited for; 0: not known.
    backlog_bytes: the most that may be copied out and not yet stored; beyond it, blocks are dropped instead of saved.
    Raises KVStoreError where its threads cannot be started.
    """

    def __init__(self, frames: FrameAccess, tiers: OffloadTiers, backlog_bytes: int = 256 << 20) -> None:
        self._frames = frames
        self._tiers = tiers
        self._batch = max(1, BATCH_BYTES // tiers.record_bytes)
        self._most_waiting = max(1, backlog_bytes // tiers.record_bytes)
        self._writer = started(1, "kv-save")
        self._readers = started(THREADS, "kv-load")
        self._fetchers = started(THREADS, "kv-fetch")
        """Read what may come from other engines, so that a slow one holds up no tier."""
        self._lock = threading.Lock()
        self._waiting = 0
        self._stats = TransferStats()
        self.load_times = {source: LoadTime() for source in range(len(tiers.tiers))}
        self.block_s = 0.0
        self._loads: dict[int, UnderWay] = {}
        self._done: SimpleQueue[tuple[int, int, Piece]] = SimpleQueue()
        self._loading_since = self._loading_until = 0.0

    def stats(self) -> TransferStats:
        with self._lock:
            return self._stats

    def _count(self, **more: float) -> None:
        with self._lock:
            self._stats = replace(self._stats, **{name: getattr(self._stats, name) + n for name, n in more.items()})

    # Down

    def save(self, saves: Sequence[Save], keep: bool = False) -> None:
        """Copies blocks out of their frames now and stores them later. What is stored already counts as used.

        Those for which there is no memory, or no thread, are dropped.

        keep: stores them where they outlive the process, and all of them, however long that takes.
        """
        try:
            here = self._tiers.holds([save.name[:2] for save in saves], lasting=keep)
        except (KVStoreError, MemoryError, RuntimeError) as error:
            self._drop(saves, error)
            return
        if any(here):
            self._writer.submit(self._tiers.use, [save.name[:2] for save in compress(saves, here)][::-1])
            saves = [save for save, stored in zip(saves, here, strict=True) if not stored]
        if not keep and (excess := self._waiting + len(saves) - self._most_waiting) > 0:
            self._count(blocks_dropped=min(excess, len(saves)))
            saves = saves[excess:]  # a chain's end comes first, and is worth nothing without its beginning
        for first in range(0, len(saves), self._batch):
            part = saves[first : first + self._batch]
            if keep and self._waiting + len(part) > self._most_waiting:
                self.flush()
            try:
                self._save(part, keep)
            except (MemoryError, RuntimeError) as error:
                self._drop(part, error)

    def _save(self, saves: Sequence[Save], keep: bool) -> None:
        records, whole, wait = self._frames.begin_read([save.frame for save in saves])
        if lost := whole.count(False):
            self._count(blocks_dropped=lost)
            wait()
            saves, records = [save for save, read in zip(saves, whole, strict=True) if read], records[whole]
        self._tiers.announce([save.name for save in saves], list(records), wait)
        with self._lock:
            self._waiting += len(saves)
        self._writer.submit(self._store, saves, records, wait, keep)

    def _drop(self, saves: Sequence[Save], error: Exception) -> None:
        logger.warning("%d KV blocks are dropped instead of saved: %s", len(saves), error)
        self._count(blocks_dropped=len(saves))

    def _store(self, saves: Sequence[Save], records: NDArray[np.uint8], wait: Callable[[], None], keep: bool) -> None:
        stored = 0
        try:
            wait()
            store = self._tiers.keep if keep else self._tiers.write
            store([save.name for save in saves], list(records))
            stored = len(saves)
        except KVStoreError as error:
            logger.warning("%s", error)
        finally:
            with self._lock:
                self._waiting -= len(saves)
            self._count(blocks_saved=stored, blocks_dropped=len(saves) - stored)

    @property
    def storing(self) -> bool:
        """Returns whether blocks are copied out and not stored yet."""
        with self._lock:
            return self._waiting > 0

    def keep(self, saves: Sequence[Save]) -> None:
        """Stores these blocks, those used last first, then those in offload stores, where they outlive the process: as
        many as there is room for, however long that takes."""
        self.flush()
        names: list[BlockName] = []
        try:
            names = self._tiers.keepable([save.name for save in saves])
            keepable = set(names)
            self.save([save for save in saves if save.name in keepable], keep=True)
            self._writer.submit(self._tiers.sink, names, self._batch).result()
        except KVStoreError as error:
            logger.warning("%s", error)
        self._tiers.use([name[:2] for name in names])  # in this order, now that all are there

    def flush(self) -> None:
        """Waits until all that was copied out has been stored."""
        self._writer.submit(lambda: None).result()

    # Up

    @property
    def loading(self) -> bool:
        return bool(self._loads)

    def load(self, load: Load) -> None:
        """Begins to bring blocks up; `finished` tells when it is over. Where it raises, nothing has begun."""
        before = self._frames.mark()
        deadline_s = time.monotonic() + PATIENCE_S + 2 * len(load.blocks) * (self.block_s or UNMEASURED_BLOCK_S)
        record_bytes = self._tiers.record_bytes
        if self._tiers.are_remote(load.blocks):  # what comes over a slow link in time is a load's beginning
            count = max(1, LEAST_PIECE_BYTES // record_bytes)
        else:
            count = piece_of(len(load.blocks), record_bytes, THREADS)
        starts = range(0, len(load.blocks), count)
        if not self._loads:
            self._loading_since = time.monotonic()
            self._frames.begin_writes()
        self._loads[load.id] = UnderWay(load, [None] * len(starts))
        for piece, first in enumerate(starts):
            end = first + count
            blocks = load.blocks[first:end]
            threads = self._fetchers if self._tiers.are_remote(blocks) else self._readers
            try:
                threads.submit(self._fetch, load.id, piece, blocks, load.frames[first:end], before, deadline_s)
            except RuntimeError as error:
                logger.warning("%d KV blocks are not loaded: %s", len(blocks), error)
                self._done.put((load.id, piece, Piece([None] * len(blocks), now := time.monotonic(), now)))

    def _fetch(
        self,
        load: int,
        piece: int,
        blocks: Sequence[tuple[bytes, int]],
        frames: Sequence[int],
        before: Any,
        deadline_s: float,
    ) -> None:
        begin = read = time.monotonic()
        sources: list[int | None] = [None] * len(blocks)
        try:
            with self._frames.write(frames, before) as records:
                found = self._tiers.read(blocks, records, deadline_s)
                read = time.monotonic()  # from here on a device may wait for steps, as it would in any case
            sources = found
        except (KVStoreError, MemoryError) as error:
            logger.warning("%s", error)
        finally:
            self._done.put((load, piece, Piece(sources, begin, read)))

    def finished(self, wait_s: float = 0.0) -> dict[int, list[bool]]:
        """Returns the loads that are over, by id, and which of their blocks have arrived. Waits up to `wait_s` if there
        are none yet."""
        over: dict[int, list[bool]] = {}
        while self._loads and not (over and self._done.empty()):
            try:
                ident, at, piece = self._done.get(timeout=wait_s) if wait_s > 0 else self._done.get_nowait()
            except Empty:
                break
            load, pieces = self._loads[ident]
            pieces[at], self._loading_until = piece, piece.end_s
            if None not in pieces:
                del self._loads[ident]
                self._writer.submit(self._tiers.use, load.blocks)
                over[ident] = self._end([part for part in pieces if part is not None])
                if not self._loads:
                    self._frames.end_writes()
        if over:
            arrived, wanted = (sum(map(count, over.values())) for count in (sum, len))
            spent = 0.0 if self._loads else self._loading_until - self._loading_since
            self._count(blocks_loaded=arrived, blocks_missed=wanted - arrived, loading_s=spent)
        return over

    def _end(self, pieces: Sequence[Piece]) -> list[bool]:
        """Notes how long a load took, all of whose pieces are over. Returns which of its blocks have arrived."""
        arrived = [source is not None for piece in pieces for source in piece.sources]
        if all(arrived):
            lowest = max(source or 0 for piece in pieces for source in piece.sources)
            seconds = max(piece.end_s for piece in pieces) - min(piece.begin_s for piece in pieces)
            self.load_time(lowest).note(len(arrived), seconds)
        return arrived

    def load_time(self, source: int) -> LoadTime:
        """Returns what is known of a source's speed."""
        return self.load_times.setdefault(source, LoadTime())

    def close(self) -> None:
        """Waits for what is under way."""
        self._readers.shutdown()
        self._fetchers.shutdown()
        self._writer.shutdown()
