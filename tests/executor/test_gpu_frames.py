"""Frames on a GPU go to the host beside its steps, in an order that a device checks."""

from __future__ import annotations

import random
import threading
from concurrent.futures import Future
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from checked_device import CheckedEvent, OrderError

from pagemill.errors import KVStoreError
from pagemill.kvcache import gpu_frames, transfers
from pagemill.kvcache.gpu_frames import SNAPSHOTS, STAGED, GpuFrames, origins_of, runs_of
from pagemill.kvcache.host_store import HostStore
from pagemill.kvcache.offload_tiers import OffloadTiers
from pagemill.kvcache.pages_ahead import PooledFrames
from pagemill.kvcache.transfers import Transfers
from pagemill.memory.work import BlockName, Load, Save

FRAMES = 10


@pytest.fixture(params=[(1, 64), (3, 20)], ids=["one piece", "odd pieces"])
def frames(device, request):
    pieces, nbytes = request.param
    frames = GpuFrames(pieces, FRAMES, nbytes, device)
    frames.bytes.copy_(torch.randint(0, 256, frames.bytes.shape, dtype=torch.uint8))
    return frames


def contents(frames):
    return frames.bytes.transpose(0, 1).reshape(FRAMES, -1).numpy().copy()


def test_records_arrive_while_later_steps_write_their_frames(device, frames) -> None:
    before, waits = contents(frames), device.waits
    reading = frames.begin_read([7, 2, 7])
    frames.bytes.zero_()  # by computations, which wait for no bus
    assert device.waits == waits
    assert not (reading.records == before[[7, 2, 7]]).all()
    reading.wait()
    assert (reading.records == before[[7, 2, 7]]).all()
    assert reading.whole == [True] * 3


def test_many_readings_keep_few_snapshots_and_all_their_records(device, frames) -> None:
    expected, readings = [], []
    for step in range(3 * SNAPSHOTS):
        frames.bytes.add_(step)
        picked = np.random.default_rng(step).integers(0, FRAMES, 4).tolist()
        expected.append(contents(frames)[picked])
        device.random.seed(1)
        readings.append(frames.begin_read(picked))
    for reading, records in zip(readings[::-1], expected[::-1], strict=True):
        reading.wait()
        assert (reading.records == records).all()


def test_no_reading_waits_until_there_are_too_many(device, frames, monkeypatch) -> None:
    told = []
    monkeypatch.setattr(device.random, "random", lambda: 1.0)  # nothing is done before somebody waits
    monkeypatch.setattr(device, "let_host_know", lambda clock, know=device.let_host_know: (told.append(1), know(clock)))
    for _ in range(SNAPSHOTS):
        frames.begin_read([1])
    assert not told
    frames.begin_read([1])
    assert told


@pytest.mark.parametrize("at_once", [1, 3, 100])
def test_copies_hold_what_copies_one_by_one_would(device, frames, monkeypatch, at_once) -> None:
    monkeypatch.setattr(frames, "_at_once", at_once)
    for seed in range(20):
        source, target = np.random.default_rng(seed).integers(0, FRAMES, (2, 12))
        expected, waits = contents(frames), device.waits + 1
        for here, there in zip(source, target, strict=True):
            expected[there] = expected[here]
        assert frames.copy(source, target) == []
        assert device.waits <= waits
        assert (contents(frames) == expected).all()


def test_chains_are_followed_to_their_beginning() -> None:
    assert origins_of([1, 2, 5, 4, 5], [2, 5, 9, 1, 4]) == {2: 1, 5: 1, 9: 1, 1: 4, 4: 1}


def test_loads_come_behind_what_was_asked_for_before_them(device, frames) -> None:
    expected = contents(frames)
    frames.copy([1], [2])
    mark, record = frames.mark(), np.full(frames.bytes[:, 0].shape, 5, dtype=np.uint8)
    with frames.write([1], mark) as places:
        places[0][:] = record
    records, _ = frames.read([2, 1])
    assert (records == [expected[1], record.reshape(-1)]).all()


def load(frames, numbers, records, after):
    with frames.write(numbers, after) as places:
        for place, record in zip(places, records, strict=True):
            place[:] = record.reshape(place.shape)


