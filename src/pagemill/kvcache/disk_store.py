"""DiskStore: the disk tier. Blocks are found by digest and outlive the process that wrote them.

A folder holds the blocks of one model, KV format and set of kernels. In `blocks.dat`, slots of equal size each hold one
block: a header that says which, and a checksum over header and content. `index.sqlite` says which slots hold what; it
can be made again from the headers. Several processes may use a folder at once.

Nothing that was read is trusted before its checksum agrees, so the order in which bytes reach the disk does not matter:
a block that a crash tore apart is found, dropped, and computed again.
"""

from __future__ import annotations

import fcntl
import os
import sqlite3
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pagemill.errors import KVStoreError
from pagemill.hub.private_files import lock_alone, open_private
from pagemill.kvcache.direct_reads import DirectReads
from pagemill.kvcache.frame_access import Places, Records
from pagemill.kvcache.offload_tiers import Spill
from pagemill.kvcache.store_format import Slots, StoreFormat, is_whole
from pagemill.kvcache.store_index import StoreIndex
from pagemill.memory.tier_shares import TierShares
from pagemill.memory.work import BlockName

READ_BYTES = 4 << 20
"""The most that is read at a time of slots that are neighbours."""
TELL_S = 30.0
"""How soon other processes learn of a block's use."""


@dataclass(frozen=True, slots=True)
class StoreStats:
    """Counts blocks and bytes in the store now, and blocks found broken, and evicted, since it was opened."""

    blocks: int
    bytes: int
    broken: int
    evicted: int


def file_bytes(root: Path, format: StoreFormat) -> int:
    """Returns the size of a store's `blocks.dat`; 0 if there is none."""
    with suppress(OSError):
        return (root / format.key / "blocks.dat").stat().st_size
    return 0


