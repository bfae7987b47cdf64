"""A damaged index of a store on disk: it is made again from the blocks, or left to who uses it."""

import os
import random
import resource
import sqlite3
from contextlib import closing

import pytest
from disk_blocks import name_of, read, store_of, write

from pagemill.errors import KVStoreError
from pagemill.kvcache import store_index


@pytest.mark.parametrize("damage", ["garbage", "empty", "gone", "half"])
def test_a_damaged_index_is_made_again_from_the_blocks(tmp_path, damage):
    store = store_of(tmp_path)
    write(store, range(40))
    store.prune(keep_bytes=30 * 8192)
    store.close()
    index = store.folder / "index.sqlite"
    raw = index.read_bytes()
    for suffix in ("-wal", "-shm"):
        index.with_name(index.name + suffix).unlink(missing_ok=True)
    if damage == "gone":
        index.unlink()
    else:
        index.write_bytes({"garbage": os.urandom(len(raw)), "empty": b"", "half": raw[: len(raw) // 2]}[damage])
    store = store_of(tmp_path)
    assert read(store, list(range(40))) == list(range(30))
    assert write(store, range(40)) == 10


@pytest.mark.parametrize(
    "damage",
    [
        "UPDATE meta SET value = NULL WHERE key = 'slots'",
        "DELETE FROM meta WHERE key = 'slots'",
        "CREATE TABLE b AS SELECT * FROM blocks; DROP TABLE blocks; ALTER TABLE b RENAME TO blocks; "
        "UPDATE blocks SET slot = NULL WHERE slot = 3",
        "UPDATE blocks SET slot = 'three' WHERE slot = 3",
        "UPDATE blocks SET slot = 1000000000000 WHERE slot = 3",
        "UPDATE blocks SET depth = 'deep' WHERE slot = 3",
        "INSERT INTO free VALUES (-3)",
        "INSERT INTO meta VALUES ('windows', '[null, -1]')",
        "INSERT INTO meta VALUES ('windows', '[')",
        "INSERT INTO meta VALUES ('windows', NULL)",
    ],
)
def test_an_index_with_other_entries_than_it_should_have_is_made_again(tmp_path, damage):
    store = store_of(tmp_path)
    write(store, range(40))
    store.close()
    with closing(sqlite3.connect(store.folder / "index.sqlite")) as index:
        index.executescript(damage)
    store = store_of(tmp_path)
    assert read(store, list(range(40))) == list(range(40))
    assert store.names() == [name_of(i) for i in range(40)]
    assert write(store, range(60)) == 20
    assert store.stats().blocks == 60


def test_a_damaged_index_that_others_use_is_left_to_them(tmp_path):
    store = store_of(tmp_path)
    write(store, range(40))
    with closing(sqlite3.connect(store.folder / "index.sqlite")) as index:
        index.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    (store.folder / "index.sqlite").write_bytes(os.urandom(50000))
    with pytest.raises(KVStoreError, match="another process uses it"):
        store_of(tmp_path)


def uses_in(folder) -> list[float]:
    """When each block was last used, which headers do not tell: an index that is made again knows it no more."""
    with closing(sqlite3.connect(folder / "index.sqlite")) as index:
        return [used_s for (used_s,) in index.execute("SELECT used_s FROM blocks ORDER BY slot")]


def test_a_locked_index_is_no_damaged_one(tmp_path, monkeypatch):
    monkeypatch.setattr(store_index, "BUSY_TIMEOUT_S", 0.05)
    store = store_of(tmp_path)
    write(store, range(40))
    store.close()
    known = uses_in(store.folder)
    with closing(sqlite3.connect(store.folder / "index.sqlite", isolation_level=None)) as other:
        for lock in ("BEGIN IMMEDIATE", "PRAGMA locking_mode = EXCLUSIVE; BEGIN EXCLUSIVE"):
            other.executescript(lock)
            with pytest.raises(KVStoreError, match=r"locked; another process is writing .* try again"):
                store_of(tmp_path)
            other.execute("ROLLBACK")
    assert uses_in(store.folder) == known
    store = store_of(tmp_path)
    assert read(store, range(40)) == list(range(40))
    with closing(sqlite3.connect(store.folder / "index.sqlite", isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(KVStoreError, match="drops no blocks now: database is locked; try again"):
            store.prune(keep_bytes=0)
    assert store.prune(keep_bytes=30 * 8192) == 10


def test_an_index_that_a_full_disk_does_not_let_be_opened_is_no_damaged_one(tmp_path):
    """SQLite opens an index only where it may write a file of 32 KiB beside it."""
    store = store_of(tmp_path)
    write(store, range(40))
    store.close()
    known, limits = uses_in(store.folder), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (16 << 10, limits[1]))
    try:
        with pytest.raises(KVStoreError, match=r"cannot be used now: .*; free disk space"):
            store_of(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert uses_in(store.folder) == known
    assert read(store_of(tmp_path), range(40)) == list(range(40))


def test_random_damage_to_the_index_never_brings_wrong_blocks(tmp_path):
    rng = random.Random(3)
    store = store_of(tmp_path)
    write(store, range(64))
    store.close()
    index = store.folder / "index.sqlite"
    raw = index.read_bytes()
    for _ in range(40):
        hurt = bytearray(raw)
        for _ in range(rng.choice([1, 3, 30])):
            hurt[rng.randrange(len(hurt))] ^= 1 << rng.randrange(8)
        for suffix in ("-wal", "-shm"):
            index.with_name(index.name + suffix).unlink(missing_ok=True)
        index.write_bytes(hurt)
        try:
            store = store_of(tmp_path)
        except KVStoreError:
            continue
        read(store, list(range(64)))
        store.close()
