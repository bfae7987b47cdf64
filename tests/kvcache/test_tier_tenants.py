"""Tenants in the lower tiers: who stays within its share loses nothing to others, and nobody more than must be."""

from __future__ import annotations

import hashlib
import shutil
import sqlite3
import tempfile
from collections import Counter
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from disk_blocks import FORMAT, RECORD, content, digest_of, name_of, store_of
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from pagemill.errors import KVStoreError
from pagemill.kvcache.host_store import ENTRY_BYTES, CompressedStore, HostStore
from pagemill.kvcache.offload_tiers import OffloadTiers
from pagemill.memory.tier_shares import TierShares
from pagemill.memory.work import BlockName

CAPACITY = 12
TENANTS = ("a", "b", "c", "default")
RECORDS = np.random.default_rng(1).integers(0, 256, (7, RECORD), dtype=np.uint8)
for rank, image in enumerate(RECORDS):
    image[: rank * 600] = 0  # compressed, they have seven sizes


def owned(tenant: str, number: int) -> BlockName:
    digest = hashlib.sha256(f"{tenant} {number}".encode()).digest()
    return BlockName(digest, number % 2, bytes(32), number, tenant)


def record_of(name: BlockName) -> np.ndarray:
    return RECORDS[name.depth % len(RECORDS)]


names = st.builds(owned, st.sampled_from(TENANTS), st.integers(0, 24))
parts = st.sampled_from([{}, {"a": 0.5}, {"a": 0.25, "b": 0.3, "default": 0.45}, {"c": 1.0}, {"nobody": 0.6}])


def share(tenant: str, holders: set[str], parts: dict[str, float], size: int) -> float:
    """A tenant's share as the documentation says it."""
    guaranteed = {name: int(parts.get(name, 0) * size) for name in holders}
    return guaranteed[tenant] + (size - sum(guaranteed.values())) / len(holders)


class Tier(RuleBasedStateMachine):
    """A store beside a list of what it must hold, of each tenant in the order of use."""

    size = CAPACITY
    spills = True

    def __init__(self) -> None:
        super().__init__()
        self.parts: dict[str, float] = {}
        self.wanted: set[bytes] = set()
        self.order: dict[str, list[BlockName]] = {tenant: [] for tenant in TENANTS}
        self.store = self.open()

    def open(self):
        return HostStore(CAPACITY, RECORD, wanted=self.wanted)

    def size_of(self, name: BlockName) -> int:
        return 1

    def sorted(self, coming: list[BlockName]) -> list[BlockName]:
        """Blocks that come together, those first that make room first."""
        return coming

    def total(self, tenant: str, coming: list[BlockName] = ()) -> int:
        return sum(map(self.size_of, self.order[tenant])) + sum(self.size_of(n) for n in coming if n.tenant == tenant)

    @initialize(parts=parts)
    def begin(self, parts) -> None:
        self.share(parts)

    @rule(parts=parts)
    def share(self, parts) -> None:
        self.parts = self.store.shares.parts = parts

    @rule(batch=st.lists(names, max_size=9, unique=True))
    def write(self, batch) -> None:
        self._write(batch)

    @rule(tenant=st.sampled_from(TENANTS), first=st.integers(0, 12), count=st.integers(6, 12))
    def flood(self, tenant, first, count) -> None:
        self._write([owned(tenant, number) for number in range(first, first + count)])

    def _write(self, batch: list[BlockName]) -> None:
        known = {name for order in self.order.values() for name in order}
        coming = self.sorted([name for name in batch if name not in known])
        needs = {tenant: self.total(tenant, coming) for tenant in TENANTS}
        holders = {tenant for tenant, need in needs.items() if need}
        gone: list[BlockName] = []

        def spill(spilled, records) -> None:
            there = self.store.holds([name[:2] for name in spilled])
            assert there == [True] * len(spilled), "found until they are stored below"
            for name, record in zip(spilled, records, strict=True):
                np.testing.assert_array_equal(record, record_of(name))
            gone.extend(spilled)

        self.store.write(batch, [record_of(name) for name in batch], spill)
        after = {name for name in known | set(coming) if self.store.holds([name[:2]])[0]}
        lost = Counter(name.tenant for name in known | set(coming) if name not in after)
        for tenant in holders:
            if needs[tenant] <= share(tenant, holders, self.parts, self.size):
                assert not lost[tenant], f"{tenant} is within its share"
            order = self.order[tenant] + [name for name in coming if name.tenant == tenant]
            self.order[tenant] = self.rest(order, lost[tenant])
            assert set(self.order[tenant]) == {name for name in after if name.tenant == tenant}, "the last used stay"
        left = sum(map(self.total, TENANTS))
        assert left <= self.size
        if lost:
            largest = max(self.size_of(name) for name in (known | set(coming)) - after)
            assert left + largest > self.size, "no more is lost than must be"
        if self.spills:
            assert sorted(gone) == sorted((known | set(coming)) - after), "what is lost here goes down, once"

    def rest(self, order: list[BlockName], lost: int) -> list[BlockName]:
        """Returns the blocks that stay, in order, if so many leave. Wanted blocks leave after all others."""
        others = [name for name in order if name.digest not in self.wanted]
        gone = set(others[:lost])
        last = order.index(others[lost - 1]) + 1 if 0 < lost <= len(others) else len(order) * (lost > 0)
        passed = [name for name in order[:last] if name.digest in self.wanted]
        return [name for name in order[last:] if name not in gone] + passed[max(0, lost - len(others)) :]

    @rule(batch=st.lists(names, max_size=9))
    def want(self, batch) -> None:
        if self.spills:
            self.wanted.clear()
            self.wanted |= {name.digest for name in batch}

    @rule(data=st.data())
    def use(self, data) -> None:
        held = sorted(name for order in self.order.values() for name in order)
        used = data.draw(st.lists(st.sampled_from(held), unique=True)) if held else []
        self.store.use([name[:2] for name in used])
        for name in reversed(used):
            self.order[name.tenant].remove(name)
            self.order[name.tenant].append(name)

    @invariant()
    def holds_what_it_must(self) -> None:
        held = {tenant: len(order) for tenant, order in self.order.items() if order}
        assert self.store.blocks_by_tenant() == held
        stored = [name for order in self.order.values() for name in order]
        assert sorted(self.store.names()) == sorted(stored)
        out = np.zeros((len(stored), RECORD), dtype=np.uint8)
        assert all(self.store.read([name[:2] for name in stored], out))
        for record, name in zip(out, stored, strict=True):
            np.testing.assert_array_equal(record, record_of(name))

    def teardown(self) -> None:
        self.store.close()


