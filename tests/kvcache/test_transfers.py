"""What Transfers tell the tiers of use: what was used longest ago makes room there, a chain's end first."""

import gc
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from unittest.mock import Mock

import numpy as np
import pytest
from disk_blocks import FORMAT, digest_of, name_of, write_frames

from harness import frame_shape
from pagemill.errors import KVStoreError
from pagemill.kvcache import transfers as transfers_module
from pagemill.kvcache.device_pool import DevicePool
from pagemill.kvcache.disk_store import DiskStore
from pagemill.kvcache.host_store import HostStore
from pagemill.kvcache.load_time import LoadTime
from pagemill.kvcache.offload_tiers import OffloadTiers
from pagemill.kvcache.pages_ahead import PagesAhead, PooledFrames
from pagemill.kvcache.store_format import Slots
from pagemill.kvcache.transfers import Transfers, piece_of
from pagemill.memory.work import Load, Save
from waiting import wait_until

ROOM = 12
CHAIN, OTHERS = list(range(6)), list(range(100, 106))
"""The numbers of blocks; those of a chain are neighbours."""


class Bench:
    """A pool over tiers, each with room for so many blocks, which hold zeros. tier: the lowest."""

    def __init__(self, tiers: str, path) -> None:
        self.pool = DevicePool(ROOM, frame_shape([None] * 3, 3, 20, 8, "float32"))
        record_bytes = self.pool.layout.frame_bytes
        stores = [HostStore(ROOM, record_bytes)] if "host" in tiers else []
        if "disk" in tiers:
            format = replace(FORMAT, record_bytes=record_bytes)
            stores.append(DiskStore(path, format, ROOM * Slots(record_bytes).nbytes))
        self.tier = stores[-1]
        self.tiers = OffloadTiers(stores, record_bytes)
        self.frames = PooledFrames(self.pool, PagesAhead(self.pool))
        self.transfers = Transfers(self.frames, self.tiers)

    def evict(self, blocks) -> None:
        """From the pool, which gives up a chain's end first."""
        self.transfers.save([Save(0, name_of(i)) for i in reversed(blocks)])
        self.transfers.flush()

    def load(self, blocks) -> None:
        self.transfers.load(Load(0, [(digest_of(i), 0) for i in blocks], list(range(len(blocks)))))
        assert self.transfers.finished(wait_s=30) == {0: [True] * len(blocks)}
        self.transfers.flush()

    def held(self) -> list[int]:
        return [i for i in CHAIN + OTHERS if self.tier.holds([(digest_of(i), 0)])[0]]


@pytest.fixture(params=["host", "disk"])
def bench(request, tmp_path, monkeypatch):
    monkeypatch.setattr(transfers_module, "PIECE_BYTES", 1)
    bench = Bench(request.param, tmp_path)
    yield bench
    bench.transfers.close()
    bench.tier.close()


def test_large_loads_have_large_pieces_and_small_ones_keep_all_threads_busy():
    mib = 1 << 20
    assert [piece_of(blocks, 2 * mib, 4) for blocks in (0, 1, 8, 32, 120, 1000)] == [2, 2, 2, 8, 15, 15]
    assert piece_of(64, 2 * mib, 4) == 8, "not four of 15 and one of 4, for which a thread would take twice as long"
    assert piece_of(1000, 64 * mib, 4) == 1
    for record_bytes in (2 * mib, 368 << 10):  # with the frames' numbers, as pinned memory comes
        assert piece_of(1000, record_bytes, 4) * (record_bytes + 8) <= 32 * mib


def test_a_load_is_cut_into_pieces_that_hold_all_of_it(bench, monkeypatch):
    monkeypatch.setattr(transfers_module, "PIECE_BYTES", 4 * bench.tiers.record_bytes)
    monkeypatch.setattr(transfers_module, "LEAST_PIECE_BYTES", bench.tiers.record_bytes)
    pieces, write = [], bench.frames.write
    monkeypatch.setattr(
        bench.frames, "write", lambda frames, after: (pieces.append(len(frames)), write(frames, after))[1]
    )
    for blocks, expected in ((CHAIN[:3], [1, 1, 1]), (CHAIN, [2, 2, 2]), (CHAIN + OTHERS, [3, 3, 3, 3])):
        pieces.clear()
        bench.evict(blocks)
        bench.load(blocks)
        assert pieces == expected


def test_a_load_from_others_comes_in_small_pieces_so_that_its_beginning_is_there_in_time(bench, monkeypatch):
    monkeypatch.setattr(transfers_module, "PIECE_BYTES", 4 * bench.tiers.record_bytes)
    monkeypatch.setattr(transfers_module, "LEAST_PIECE_BYTES", bench.tiers.record_bytes)
    monkeypatch.setattr(bench.tiers, "are_remote", lambda blocks: True)
    pieces, write = [], bench.frames.write
    monkeypatch.setattr(
        bench.frames, "write", lambda frames, after: (pieces.append(len(frames)), write(frames, after))[1]
    )
    bench.evict(CHAIN)
    bench.load(CHAIN)
    assert pieces == [1] * len(CHAIN)


def test_a_load_counts_the_time_of_reading_it_not_of_what_comes_before_on_a_device(bench, monkeypatch):
    write = bench.frames.write

    @contextmanager
    def behind_a_step(frames, after):
        with write(frames, after) as places:
            yield places
        time.sleep(0.3)

    monkeypatch.setattr(bench.frames, "write", behind_a_step)
    noted = []
    monkeypatch.setattr(LoadTime, "note", lambda self, blocks, seconds: noted.append(seconds))
    bench.evict(CHAIN)
    bench.load(CHAIN)
    assert len(noted) == 1
    assert noted[0] < 0.3


