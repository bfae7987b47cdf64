"""A third kind of tier, between pool and host memory: it takes a class and an entry in the list, and nothing else."""

from dataclasses import replace
from itertools import compress

import numpy as np
import pytest
from disk_blocks import FORMAT, digest_of, name_of, write_frames

from device_tier import DeviceTier
from harness import frame_shape
from pagemill.kvcache.device_pool import DevicePool
from pagemill.kvcache.disk_store import DiskStore
from pagemill.kvcache.host_store import HostStore
from pagemill.kvcache.offload_tiers import OffloadTiers
from pagemill.kvcache.pages_ahead import PagesAhead, PooledFrames
from pagemill.kvcache.transfers import Transfers
from pagemill.memory.work import Load, Save

pytestmark = pytest.mark.gpu

BLOCKS = 20
DEVICE, HOST = range(15, 20), range(9, 15)
"""Which of them lie there in the end, the newest highest. The others are on disk."""


def disk_of(pool: DevicePool, path) -> DiskStore:
    return DiskStore(path, replace(FORMAT, record_bytes=pool.layout.frame_bytes), 1 << 20)


def found(tier) -> list[int]:
    return list(compress(range(BLOCKS), tier.holds([(digest_of(i), 0) for i in range(BLOCKS)])))


@pytest.fixture
def pool():
    return DevicePool(BLOCKS, frame_shape([None] * 3, 3, 20, 8, "float32"))


@pytest.fixture
def contents(pool):
    """Of the pool's frames, and of the blocks of the same number."""
    contents = np.random.default_rng(0).integers(0, 256, (BLOCKS, pool.layout.frame_bytes), dtype=np.uint8)
    write_frames(pool, range(BLOCKS), contents)
    return contents


@pytest.fixture
def full(pool, contents, tmp_path, monkeypatch):
    """All blocks have gone down, some at a time, and whenever one tier wrote, all that had been stored was found."""
    size = pool.layout.frame_bytes
    tiers = OffloadTiers([DeviceTier(len(DEVICE), size), HostStore(len(HOST), size), disk_of(pool, tmp_path)], size)
    transfers = Transfers(PooledFrames(pool, PagesAhead(pool)), tiers)
    stored, seen = [], []

    def watched(write):
        def watch(*blocks):
            out = np.zeros((len(stored), pool.layout.frame_bytes), dtype=np.uint8)
            sources = tiers.read([(digest_of(i), 0) for i in stored], out)
            seen.append(None not in sources and (out == contents[stored]).all())
            return write(*blocks)

        return watch

    for tier in tiers.tiers:
        monkeypatch.setattr(tier, "write", watched(tier.write))
    for first in range(0, BLOCKS, 3):
        part = range(first, min(first + 3, BLOCKS))
        transfers.save([Save(i, name_of(i)) for i in part])
        transfers.flush()
        stored += part
    assert transfers.stats().blocks_saved == BLOCKS
    assert len(seen) > BLOCKS
    assert all(seen)
    yield transfers, tiers
    transfers.close()


def test_blocks_go_down_tier_by_tier_and_come_back_from_each(pool, contents, full):
    transfers, tiers = full
    expected = {"device": len(DEVICE), "host": len(HOST), "disk": HOST[0]}
    assert tiers.blocks_by_tenant() == {tier: {"default": count} for tier, count in expected.items()}
    assert [found(tier) for tier in tiers.tiers] == [list(DEVICE), list(HOST), list(range(HOST[0]))]
    assert tiers.holds([(digest_of(i), 0) for i in range(BLOCKS + 1)]) == [True] * BLOCKS + [False]
    write_frames(pool, range(BLOCKS), np.zeros_like(contents))
    order = np.random.default_rng(1).permutation(BLOCKS)
    transfers.load(Load(7, [(digest_of(i), 0) for i in order], list(range(BLOCKS))))
    assert transfers.finished(wait_s=30) == {7: [True] * BLOCKS}
    assert (pool.frames.read(range(BLOCKS))[0] == contents[order]).all()


def test_a_load_is_timed_for_the_lowest_tier_that_it_needs(full):
    transfers, tiers = full
    assert tiers.where([(digest_of(i), 0) for i in (DEVICE[0], HOST[0], 0, BLOCKS)]) == [0, 1, 2, None]
    for lowest, parts in enumerate([[DEVICE], [DEVICE, HOST], [HOST, range(2)]]):
        blocks = [(digest_of(i), 0) for part in parts for i in part]
        for ident in (1, 2):
            assert [transfers.load_time(at).of(1) is None for at in range(lowest, 3)] == [True] * (3 - lowest)
            transfers.load(Load(ident, blocks, list(range(len(blocks)))))
            transfers.finished(wait_s=30)
        assert transfers.load_times[lowest].of(1) > 0
    transfers.load(Load(3, [(digest_of(BLOCKS), 0)], [0]))
    assert transfers.finished(wait_s=30) == {3: [False]}


def test_what_the_tiers_above_hold_is_on_disk_at_the_end(pool, contents, full, tmp_path):
    transfers, tiers = full
    lasting = tiers.holds([(digest_of(i), 0) for i in range(BLOCKS)], lasting=True)
    assert lasting == [i < HOST[0] for i in range(BLOCKS)]
    transfers.keep([])
    for tier in tiers.tiers:
        tier.close()
    out = np.zeros_like(contents)
    again = OffloadTiers([disk_of(pool, tmp_path)], pool.layout.frame_bytes)
    assert again.read([(digest_of(i), 0) for i in range(BLOCKS)], out) == [0] * BLOCKS
    assert (out == contents).all()