class CompressedTier(Tier):
    size = 4 * (RECORD + ENTRY_BYTES)
    sizes: tuple[int, ...] = ()

    def open(self):
        if not self.sizes:
            for image in RECORDS:
                store = CompressedStore(1 << 20, 2)
                store.write([name_of(0)], [image], lambda *blocks: None)
                CompressedTier.sizes += (store.nbytes,)
        return CompressedStore(self.size, 2, self.wanted)

    def size_of(self, name: BlockName) -> int:
        return self.sizes[name.depth % len(RECORDS)]


class DiskTier(Tier):
    spills = False

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp())
        super().__init__()

    def open(self):
        return store_of(self.folder, CAPACITY)

    def sorted(self, coming: list[BlockName]) -> list[BlockName]:
        return sorted(coming, key=lambda name: -name.depth)

    @rule()
    def restart(self) -> None:
        self.store.close()
        self.store = self.open()
        self.share(self.parts)

    def teardown(self) -> None:
        super().teardown()
        shutil.rmtree(self.folder)


TestHostTier, TestCompressedTier, TestDiskTier = Tier.TestCase, CompressedTier.TestCase, DiskTier.TestCase
TestHostTier.settings = TestCompressedTier.settings = settings(max_examples=150, stateful_step_count=25, deadline=None)
TestDiskTier.settings = settings(max_examples=25, stateful_step_count=20, deadline=None)


def test_what_is_kept_at_the_end_is_shared_too(tmp_path):
    """The calm tenant has a block on disk, one in host memory, and one in the pool, all used before the flood."""
    disk = store_of(tmp_path, CAPACITY)
    host = HostStore(8, RECORD)
    tiers = OffloadTiers([host, disk], RECORD)
    calm = [owned("calm", number) for number in range(3)]
    flood = [owned("flood", number) for number in range(40)]
    for tier, name in ((disk, calm[0]), (host, calm[1])):
        tier.write([name], [content(0)], lambda *blocks: None)
    for first in range(0, 30, 3):
        tiers.write(flood[first : first + 3], [content(0)] * 3)
    assert disk.blocks_by_tenant() == {"calm": 1, "flood": CAPACITY - 1}
    pool = [*flood[:29:-1], calm[2]]  # used last first
    kept = tiers.keepable(pool)
    assert [name.tenant for name in kept].count("calm") == 2
    assert [name for name in kept if name.tenant == "flood"] == flood[: 40 - (CAPACITY - 3) - 1 : -1]
    tiers.keep([name for name in kept if name in pool], [content(0)] * sum(name in pool for name in kept))
    tiers.sink(kept, 2)
    tiers.use([name[:2] for name in kept])
    disk.close()
    again = store_of(tmp_path, CAPACITY)
    assert again.blocks_by_tenant() == {"calm": 3, "flood": CAPACITY - 3}
    assert set(again.names()) == {*calm, *flood[-(CAPACITY - 3) :]}