@pytest.mark.parametrize("use", ["load", "evict"])
def test_what_was_loaded_or_evicted_again_stays_longest_its_end_shortest(bench, use):
    bench.evict(CHAIN)
    bench.evict(OTHERS)
    getattr(bench, use)(CHAIN)
    for first, left in ((200, CHAIN + OTHERS[:3]), (300, CHAIN), (400, CHAIN[:3]), (500, [])):
        bench.evict(range(first, first + 3))
        assert bench.held() == left


def test_of_what_storing_can_not_keep_up_with_a_chain_loses_its_end(bench, monkeypatch):
    may_store, write = threading.Event(), bench.tier.write
    monkeypatch.setattr(transfers_module, "BATCH_BYTES", 1)
    monkeypatch.setattr(bench.tier, "write", lambda *blocks: may_store.wait(30) and write(*blocks))
    transfers = Transfers(bench.frames, bench.tiers, backlog_bytes=4 * bench.tiers.record_bytes)
    transfers.save([Save(0, name_of(i)) for i in reversed(CHAIN)])
    transfers.save([Save(0, name_of(i)) for i in OTHERS])
    may_store.set()
    transfers.flush()
    assert bench.held() == CHAIN[:4]
    assert transfers.stats().blocks_dropped == 2 + len(OTHERS)
    transfers.close()


def test_threads_that_can_not_be_started_are_told_of_at_the_start(bench, monkeypatch):
    start, before = threading.Thread.start, threading.active_count()

    def starting(thread):
        if thread.name == "kv-load_2":
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", starting)
    with pytest.raises(KVStoreError, match=r"9 threads move KV blocks .* can't start new thread; raise its limit"):
        Transfers(bench.frames, bench.tiers)
    gc.collect()
    wait_until(lambda: threading.active_count() <= before, "those that had started stay")


def test_of_a_load_the_pieces_that_can_not_be_read_are_missing_and_it_ends(bench, monkeypatch):
    submit, submitted = ThreadPoolExecutor.submit, count()

    def submitting(*args):
        if next(submitted) == 1:
            raise RuntimeError("cannot schedule new futures")
        return submit(*args)

    bench.evict(CHAIN)
    monkeypatch.setattr(transfers_module, "LEAST_PIECE_BYTES", 2 * bench.tiers.record_bytes)
    monkeypatch.setattr(ThreadPoolExecutor, "submit", submitting)
    bench.transfers.load(Load(0, [(digest_of(i), 0) for i in CHAIN], CHAIN))
    assert bench.transfers.finished(wait_s=30) == {0: [True, True, False, False, True, True]}
    assert not bench.transfers.loading


@pytest.mark.parametrize("error", [MemoryError("16 MiB"), RuntimeError("can't start new thread")])
@pytest.mark.parametrize("where", ["tiers.holds", "frames.begin_read"])
def test_blocks_that_can_not_be_saved_are_dropped_with_a_warning(bench, monkeypatch, caplog, error, where):
    owner, name = where.split(".")
    with monkeypatch.context() as patch:
        patch.setattr(getattr(bench, owner), name, Mock(side_effect=error))
        bench.evict(CHAIN)
    assert bench.transfers.stats().blocks_dropped == len(CHAIN)
    assert f"6 KV blocks are dropped instead of saved: {error}" in caplog.text
    assert not bench.transfers.storing
    bench.evict(CHAIN)
    assert bench.held() == CHAIN


@pytest.mark.parametrize("fails", [False, True])
def test_what_is_still_to_be_stored_is_found(bench, monkeypatch, fails):
    may_store, write = threading.Event(), bench.tier.write

    def late(*blocks):
        assert may_store.wait(30)
        if fails:
            raise KVStoreError("the tier takes no more")
        return write(*blocks)

    monkeypatch.setattr(bench.tier, "write", late)
    contents = np.random.default_rng(0).integers(0, 256, (len(CHAIN), bench.pool.layout.frame_bytes), dtype=np.uint8)
    write_frames(bench.pool, CHAIN, contents)
    bench.transfers.save([Save(frame, name_of(frame)) for frame in CHAIN])
    write_frames(bench.pool, CHAIN, np.zeros_like(contents))
    blocks = [(digest_of(i), 0) for i in CHAIN]
    assert bench.tiers.where(blocks) == [0] * len(CHAIN)
    assert bench.tiers.holds(blocks, lasting=True) == [False] * len(CHAIN)
    bench.transfers.load(Load(0, blocks, CHAIN[::-1]))
    assert bench.transfers.finished(wait_s=30) == {0: [True] * len(CHAIN)}
    assert (bench.pool.frames.read(CHAIN[::-1])[0] == contents).all()
    may_store.set()
    bench.transfers.flush()
    assert bench.tiers.holds(blocks) == [not fails] * len(CHAIN)


@pytest.mark.parametrize("bench", ["disk"], indirect=True)
def test_at_the_end_nothing_that_is_kept_makes_room_for_what_is_kept(bench):
    bench.evict(CHAIN)
    bench.evict(OTHERS)
    new = range(200, 206)
    bench.transfers.keep([Save(0, name_of(i)) for i in (*new, *CHAIN, *OTHERS)])
    assert bench.held() == CHAIN
    assert all(bench.tier.holds([(digest_of(i), 0) for i in new]))


@pytest.mark.parametrize("bench", ["host disk"], indirect=True)
def test_at_the_end_what_is_still_on_its_way_down_is_kept_too(bench, monkeypatch):
    write = bench.tiers.write

    def late(names, records):
        time.sleep(0.1)
        write(names, records)

    monkeypatch.setattr(bench.tiers, "write", late)
    bench.transfers.save([Save(0, name_of(i)) for i in CHAIN])
    bench.transfers.keep([])
    assert bench.held() == CHAIN
