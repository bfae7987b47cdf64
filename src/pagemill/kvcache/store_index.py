"""StoreIndex: which slots of a store's file hold what, in an SQLite file that several processes may use at once."""

from __future__ import annotations

import json
import os
import sqlite3
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import chain
from pathlib import Path

from pagemill.errors import KVStoreError
from pagemill.hub.private_files import lock_alone, open_private
from pagemill.kvcache.store_format import HEADER_BYTES, StoreFormat, name_in
from pagemill.memory.tier_shares import TierShares
from pagemill.memory.work import BlockName
from pagemill.tenant_limits import DEFAULT_TENANT

BUSY_TIMEOUT_S = 30.0
"""The longest wait for another process's write."""
TICK_S = 1e-6
"""The difference between the times of use of blocks that were used together."""
AHEAD_S = 1.0
"""A time of use that lies further in the future is one by a clock that was wrong, and counts as now."""

VERSION = 2
"""The version of an index, its `user_version`. One of version 0 knows no tenants, one of version 1 keeps no changes;
both are brought up to date where they are opened. Blocks of version 0 are the tenant "default"'s."""

MOST_CHANGES = 1 << 16
"""Changes that an index keeps at least for those who follow it, the last ones."""
TRIMMED = 1 << 10
"""How many changes are forgotten at once."""

_TABLES = (
    "CREATE TABLE meta (key TEXT PRIMARY KEY, value) WITHOUT ROWID",
    "CREATE TABLE blocks (digest BLOB, layer_group INTEGER, slot INTEGER NOT NULL UNIQUE, parent BLOB NOT NULL, "
    "depth INTEGER NOT NULL, used_s REAL NOT NULL, PRIMARY KEY (digest, layer_group)) WITHOUT ROWID",
    "CREATE TABLE free (slot INTEGER PRIMARY KEY)",
)
_TENANTS = (
    f"ALTER TABLE blocks ADD COLUMN tenant TEXT NOT NULL DEFAULT '{DEFAULT_TENANT}'",
    "CREATE TABLE tenants (tenant TEXT PRIMARY KEY, blocks INTEGER NOT NULL) WITHOUT ROWID",
    "INSERT INTO tenants SELECT tenant, COUNT(*) FROM blocks GROUP BY tenant",
    "CREATE TRIGGER stored AFTER INSERT ON blocks BEGIN INSERT OR IGNORE INTO tenants VALUES (new.tenant, 0); "
    "UPDATE tenants SET blocks = blocks + 1 WHERE tenant = new.tenant; END",
    "CREATE TRIGGER dropped AFTER DELETE ON blocks BEGIN "
    "UPDATE tenants SET blocks = blocks - 1 WHERE tenant = old.tenant; END",
    "DROP INDEX IF EXISTS blocks_by_use",
    "CREATE INDEX blocks_by_tenant ON blocks (tenant, used_s, depth DESC)",
    "PRAGMA user_version = 1",
)
_NOTE_CHANGE = (
    "INSERT INTO changes (digest, layer_group) VALUES ({row}.digest, {row}.layer_group); "
    f"DELETE FROM changes WHERE number <= last_insert_rowid() - {MOST_CHANGES} "
    f"AND last_insert_rowid() % {TRIMMED} = 0;"
)
_CHANGES = (
    "CREATE TABLE changes (number INTEGER PRIMARY KEY, digest BLOB NOT NULL, layer_group INTEGER NOT NULL)",
    f"CREATE TRIGGER came AFTER INSERT ON blocks BEGIN {_NOTE_CHANGE.format(row='new')} END",
    f"CREATE TRIGGER went AFTER DELETE ON blocks BEGIN {_NOTE_CHANGE.format(row='old')} END",
    "PRAGMA user_version = 2",
)
_UPDATES = (_TENANTS, _CHANGES)
"""By version, what makes the next one of it."""

_SOUND = """
SELECT COUNT(*) FROM meta WHERE key = 'slots' AND typeof(value) = 'integer'
AND NOT EXISTS (
    SELECT 1 FROM blocks WHERE typeof(digest) <> 'blob' OR typeof(layer_group) <> 'integer' OR typeof(slot) <> 'integer'
    OR slot NOT BETWEEN 0 AND value - 1 OR typeof(parent) <> 'blob' OR typeof(depth) <> 'integer'
    OR typeof(used_s) <> 'real' OR typeof(tenant) <> 'text'
) AND NOT EXISTS (
    SELECT tenant, COUNT(*) FROM blocks GROUP BY tenant EXCEPT SELECT tenant, blocks FROM tenants
) AND NOT EXISTS (
    SELECT tenant, blocks FROM tenants WHERE blocks IS NOT 0
    EXCEPT SELECT tenant, COUNT(*) FROM blocks GROUP BY tenant
) AND NOT EXISTS (SELECT 1 FROM free WHERE slot NOT BETWEEN 0 AND value - 1)
"""
"""Gives 1 for an index whose entries are what they should be. SQLite holds anything in any column."""