OLD_SCHEMA = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value) WITHOUT ROWID;
CREATE TABLE blocks (
    digest BLOB, layer_group INTEGER, slot INTEGER NOT NULL UNIQUE, parent BLOB NOT NULL, depth INTEGER NOT NULL,
    used_s REAL NOT NULL, PRIMARY KEY (digest, layer_group)
) WITHOUT ROWID;
CREATE INDEX blocks_by_use ON blocks (used_s, depth DESC);
CREATE TABLE free (slot INTEGER PRIMARY KEY);
"""


def test_a_store_without_tenants_is_the_default_ones(tmp_path):
    store = store_of(tmp_path, CAPACITY)
    store.write([name_of(i) for i in range(9)], [content(i) for i in range(9)])
    folder = store.folder
    store.close()
    (folder / "index.sqlite").unlink()
    with closing(sqlite3.connect(folder / "index.sqlite")) as old, old:
        old.executescript(OLD_SCHEMA)
        old.executemany("INSERT INTO meta VALUES (?, ?)", [("format", FORMAT.to_json()), ("slots", 9)])
        rows = [(*name_of(i)[:2], i, *name_of(i)[2:4], 1e9 + i) for i in range(9)]
        old.executemany("INSERT INTO blocks VALUES (?, ?, ?, ?, ?, ?)", rows)
    for _ in range(2):
        store = store_of(tmp_path, CAPACITY)
        assert store.blocks_by_tenant() == {"default": 9}
        store.close()
    store = store_of(tmp_path, CAPACITY)
    assert store.write([owned("calm", i) for i in range(6)], [content(0)] * 6) == 6
    assert store.blocks_by_tenant() == {"calm": 6, "default": 6}
    assert store.holds([(digest_of(i), 0) for i in range(9)]) == [False] * 3 + [True] * 6, "by their times of use"
    store.close()


@pytest.mark.parametrize(
    "damage", ["UPDATE tenants SET blocks = 1", "DELETE FROM tenants", "INSERT INTO tenants VALUES ('gone', 'x')"]
)
def test_an_index_that_counts_wrong_is_made_again_and_its_blocks_are_the_default_tenants(tmp_path, damage):
    store = store_of(tmp_path, CAPACITY)
    store.write([owned("calm", i) for i in range(3)], [content(0)] * 3)
    folder = store.folder
    store.close()
    with closing(sqlite3.connect(folder / "index.sqlite")) as index, index:
        index.execute(damage)
    store = store_of(tmp_path, CAPACITY)
    assert store.blocks_by_tenant() == {"default": 3}
    assert store.write([owned("calm", i) for i in range(3, 6)], [content(0)] * 3) == 3
    assert store.blocks_by_tenant() == {"calm": 3, "default": 3}
    store.close()


def test_an_index_of_a_later_version_is_refused_and_kept(tmp_path):
    store = store_of(tmp_path, CAPACITY)
    store.write([owned("calm", 0)], [content(0)])
    path = store.folder / "index.sqlite"
    store.close()
    with closing(sqlite3.connect(path)) as index, index:
        index.execute("PRAGMA user_version = 9")
    with pytest.raises(KVStoreError, match="has version 9, and this pagemill reads versions up to 2; use a newer one"):
        store_of(tmp_path, CAPACITY)
    with closing(sqlite3.connect(path)) as index, index:
        assert index.execute("PRAGMA user_version").fetchone() == (9,)
        index.execute("PRAGMA user_version = 2")
    store = store_of(tmp_path, CAPACITY)
    assert store.blocks_by_tenant() == {"calm": 1}
    store.close()


def test_a_flood_gives_way_before_others():
    held = {"flood": 10_000, **{f"calm {i}": 10 for i in range(200)}}
    shares = TierShares(10_000)
    assert shares.giving(held) == {"flood": 2000}