@pytest.mark.parametrize("run_bytes", [1, 100, 1 << 20])
def test_many_records_come_together_and_no_host_waits(device, frames, monkeypatch, run_bytes) -> None:
    monkeypatch.setattr(gpu_frames, "RUN_BYTES", run_bytes)
    monkeypatch.setattr(device.random, "random", lambda: 1.0)  # nothing is done before somebody waits
    copies, copy = [], device.copy
    monkeypatch.setattr(device, "copy", lambda source, target: (copies.append(len(source)), copy(source, target)))
    for seed, numbers in enumerate([[3, 4, 5, 0], [9], [8, 2, 3, 1]]):
        expected = contents(frames)
        expected[numbers] = np.random.default_rng(seed).integers(0, 256, expected[numbers].shape, dtype=np.uint8)
        told, before = device.told, len(copies)
        load(frames, numbers, expected[numbers], frames.mark())
        straight = frames.bytes.shape[0] == 1 and run_bytes <= 64 * len(numbers) / len(runs_of(numbers))
        assert len(copies) - before == (len(runs_of(numbers)) if straight else 1)
        frames.follow_writes()
        assert device.told == told
        assert (contents(frames) == expected).all()


def test_runs_are_frames_side_by_side() -> None:
    assert runs_of([3, 4, 5, 0, 2, 3]) == [(0, 3), (3, 4), (4, 6)]
    assert runs_of([7]) == [(0, 1)]


@pytest.mark.parametrize("run_bytes", [1, 1 << 20])
def test_computations_that_do_not_follow_a_load_are_found(device, frames, monkeypatch, run_bytes) -> None:
    monkeypatch.setattr(gpu_frames, "RUN_BYTES", run_bytes)
    load(frames, [1], contents(frames)[[1]], frames.mark())
    with pytest.raises(OrderError, match="compute reads what stream 1 may not have written yet"):
        frames.bytes.sum()
    monkeypatch.setattr(device.compute, "wait_event", lambda event: None)
    frames.follow_writes()
    with pytest.raises(OrderError, match="compute reads what stream 1 may not have written yet"):
        frames.bytes.sum()


@pytest.mark.parametrize("run_bytes", [1, 1 << 20])
def test_a_load_that_does_not_wait_for_earlier_computations_is_found(device, frames, monkeypatch, run_bytes) -> None:
    monkeypatch.setattr(gpu_frames, "RUN_BYTES", run_bytes)
    frames.copy([1], [2])
    with pytest.raises(OrderError, match=r"stream 1 .* what compute may"), frames.write([1]) as places:
        places[:] = 0


def test_loads_wait_for_the_bus_when_too_many_are_under_way(device, frames, monkeypatch) -> None:
    monkeypatch.setattr(device.random, "random", lambda: 1.0)  # nothing is done before somebody waits
    for number in range(STAGED + 1):
        told = device.told
        with frames.write([number], frames.mark()) as places:
            assert device.told == told + (number == STAGED)
            places[:] = number
    frames.follow_writes()
    assert (contents(frames)[: STAGED + 1] == np.arange(STAGED + 1)[:, None]).all()


def test_computations_go_on_while_a_load_waits_for_the_bus(device, frames, monkeypatch) -> None:
    """The bus may wait for them: a load begins behind the steps that were asked for before it."""
    monkeypatch.setattr(device.random, "random", lambda: 1.0)
    records = contents(frames)
    for number in range(STAGED):
        load(frames, [number], records[[number]], frames.mark())
    synchronize, followed = CheckedEvent.synchronize, []

    def waited(event):
        thread = threading.Thread(target=frames.follow_writes, daemon=True)
        thread.start()
        thread.join(5)
        followed.append(not thread.is_alive())
        synchronize(event)

    monkeypatch.setattr(CheckedEvent, "synchronize", waited)
    with frames.write([9], frames.mark()) as places:
        places[:] = 1
    assert followed[0]


def test_blocks_that_no_memory_can_be_pinned_for_are_not_read_and_not_written(
    device, frames, monkeypatch, caplog
) -> None:
    def refuse(nbytes):
        raise RuntimeError("CUDA error: out of memory")

    expected = contents(frames)
    with monkeypatch.context() as limited:
        limited.setattr(device, "pinned", refuse)
        reading = frames.begin_read([3, 1])
        with pytest.raises(KVStoreError, match=r"cannot be pinned for blocks: CUDA error"), frames.write([4]):
            pass
    assert reading.whole == [False, False]
    assert len(reading.records) == 2
    assert "cannot be pinned" in caplog.text
    assert (contents(frames) == expected).all()


