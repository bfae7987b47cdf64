"""Frames as a GPU holds them are saved, loaded and copied to the bit. On CPU the same code moves the host's memory."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest
import torch
from disk_blocks import FORMAT, digest_of, name_of, write_frames

from at_once import AtOnce
from harness import frame_shape
from pagemill.kvcache.device_pool import DevicePool
from pagemill.kvcache.disk_store import DiskStore
from pagemill.kvcache.frame_access import Reading
from pagemill.kvcache.gpu_frames import STAGED, GpuFrames
from pagemill.kvcache.host_store import HostStore
from pagemill.kvcache.layout import block_major
from pagemill.kvcache.offload_tiers import OffloadTiers
from pagemill.kvcache.pages_ahead import PagesAhead, PooledFrames
from pagemill.kvcache.transfers import Transfers
from pagemill.memory.work import Load, Save

FRAMES = 12
NEEDS_GPU = (pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"))


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=NEEDS_GPU)])
def pool(request):
    pool = DevicePool(
        FRAMES,
        frame_shape([None] * 3, 3, 20, 8, "float16"),
        device=request.param,
        layout=block_major,
    )
    if request.param == "cpu":
        frames = GpuFrames(*pool.frames.bytes.shape, AtOnce())
        frames.bytes = pool.frames.bytes  # where the pool's layers lie
        pool.frames = frames
    return pool


@pytest.fixture
def contents(pool):
    contents = np.random.default_rng(0).integers(0, 256, (FRAMES, pool.layout.frame_bytes), dtype=np.uint8)
    write_frames(pool, range(FRAMES), contents)
    return contents


def test_records_lie_as_layers_see_them(pool, contents) -> None:
    assert (pool.storage.view(torch.uint8).cpu().numpy().reshape(FRAMES, -1) == contents).all()
    records, whole = pool.frames.read([7, 2])
    assert (records == contents[[7, 2]]).all()
    assert whole == [True, True]


def test_copies_are_made_in_order(pool, contents) -> None:
    assert pool.frames.copy(torch.tensor([1, 2, 5]), torch.tensor([2, 5, 9])) == []
    assert (pool.frames.read([2, 5, 9, 1])[0] == contents[1]).all()


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_blocks_go_down_and_come_back_into_other_frames(pool, contents, tier, tmp_path) -> None:
    size = pool.layout.frame_bytes
    disk_format = replace(FORMAT, record_bytes=size)
    store = HostStore(FRAMES, size) if tier == "host" else DiskStore(tmp_path, disk_format, 1 << 20)
    transfers = Transfers(PooledFrames(pool, PagesAhead(pool)), OffloadTiers([store], size))
    transfers.save([Save(frame, name_of(frame)) for frame in range(FRAMES)])
    write_frames(pool, range(FRAMES), np.zeros_like(contents))
    transfers.flush()
    order = np.random.default_rng(1).permutation(FRAMES)
    transfers.load(Load(3, [(digest_of(i), 0) for i in order], list(range(FRAMES))))
    assert transfers.finished(wait_s=30) == {3: [True] * FRAMES}
    assert (pool.frames.read(range(FRAMES))[0] == contents[order]).all()
    transfers.close()
    store.close()


def test_a_load_comes_after_what_the_gpu_was_asked_to_do_before(pool, contents) -> None:
    if pool.device.type != "cuda":
        pytest.skip("the CPU does at once what it is asked to do")
    busy = torch.ones(8192, 8192, device="cuda")
    for _ in range(50):
        busy = busy @ busy
    pool.frames.copy(torch.tensor([1]), torch.tensor([2]))
    with pool.frames.write([1], pool.frames.mark()) as places:
        places[0][:] = contents[5].reshape(places[0].shape)
    assert (pool.frames.read([2, 1])[0] == contents[[1, 5]]).all()


def test_all_threads_fill_records_while_few_of_them_have_the_device() -> None:
    go, filled, waiting = threading.Event(), threading.Barrier(STAGED + 3), threading.Semaphore(0)

    class Slow(AtOnce):
        class Stream(AtOnce.Stream):
            def synchronize(self):
                waiting.release()
                assert go.wait(30)

    frames = GpuFrames(1, 8, 64, Slow())

    def write(frame):
        with frames.write([frame]) as places:
            places[:] = frame
            filled.wait(30)

    with ThreadPoolExecutor(8) as threads:
        writes = [threads.submit(write, frame) for frame in range(STAGED + 2)]
        filled.wait(30)
        for _ in range(STAGED):
            assert waiting.acquire(timeout=30)
        assert not waiting.acquire(timeout=0.05)
        go.set()
        for writing in writes:
            writing.result()
    assert frames.bytes[0, : STAGED + 2, 0].tolist() == [*range(STAGED + 2)]


@pytest.mark.parametrize("stored_first", [True, False])
def test_records_on_their_way_are_waited_for_by_who_stores_and_who_loads_them(stored_first) -> None:
    size, go = 64, threading.Event()
    content = np.arange(size, dtype=np.uint8)

    class LateFrames:
        def __init__(self):
            self.loaded = np.zeros((1, size), dtype=np.uint8)

        def begin_read(self, frames):
            records = np.zeros((len(frames), size), dtype=np.uint8)

            def wait():
                assert go.wait(30)
                records[:] = content

            return Reading(records, [True] * len(frames), wait)

        def mark(self):
            return None

        def begin_writes(self):
            pass

        end_writes = begin_writes

        def write(self, frames, after):
            return nullcontext(self.loaded)

    frames = LateFrames()
    transfers = Transfers(frames, OffloadTiers([HostStore(4, size)], size))
    transfers.save([Save(0, name_of(0))])
    assert transfers.storing  # and nobody has waited
    if stored_first:
        go.set()
        transfers.flush()
    transfers.load(Load(1, [(digest_of(0), 0)], [0]))
    if not stored_first:
        assert transfers.finished(wait_s=0.05) == {}
        go.set()
    assert transfers.finished(wait_s=30) == {1: [True]}
    assert (frames.loaded == content).all()
    transfers.close()
