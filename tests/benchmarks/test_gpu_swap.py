"""The benchmark of moving blocks moves them, and counts what has moved, on tiny sizes here."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from interpreter import CAPABILITY, DEVICE

pytest.importorskip("triton")
sys.path.insert(0, str(Path(__file__).parents[1] / "executor"))

from benchmarks.gpu_decode import Sizes
from benchmarks.gpu_swap import Bus
from benchmarks.moving_blocks import FramesAlone, ThroughHostTier
from checked_device import CheckedDevice
from inline_threads import InlineThreads

from benchmarks import gpu_swap, moving_blocks
from pagemill.attention.triton_backend import TritonAttention
from pagemill.executor.backend import torch_backend
from pagemill.kvcache import transfers
from pagemill.kvcache.device_pool import DevicePool
from pagemill.kvcache.gpu_frames import GpuFrames
from pagemill.kvcache.layout import block_major
from pagemill.kvcache.pages_ahead import PooledFrames
from pagemill.models.gpu_decoder import GpuDecoder
from pagemill.ops.triton_ops import TritonOps

pytestmark = pytest.mark.gpu

BUS = Bus(2e9, 1e9)


@pytest.fixture
def checked(monkeypatch):
    """Frames on a device that checks the order of what it is told."""
    monkeypatch.setattr(moving_blocks, "ThreadPoolExecutor", InlineThreads)
    monkeypatch.setattr(transfers, "started", InlineThreads)
    with CheckedDevice() as device:
        frames = GpuFrames(1, 8, 64, device)
        frames.bytes.copy_(torch.arange(8, dtype=torch.uint8)[None, :, None])
        pages = SimpleNamespace(begin=lambda: None, end=lambda: None, make=lambda frames: None)
        yield SimpleNamespace(device=device, pool=PooledFrames(SimpleNamespace(frames=frames), pages), frames=frames)
        device.synchronize()


def first_bytes(frames: GpuFrames) -> list[int]:
    return frames.bytes[0, :, 0].tolist()


def test_blocks_go_through_the_host_tier_and_come_back_to_other_frames(checked) -> None:
    way = ThroughHostTier(checked.pool, 64, 4)
    for _ in range(3):  # the tier is full after the first
        way.save([0, 1, 2, 3])
    way.load([6, 5, 4, 7])
    assert first_bytes(checked.frames) == [0, 1, 2, 3, 1, 2, 3, 0]
    assert (way.out, way.back) == (12, 4)
    way.begin([7], [0])  # makes the block leave that was used longest ago, of frame 0
    way.settle()
    assert first_bytes(checked.frames) == [3, 1, 2, 3, 1, 2, 3, 0]
    assert (way.out, way.back) == (13, 5)
    way.close()


def test_frames_alone_are_read_and_written(checked, monkeypatch) -> None:
    pinned = checked.device.pinned

    def marked(nbytes):
        memory = pinned(nbytes)
        memory.numpy()[:] = 9
        return memory

    monkeypatch.setattr(checked.device, "pinned", marked)
    way = FramesAlone(checked.pool, 64)
    way.save([0, 1, 2])
    way.load([2, 5])
    assert first_bytes(checked.frames) == [0, 1, 9, 3, 4, 9, 6, 7]
    way.begin([1], [6])
    way.close()
    assert first_bytes(checked.frames) == [0, 1, 9, 3, 4, 9, 9, 7]
    assert (way.out, way.back) == (4, 3)


def test_blocks_that_cannot_be_read_stop_the_benchmark(checked, monkeypatch) -> None:
    def refuse(nbytes):
        raise RuntimeError("CUDA error: out of memory")

    ways = [FramesAlone(checked.pool, 64), ThroughHostTier(checked.pool, 64, 4)]
    monkeypatch.setattr(checked.device, "pinned", refuse)
    for way in ways:
        with pytest.raises(RuntimeError, match=r"could not be read|were dropped"):
            way.save([1, 2])


def test_speeds_are_bytes_by_time_and_the_first_run_stands_apart(checked, monkeypatch) -> None:
    times = iter([0.0, 4.0, 0.0, 1.0, 0.0, 2.0, 0.0, 3.0] * 8)
    monkeypatch.setattr(gpu_swap, "time", SimpleNamespace(perf_counter=times.__next__))
    moves = gpu_swap.move_blocks("tiny", checked.pool, [*range(6)], 64, Bus(2.0, 1.0), [2, 6], 3)
    assert [(at.way, at.direction, at.blocks) for at in moves] == [
        (way, direction, blocks)
        for way in ("frames", "host tier")
        for blocks in (2, 6)
        for direction in ("out", "back")
    ]
    assert (moves[0].bytes_per_s, moves[0].first_bytes_per_s, moves[0].share) == (64.0, 32.0, 32.0)
    assert moves[3].share == 6 * 64 / 2.0
    assert "| tiny | frames | out | 2 | 0 | 0.0 | 3200% | 0.0 |" in gpu_swap.moves_table(moves)


@pytest.mark.parametrize("room", [0, 1 << 34])
def test_a_pool_may_have_addresses_for_the_whole_gpu(room) -> None:
    shape = gpu_swap.frame_shape(2, 2, 16, "float32")
    size = block_major(shape, 1).frame_bytes
    moves = gpu_swap.moves_of("tiny", shape, torch.device(DEVICE), room, (2 * size, 5 * size), BUS, 1)
    assert {(at.shape, at.block_bytes) for at in moves} == {("tiny of 17 GB" if room else "tiny", size)}
    assert [at.blocks for at in moves] == [2, 2, 5, 5] * 2
    assert all(at.bytes_per_s > 0 for at in moves)


def test_the_ceiling_is_the_fastest_copy(checked, monkeypatch) -> None:
    times = iter([0.0, 2.0, 0.0, 4.0, 0.0, 8.0, 0.0, 5.0])
    monkeypatch.setattr(gpu_swap, "time", SimpleNamespace(perf_counter=times.__next__))
    assert gpu_swap.measure_bus(checked.device, 40, times=2) == Bus(out=8.0, back=20.0)


def test_steps_run_beside_moving_blocks() -> None:
    backend = torch_backend(torch.device(DEVICE))._replace(
        ops=TritonOps(CAPABILITY), attention=TritonAttention(CAPABILITY), decoder=GpuDecoder
    )
    sizes = Sizes(96, 64, 4, 2, 16, 48, layers=2, itemsize=4)
    found = gpu_swap.beside_steps(sizes, 2, 20, BUS, 2, dtype=torch.float32, backend=backend, spare=4, capacity=8)
    assert [(at.way, at.part) for at in found] == [
        ("none", 0.0), *((way, part) for way in ("frames", "host tier") for part in gpu_swap.PARTS),
    ]  # fmt: skip
    assert found[0].ms > 0
    assert all(at.blocks >= 1 and at.out_share > 0 for at in found[1:])
    assert gpu_swap.beside_table(found).count("\n") == 8


def test_what_is_slower_is_told_beside_what_has_moved(monkeypatch) -> None:
    pool = DevicePool(6, gpu_swap.frame_shape(2, 2, 16, "float32"), "cpu", block_major)
    seconds = iter([1.0, 1.0, *[1.5] * 6])
    asked = []

    def step_s(step, frames, times, before):
        for _ in range(times):
            before()
        asked.append(times)
        return next(seconds)

    monkeypatch.setattr(gpu_swap, "step_s", step_s)
    size = pool.layout.frame_bytes
    bus = Bus(8.0 * size, 4.0 * size)
    found = gpu_swap.run_beside(lambda: None, gpu_swap.access(pool), [*range(6)], size, bus, 8, 2, [0.5, 1.0])
    assert [at.blocks for at in found] == [0, 2, 4, 2, 4]
    assert [at.slower for at in found] == [0.0] + [0.5] * 4
    assert found[1].out_share == pytest.approx(2 / (1.5 * 8))
    assert found[2].out_share == pytest.approx(4 / (1.5 * 8))


def test_the_host_asks_for_one_step_while_another_runs(monkeypatch) -> None:
    told = []

    class Mark:
        def __init__(self, number):
            self.number = number

        def synchronize(self):
            told.append(f"wait {self.number}")

    marks = iter(range(9))
    frames = SimpleNamespace(mark=lambda: Mark(next(marks)))
    gpu_swap.step_s(lambda: told.append("step"), frames, 3, lambda: told.append("move"))
    assert told == ["wait 0", "move", "step", "move", "step", "wait 1", "move", "step", "wait 2", "wait 4"]


def test_memory_is_pinned_in_both_ways(monkeypatch) -> None:
    asked = []
    device = SimpleNamespace(
        pinned=lambda nbytes: asked.append(("pinned", nbytes)),
        pinned_whole=lambda nbytes: asked.append(("whole", nbytes)),
    )
    assert gpu_swap.measure_pinning(device, 7).nbytes == 7
    assert asked == [("pinned", 7), ("whole", 7)]
    assert np.isfinite(gpu_swap.measure_pinning(device, 7).whole_s)