def test_numbers_of_frames_come_without_pinned_memory_too(device, frames, monkeypatch) -> None:
    pinned, size = device.pinned, frames.bytes[:, 0].numel()

    def refuse(nbytes):
        if nbytes == 8 * 2:
            raise RuntimeError("CUDA error: out of memory")
        return pinned(nbytes)

    assert 2 * size != 8 * 2
    expected = contents(frames)
    expected[[5, 6]] = expected[[3, 1]]
    monkeypatch.setattr(device, "pinned", refuse)
    assert frames.copy([3, 1], [5, 6]) == []
    records, whole = frames.read([5, 6])
    assert whole == [True, True]
    assert (records == expected[[5, 6]]).all()
    assert (contents(frames) == expected).all()


def test_a_load_that_fails_changes_nothing(device, frames) -> None:
    expected = contents(frames)

    def fail():
        with frames.write([4, 5], frames.mark()) as places:
            places[0][:] = 0
            raise KVStoreError("the disk is gone")

    with pytest.raises(KVStoreError):
        fail()
    assert (contents(frames) == expected).all()
    with frames.write([]) as places:
        assert len(places) == 0


class Inline:
    """Runs at once what a pool of threads would, since the device sees one thread only."""

    def __init__(self, *args, **kwargs):
        pass

    def submit(self, call, *args):
        done = Future()
        done.set_result(call(*args))
        return done

    def shutdown(self):
        pass


def run_transfers(device, frames, seed: int) -> None:
    """Saves, loads and computes at random, and checks what frames and store hold. Some records are damaged."""
    draw, size = random.Random(seed), frames.bytes[:, 0].numel()
    damaged = set()

    class Store(HostStore):
        def read(self, blocks, out):
            found = super().read(blocks, out)
            return [here and block not in damaged for here, block in zip(found, blocks, strict=True)]

    pages = SimpleNamespace(begin=lambda: None, end=lambda: None, make=lambda frames: None)
    pool = PooledFrames(SimpleNamespace(frames=frames), pages)
    transfers, stored, known = Transfers(pool, OffloadTiers([Store(50, size)], size)), {}, contents(frames)
    for step in range(30):
        match draw.choice(["save", "load", "load", "compute", "copy"]):
            case "save":
                picked = draw.sample(range(FRAMES), 3)
                names = [BlockName(bytes([step, each]), 0, b"", 0) for each in range(3)]
                transfers.save([Save(frame, name) for frame, name in zip(picked, names, strict=True)])
                stored.update((name[:2], known[frame].copy()) for frame, name in zip(picked, names, strict=True))
                damaged.update(name[:2] for name in names if draw.random() < 0.2)
            case "load" if stored:
                blocks = draw.sample([*stored], min(len(stored), 4))
                picked = draw.sample(range(FRAMES), len(blocks))
                transfers.load(Load(step, blocks, picked))
                arrived = transfers.finished(wait_s=1)[step]
                assert arrived == [block not in damaged for block in blocks]
                for frame, block, here in zip(picked, blocks, arrived, strict=True):
                    known[frame] = stored[block] if here else 0
                    if not here:
                        frames.bytes[:, frame].zero_()
            case "copy":
                source, target = draw.sample(range(FRAMES), 2)
                frames.copy([source], [target])
                known[target] = known[source]
            case _:
                frame = draw.randrange(FRAMES)
                frames.bytes[:, frame] = step
                known[frame] = step
    assert (contents(frames) == known).all()
    transfers.close()


@pytest.mark.parametrize("seed", range(6))
def test_random_transfers_keep_order_and_contents(device, frames, monkeypatch, seed) -> None:
    monkeypatch.setattr(transfers, "ThreadPoolExecutor", Inline)
    monkeypatch.setattr(gpu_frames, "RUN_BYTES", random.Random(seed).choice([1, 100, 1000]))
    run_transfers(device, frames, seed)


@pytest.mark.parametrize("harm", ["mark", "follow_writes"])
def test_transfers_that_leave_a_wait_out_are_found(device, frames, monkeypatch, harm) -> None:
    monkeypatch.setattr(transfers, "ThreadPoolExecutor", Inline)
    monkeypatch.setattr(frames, harm, lambda: None)
    with pytest.raises(OrderError, match=r"may still use|may not have written"):
        run_transfers(device, frames, 0)


@pytest.mark.parametrize("frame", [-1, FRAMES])
def test_frames_that_do_not_exist_are_refused_before_the_device_sees_them(frames, frame) -> None:
    with pytest.raises(IndexError, match=r"not all in 0 \.\. 9"):
        frames.begin_read([0, frame])
    with pytest.raises(IndexError, match=r"not all in 0 \.\. 9"):
        frames.copy([0], [frame])
    assert frames.read([])[0].shape == (0, frames.bytes[:, 0].numel())