class DiskStore:
    """Implements `OffloadStore`. Thread-safe. Raises KVStoreError for a folder that cannot be used, and for what the
    disk refuses.

    limit_bytes: the most that `blocks.dat` may grow to; of the tenant that has borrowed most, what was used longest ago
    makes room, a chain's end first. A file that is larger is cut down to it here, unless another process uses it.
    windows: by layer group, the attention window in tokens, or None for full attention; kept with the blocks, and read
    from there where they are not given. None if no one has given them yet.
    """

    name = "disk"
    lasting = True

    def __init__(
        self, root: Path, format: StoreFormat, limit_bytes: int, windows: Sequence[int | None] | None = None
    ) -> None:
        self.format = format
        self.folder = root / format.key
        self.record_bytes = format.record_bytes
        self._layout = Slots(format.record_bytes)
        self.slot_bytes = self._layout.nbytes
        self._read_at_once = max(1, READ_BYTES // self.slot_bytes)
        self.limit_bytes = limit_bytes
        self.capacity = limit_bytes // self.slot_bytes
        if not self.capacity:
            raise KVStoreError(
                f"the KV store may take {limit_bytes} bytes, but one block takes {self.slot_bytes}; raise "
                f"kv_disk_memory"
            )
        self.shares = TierShares(self.capacity)
        self._lock = threading.RLock()
        self._broken = self._evicted = 0
        self._teller: threading.Timer | None = None
        try:
            with ExitStack() as opened:
                self._open(opened, windows)
                self._opened = opened.pop_all()
        except (OSError, sqlite3.Error) as error:
            raise KVStoreError(f"the KV store {self.folder} cannot be opened: {error}") from error

    def _open(self, opened: ExitStack, windows: Sequence[int | None] | None) -> None:
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        _make_private(self.folder)
        in_use = open_private(self.folder / "lock")
        opened.callback(os.close, in_use)
        self._file = open_private(self.folder / "blocks.dat")
        opened.callback(os.close, self._file)
        alone = os.fstat(self._file).st_size > self.limit_bytes and lock_alone(in_use)
        if not alone:
            fcntl.flock(in_use, fcntl.LOCK_SH)
        self._reads = DirectReads(self.folder / "blocks.dat", self._file, self._read_at_once * self.slot_bytes)
        opened.callback(self._reads.close)
        self._index = StoreIndex(self.folder, self.format, self._file, self.slot_bytes, in_use, windows)
        opened.callback(self._index.close)
        self.windows = self._index.windows()
        if alone:
            self._shrink()
        fcntl.flock(in_use, fcntl.LOCK_SH)

    # What is there

    def holds(self, blocks: Sequence[tuple[bytes, int]]) -> list[bool]:
        return [slot is not None for slot in self._index.slots(blocks)]

    def follow(self, group: int, most: int) -> Iterator[dict[bytes, bool]]:
        """Implements `FollowedStore.follow`; what other processes do counts as soon as they have done it."""
        return self._index.follow(group, most)

    def num_blocks(self) -> int:
        return self._index.num_blocks()

    def blocks_by_tenant(self) -> dict[str, int]:
        return self._index.blocks_by_tenant()

    def stats(self) -> StoreStats:
        blocks = self.num_blocks()
        return StoreStats(blocks, blocks * self.slot_bytes, self._broken, self._evicted)

    # Reading and writing

    def read(self, blocks: Sequence[tuple[bytes, int]], out: Places) -> list[bool]:
        """Reads blocks (digest, group) into `out`, a record each. Returns which of them were there, whole; the other
        records hold nothing of use. A broken block is dropped from the store."""
        slots = self._index.slots(blocks)
        rows = sorted((slot, row) for row, slot in enumerate(slots) if slot is not None)
        found = [False] * len(blocks)
        for run in _runs(rows, self._read_at_once):
            where = len(run) * self.slot_bytes, run[0][0] * self.slot_bytes
            with suppress(OSError), self._reads.read(*where) as images:  # what could not be read is not there
                for (_, row), image in zip(run, images.reshape(len(run), -1), strict=True):
                    record = image[self._layout.head_bytes :]
                    if is_whole(image, record, *blocks[row]):
                        out[row][:] = record.reshape(out[row].shape)
                        found[row] = True
        for slot, row in rows:
            if not found[row]:
                self._drop_broken(*blocks[row], slot)
        return found

    def use(self, blocks: Sequence[tuple[bytes, int]]) -> None:
        """Notes a use; the index, and with it other processes, learn of it within TELL_S, or when it is closed."""
        self._index.use(blocks)
        if self._teller is None:
            self._teller = teller = threading.Timer(TELL_S, self._tell)
            teller.daemon = True
            teller.start()

    def _tell(self) -> None:
        self._teller = None
        with self._lock, suppress(sqlite3.Error):
            self._index.tell()

    def write(self, names: Sequence[BlockName], records: Records, spill: Spill | None = None) -> int:
        """Stores what is not stored yet, contents [record_bytes] each, and returns how many blocks that were. Blocks
        that make room end here: nothing goes to `spill`. Blocks that would have to make room at once are not stored.

        Raises KVStoreError if the disk takes no more; what was stored before is still there.
        """
        with self._lock:
            fresh = [i for i, slot in enumerate(self._index.slots([name[:2] for name in names])) if slot is None]
            if not fresh:
                return 0
            try:
                left_out = self._make_room(Counter(names[i].tenant for i in fresh))
                for i in sorted(fresh, key=lambda i: names[i].depth, reverse=True) if left_out else ():
                    if left_out[names[i].tenant] > 0:
                        left_out[names[i].tenant] -= 1
                        fresh.remove(i)
                with self._index.transaction() as db:
                    slots = self._take(db, len(fresh))
                    now, stored = time.time(), 0
                    for i, slot in zip(fresh, slots, strict=False):
                        self.put(slot, names[i], records[i])
                        if self._index.insert(db, names[i], slot, now):
                            stored += 1
                        else:  # another process has stored it meanwhile
                            db.execute("INSERT INTO free VALUES (?)", (slot,))
            except (OSError, sqlite3.Error) as error:
                raise KVStoreError(
                    f"the KV store {self.folder} took no more blocks: {error}; free disk space, or lower its limit"
                ) from error
            return stored

    # Upkeep

    def names(self) -> list[BlockName]:
        """Returns the names of all blocks, beginnings of chains first."""
        return self._index.names()

    def images(self, names: Sequence[BlockName]) -> Iterator[bytes]:
        """Gives blocks with their headers, slot_bytes each, as they lie in the file; without those that are broken."""
        records = np.empty((len(names), self.record_bytes), dtype=np.uint8)
        for name, record, whole in zip(names, records, self.read([name[:2] for name in names], records), strict=True):
            if whole:
                yield self._layout.head(name, record) + record.tobytes()

    def verify(self) -> Iterator[tuple[BlockName, bool, bool]]:
        """Reads every block. Says whether it is whole, and whether it is held from now on: one that is not whole is
        dropped, unless the index takes no change now."""
        record = np.empty((1, self.record_bytes), dtype=np.uint8)
        for name in self.names():
            whole = self.read([name[:2]], record)[0]
            yield name, whole, whole or self.holds([name[:2]])[0]

    def prune(self, *, keep_bytes: int | None = None, unused_for_s: float | None = None) -> int:
        """Drops blocks until at most `keep_bytes` are left, and all that were not used for so long; gives the file's
        free end back to the disk. Returns how many blocks went. Raises KVStoreError."""
        try:
            with self._lock, self._index.transaction() as db:
                return self._prune(db, keep_bytes, unused_for_s)
        except (OSError, sqlite3.Error) as error:
            raise KVStoreError(f"the KV store {self.folder} drops no blocks now: {error}; try again later") from error

    def close(self) -> None:
        """Notes what was used last. Nothing else is left to do at the end of a process."""
        if (teller := self._teller) is not None:
            teller.cancel()
        with self._lock:
            self._opened.close()

    # Slots

    def _take(self, db: sqlite3.Connection, count: int) -> list[int]:
        """Returns up to `count` slots that hold nothing, and takes them off the list of free ones."""
        slots = [row[0] for row in db.execute("SELECT slot FROM free ORDER BY slot LIMIT ?", (count,))]
        db.executemany("DELETE FROM free WHERE slot = ?", [(slot,) for slot in slots])
        end = db.execute("SELECT value FROM meta WHERE key = 'slots'").fetchone()[0]
        more = min(count - len(slots), self.capacity - end)
        if more > 0:
            os.posix_fallocate(self._file, end * self.slot_bytes, more * self.slot_bytes)
            db.execute("UPDATE meta SET value = ? WHERE key = 'slots'", (end + more,))
            slots += range(end, end + more)
        return slots

    def _make_room(self, coming: Counter[str]) -> Counter[str]:
        """Evicts until blocks that are coming, so many of each tenant, fit; apart from writing them, so that no other
        process finds a block in a slot that is being written. Returns how many of each tenant's find no room."""
        with self._index.transaction() as db:
            evicted, left_out = self._index.make_room(db, self.shares, coming)
            self._evicted += evicted
            return left_out

    def _shrink(self) -> None:
        """Evicts what is more than the limit, moves what lies behind it into free slots, and ends the file there.

        Wherever a process is killed in between, each block lies, whole, where the index says: a slot is free before
        another block is written to it, and what was moved leaves the file after the index has learned of it.
        """
        self._make_room(Counter())
        with self._index.transaction() as db:
            high = db.execute("SELECT slot FROM blocks WHERE slot >= ? ORDER BY slot", (self.capacity,)).fetchall()
            free = db.execute("SELECT slot FROM free ORDER BY slot LIMIT ?", (len(high),)).fetchall()
            for (old,), (new,) in zip(high, free, strict=False):
                image = os.pread(self._file, self.slot_bytes, old * self.slot_bytes)
                self._write_slot(new, [image.ljust(self.slot_bytes)])
                db.execute("UPDATE blocks SET slot = ? WHERE slot = ?", (new, old))
                db.execute("UPDATE free SET slot = ? WHERE slot = ?", (old, new))
        self.prune()

    def _prune(self, db: sqlite3.Connection, keep_bytes: int | None, unused_for_s: float | None) -> int:
        count = 0
        if unused_for_s is not None:
            count += self._index.evict(db, "WHERE used_s < ?", (time.time() - unused_for_s,))
        if keep_bytes is not None:
            room = TierShares(keep_bytes // self.slot_bytes, self.shares.parts)
            count += self._index.make_room(db, room, {})[0]
        end = db.execute("SELECT COALESCE(MAX(slot) + 1, 0) FROM blocks").fetchone()[0]
        db.execute("DELETE FROM free WHERE slot >= ?", (end,))
        db.execute("UPDATE meta SET value = ? WHERE key = 'slots'", (end,))
        os.ftruncate(self._file, end * self.slot_bytes)
        return count

    def put(self, slot: int, name: BlockName, record: NDArray[np.uint8]) -> None:
        """Writes a block with its name into a slot of the file. Raises OSError."""
        self._write_slot(slot, [self._layout.head(name, record), record.data])

    def _write_slot(self, slot: int, parts: list[bytes | memoryview]) -> None:
        written = os.pwritev(self._file, parts, slot * self.slot_bytes)
        if written != self.slot_bytes:
            raise OSError(f"{written} of {self.slot_bytes} bytes were written")

    def _drop_broken(self, digest: bytes, group: int, slot: int) -> None:
        """Drops a block, unless another process has given its slot to another block in the meantime."""
        with self._lock, suppress(sqlite3.Error), self._index.transaction() as db:
            if self._index.evict(db, "WHERE digest = ? AND layer_group = ? AND slot = ?", (digest, group, slot)):
                self._broken += 1


def _make_private(folder: Path) -> None:
    """Lets the owner alone read the folder and its files: prompts can be told from blocks."""
    for path, mode in [(folder, 0o700), *((file, 0o600) for file in folder.iterdir())]:
        with suppress(PermissionError, FileNotFoundError):  # another's, or gone with another process
            path.chmod(mode)


def _runs(rows: Sequence[tuple[int, int]], most: int) -> Iterator[list[tuple[int, int]]]:
    """Gives (slot, row) pairs in order of slots, cut where neighbours end or there are `most`."""
    run: list[tuple[int, int]] = []
    for slot, row in rows:
        if run and (slot != run[-1][0] + 1 or len(run) == most):
            yield run
            run = []
        run.append((slot, row))
    if run:
        yield run