_NO_DAMAGE = ("locked", "locking", "is full", "disk I/O error", "unable to open", "readonly", "permission denied")
"""Parts of SQLite's messages that say an index cannot be used now, and nothing of what it holds."""
_WAIT = "another process is writing to it: try again when that has ended"
_MAKE_ROOM = "free disk space, and see that its files may be written"


class StoreIndex:
    """Indexes the blocks of a store's folder. Thread-safe. A damaged index is made again from the headers in the
    blocks' file, if nobody else uses the folder; one that is locked, or that the disk does not let be opened, is left.

    file: descriptor of the blocks' file, in slots of `slot_bytes`.
    in_use: descriptor of a file that all who use the folder have locked together; it is locked alone if the index was
        made again.
    windows: by layer group, the attention window in tokens, or None for full attention; noted for who opens the store
        later. None where they are not known.
    Raises KVStoreError, OSError.
    """

    def __init__(
        self,
        folder: Path,
        format: StoreFormat,
        file: int,
        slot_bytes: int,
        in_use: int,
        windows: Sequence[int | None] | None = None,
    ) -> None:
        self._folder = folder
        self._format = format
        self._file = file
        self._slot_bytes = slot_bytes
        self._windows = windows
        self._lookup_lock = threading.Lock()
        self._used: dict[tuple[bytes, int], float] = {}  # since the last transaction
        path = folder / "index.sqlite"
        try:
            self._connect(path)
        except (sqlite3.DatabaseError, ValueError, TypeError) as error:
            if isinstance(error, sqlite3.OperationalError) and any(words in str(error) for words in _NO_DAMAGE):
                self._disconnect()
                raise KVStoreError(
                    f"the index of the KV store {folder} cannot be used now: {error}; "
                    f"{_WAIT if 'locked' in str(error) else _MAKE_ROOM}"
                ) from error
            self._rebuild(path, in_use, error)
        if (stored := self._stored_format()).key != format.key:
            self.close()
            raise KVStoreError(
                f"{folder} holds blocks of {stored}, not of {format}; rename it {stored.key}, or remove it"
            )

    def windows(self) -> list[int | None] | None:
        """Returns the windows that were noted last; None if none were. Raises ValueError or TypeError for other
        values."""
        with self._reading() as lookup:
            row = lookup.execute("SELECT value FROM meta WHERE key = 'windows'").fetchone()
        windows = None if row is None else json.loads(row[0])
        if windows is not None and not all(each is None or (isinstance(each, int) and each > 0) for each in windows):
            raise ValueError(f"its windows are {windows!r}")
        return windows

    def slots(self, blocks: Sequence[tuple[bytes, int]]) -> list[int | None]:
        """Returns the slots of blocks (digest, group); None for those that are not stored."""
        query = "SELECT slot FROM blocks WHERE digest = ? AND layer_group = ?"
        with self._reading() as lookup:
            found = [lookup.execute(query, block).fetchone() for block in blocks]
        return [None if row is None else row[0] for row in found]

    def names(self) -> list[BlockName]:
        """Returns the names of all blocks, beginnings of chains first."""
        with self._reading() as lookup:
            query = "SELECT digest, layer_group, parent, depth, tenant FROM blocks ORDER BY depth, slot"
            return [BlockName(*row) for row in lookup.execute(query)]

    def num_blocks(self) -> int:
        with self._reading() as lookup:
            return self.count(lookup)

    def blocks_by_tenant(self) -> dict[str, int]:
        with self._reading() as lookup:
            return dict(lookup.execute("SELECT tenant, blocks FROM tenants WHERE blocks > 0"))

    def follow(self, group: int, most: int) -> Iterator[dict[bytes, bool]]:
        """Implements `FollowedStore.follow`. Blocks are listed in the order of their digests, and beside that changes
        are read as they come, whoever makes them. Each page is true when it is read, and what changes later follows in
        a later one. Raises KVStoreError too where more has changed since the last page than is kept."""
        with self._reading() as lookup:
            seen = lookup.execute("SELECT COALESCE(MAX(number), 0) FROM changes").fetchone()[0]
        listed: bytes | None = b""
        while True:
            with self._reading() as lookup:
                query = (
                    "SELECT number, c.digest, c.layer_group, slot FROM changes AS c LEFT JOIN blocks USING (digest, "
                    "layer_group) WHERE number > ? ORDER BY number LIMIT ?"
                )
                changes = lookup.execute(query, (seen, most)).fetchall()
                if changes and changes[0][0] > seen + 1:
                    raise KVStoreError(f"more has changed at once in the KV store {self._folder} than its index keeps")
                page = {digest: slot is not None for _, digest, its_group, slot in changes if its_group == group}
                seen = changes[-1][0] if changes else seen
                if listed is not None and len(changes) < most:
                    query = "SELECT digest FROM blocks WHERE digest > ? AND layer_group = ? ORDER BY digest LIMIT ?"
                    more = [digest for (digest,) in lookup.execute(query, (listed, group, most - len(changes)))]
                    page |= dict.fromkeys(more, True)
                    listed = more[-1] if len(more) == most - len(changes) else None
            if page or listed is None:
                yield page

    def use(self, blocks: Sequence[tuple[bytes, int]]) -> None:
        """Notes, with the next transaction, that blocks (digest, group) were used just now, the first of them last."""
        last = time.time() + len(blocks) * TICK_S
        with self._lookup_lock:
            self._used.update((block, last - at * TICK_S) for at, block in enumerate(blocks))

    @contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """Lets one writer in at a time, over all processes. Notes what was used since the last one."""
        self._db.execute("BEGIN IMMEDIATE")
        try:
            with self._lookup_lock:
                used, self._used = self._used, {}
            if used:
                query = "UPDATE blocks SET used_s = MAX(used_s, ?) WHERE digest = ? AND layer_group = ?"
                self._db.executemany(query, ((used_s, *block) for block, used_s in used.items()))
            yield self._db
        except BaseException:
            with suppress(sqlite3.Error):  # which may have taken it back already
                self._db.execute("ROLLBACK")
            raise
        self._db.execute("COMMIT")

    @staticmethod
    def count(db: sqlite3.Connection) -> int:
        query = "SELECT value - (SELECT COUNT(*) FROM free) FROM meta WHERE key = 'slots'"
        return int(db.execute(query).fetchone()[0])

    @staticmethod
    def insert(db: sqlite3.Connection, name: BlockName, slot: int, used_s: float) -> bool:
        """Notes that a slot holds a block. Returns False, and changes nothing, if another slot holds it."""
        row = (name.digest, name.group, slot, name.parent, name.depth, used_s, name.tenant)
        return db.execute("INSERT OR IGNORE INTO blocks VALUES (?, ?, ?, ?, ?, ?, ?)", row).rowcount > 0

    @staticmethod
    def evict(db: sqlite3.Connection, which: str, values: tuple[float | bytes | str, ...]) -> int:
        """Forgets blocks, and frees their slots. Returns how many. which: the end of a query."""
        gone = db.execute(f"SELECT digest, layer_group, slot FROM blocks {which}", values).fetchall()
        db.executemany("DELETE FROM blocks WHERE digest = ? AND layer_group = ?", [row[:2] for row in gone])
        db.executemany("INSERT INTO free VALUES (?)", [row[2:] for row in gone])
        return len(gone)

    def make_room(
        self, db: sqlite3.Connection, shares: TierShares, coming: Mapping[str, int]
    ) -> tuple[int, Counter[str]]:
        """Evicts until as many blocks as are coming, by tenant, have room: a tenant's longest unused first, of these a
        chain's end. Returns how many were evicted, and of each tenant how many of those that come find no room."""
        self._correct_times(db)
        held = Counter(dict(db.execute("SELECT tenant, blocks FROM tenants")))
        giving = shares.giving(held + Counter(coming))
        which = "WHERE tenant = ? ORDER BY used_s, depth DESC LIMIT ?"
        return sum(self.evict(db, which, each) for each in giving.items()), giving - held

    def tell(self) -> None:
        """Notes what was used since the last transaction, for others who use the folder. Raises sqlite3.Error."""
        if self._used:
            with self.transaction():
                pass

    def close(self) -> None:
        """Notes what was used last. Nothing else is left to do at the end of a process."""
        with suppress(sqlite3.Error):
            self.tell()
        self._db.close()
        self._lookup.close()

    @staticmethod
    def _correct_times(db: sqlite3.Connection) -> None:
        """Lets uses in the future count as now: by a clock that was wrong and has been set back, these blocks would
        stay until it is as late again."""
        future = "UPDATE blocks SET used_s = ? WHERE tenant IN (SELECT tenant FROM tenants) AND used_s > ?"
        now_s = time.time()
        db.execute(future, (now_s, now_s + AHEAD_S))

    def _stored_format(self) -> StoreFormat:
        return StoreFormat.from_json(self._db.execute("SELECT value FROM meta WHERE key = 'format'").fetchone()[0])

    def _connect(self, path: Path) -> None:
        os.close(open_private(path))  # before SQLite would, with other modes
        self._db, self._lookup = (
            sqlite3.connect(path, timeout=BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False)
            for _ in range(2)
        )
        _write_ahead(self._db)
        self._db.execute("PRAGMA synchronous = NORMAL")
        with self.transaction() as db:
            if db.execute("SELECT COUNT(*) FROM sqlite_master").fetchone()[0] == 0:
                for statement in chain(_TABLES, _TENANTS):
                    db.execute(statement)
                db.execute("INSERT INTO meta VALUES ('format', ?), ('slots', 0)", (self._format.to_json(),))
                self._recover(db)
                for statement in _CHANGES:  # what was there before is no change
                    db.execute(statement)
            elif (version := db.execute("PRAGMA user_version").fetchone()[0]) > VERSION:
                raise KVStoreError(
                    f"the index of the KV store {self._folder} has version {version}, and this pagemill reads versions "
                    f"up to {VERSION}; use a newer one, or remove the folder"
                )
            else:
                for statement in chain(*_UPDATES[version:]):
                    db.execute(statement)
                self._correct_times(db)
            if self._windows is not None:
                db.execute("INSERT OR REPLACE INTO meta VALUES ('windows', ?)", (json.dumps(self._windows),))
        if self._db.execute("PRAGMA quick_check").fetchone()[0] != "ok":
            raise sqlite3.DatabaseError("its pages are damaged")
        if not self._db.execute(_SOUND).fetchone()[0]:
            raise sqlite3.DatabaseError("its entries are damaged")
        self._stored_format()
        self.windows()

    def _rebuild(self, path: Path, in_use: int, error: Exception) -> None:
        """Makes a damaged index again from the slots' headers, if nobody else is using the store."""
        self._disconnect()
        if not lock_alone(in_use):
            raise KVStoreError(
                f"the index of the KV store {self._folder} is damaged ({error}), and another process uses it; end that "
                "process, then start again"
            ) from error
        for suffix in ("", "-wal", "-shm"):
            path.with_name(path.name + suffix).unlink(missing_ok=True)
        self._connect(path)

    def _disconnect(self) -> None:
        for name in ("_db", "_lookup"):
            with suppress(AttributeError, sqlite3.Error):
                getattr(self, name).close()

    def _recover(self, db: sqlite3.Connection) -> None:
        """Lists what the headers say that the slots hold. Contents are checked when they are read."""
        slots = os.fstat(self._file).st_size // self._slot_bytes
        db.execute("UPDATE meta SET value = ? WHERE key = 'slots'", (slots,))
        for slot in range(slots):
            name = name_in(os.pread(self._file, HEADER_BYTES, slot * self._slot_bytes))
            held = False
            if name is not None:
                held = self.insert(db, name, slot, 0.0)
            if not held:
                db.execute("INSERT INTO free VALUES (?)", (slot,))

    @contextmanager
    def _reading(self) -> Iterator[sqlite3.Connection]:
        """Reads in one transaction: a query that is one of its own takes and gives back the file's locks."""
        try:
            with self._lookup_lock, self._lookup:
                self._lookup.execute("BEGIN")
                yield self._lookup
        except sqlite3.Error as error:
            raise KVStoreError(f"the index of the KV store {self._folder} cannot be read: {error}") from error


def _write_ahead(db: sqlite3.Connection) -> None:
    """Chooses the journal. SQLite's own waiting does not cover this when another process opens a new index too."""
    until = time.monotonic() + BUSY_TIMEOUT_S
    while True:
        try:
            db.execute("PRAGMA journal_mode = WAL")
            return
        except sqlite3.OperationalError as error:  # noqa: PERF203, it waits
            if "locked" not in str(error) or time.monotonic() > until:
                raise
            time.sleep(0.01)
