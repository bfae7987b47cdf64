"""Frames on a GPU go to the host beside its steps, in an order that a device checks."""

from __future__ import annotations

import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from checked_device import CheckedEvent, OrderError
from inline_threads import InlineThreads

from pagemill.errors import DeviceLostError, KVStoreError
from pagemill.kvcache import transfers
from pagemill.kvcache.gpu_frames import SNAPSHOTS, STAGE_BYTES, STAGED, GpuFrames, origins_of, runs_of
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


def test_a_device_without_memory_for_what_comes_says_so_and_takes_later_ones(frames, monkeypatch) -> None:
    make, before = torch.empty, contents(frames)

    def full(size, **options):
        if size == STAGE_BYTES:
            raise torch.OutOfMemoryError("no memory")
        return make(size, **options)

    with monkeypatch.context() as none_left:
        none_left.setattr(torch, "empty", full)
        for _ in range(2 * STAGED):
            with pytest.raises(KVStoreError, match="no memory for blocks that come"), frames.write([3]) as places:
                places[0][:] = 7
    assert (contents(frames) == before).all()
    with frames.write([3]) as places:
        places[0][:] = 7
    assert (contents(frames)[3] == 7).all()


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


def test_many_records_come_with_one_copy_and_are_there_when_the_writing_ends(device, frames, monkeypatch) -> None:
    monkeypatch.setattr(device.random, "random", lambda: 1.0)  # nothing is done before somebody waits
    copies, copy = [], device.copy
    monkeypatch.setattr(device, "copy", lambda source, target: (copies.append(len(source)), copy(source, target)))
    for seed, numbers in enumerate([[3, 4, 5, 0], [9], [8, 2, 3, 1]]):
        expected = contents(frames)
        expected[numbers] = np.random.default_rng(seed).integers(0, 256, expected[numbers].shape, dtype=np.uint8)
        told = device.told
        load(frames, numbers, expected[numbers], frames.mark())
        assert len(copies) == seed + 1
        assert device.told == told + 1
        assert (contents(frames) == expected).all()


def test_runs_are_frames_side_by_side() -> None:
    assert runs_of([3, 4, 5, 0, 2, 3]) == [(0, 3), (3, 4), (4, 6)]
    assert runs_of([7]) == [(0, 1)]


def test_a_load_that_nobody_waits_for_is_found(device, frames, monkeypatch) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(CheckedEvent, "synchronize", lambda event: None)
        load(frames, [1], contents(frames)[[1]], frames.mark())
    with pytest.raises(OrderError, match=r"may not have written yet|ends while stream \d may still use"):
        frames.bytes.sum()


def test_a_load_that_does_not_wait_for_earlier_computations_is_found(device, frames) -> None:
    frames.copy([1], [2])
    with pytest.raises(OrderError, match=r"stream \d .* what compute may"), frames.write([1]) as places:
        places[:] = 0


def test_neither_do_computations_wait_for_a_load_nor_the_bus_for_computations(device, frames, monkeypatch) -> None:
    device.divide(frames.bytes, 0, frames.bytes.shape[2])  # others use other frames meanwhile
    records, compute, brought, meanwhile = contents(frames)[[1]], device.compute, [], []
    copy, synchronize = device.copy, CheckedEvent.synchronize
    frames.bytes[:, 2].add_(1)
    before, mark = (compute.name, compute.clock[compute.name]), frames.mark()

    def bring(source, target):
        brought.append(device._current.clock.knows(before))  # noqa: SLF001
        copy(source, target)

    def step(event):
        puts = [use for use in event.clock.items() if use[0] != compute.name and not device.host.knows(use)]
        frames.bytes[:, 3].add_(1)
        frames.begin_read([5])
        frames.copy([6], [7])
        meanwhile.extend(compute.clock.knows(use) for use in puts)
        monkeypatch.setattr(CheckedEvent, "synchronize", synchronize)
        event.synchronize()

    monkeypatch.setattr(device, "copy", bring)
    monkeypatch.setattr(CheckedEvent, "synchronize", step)
    load(frames, [1], records, mark)
    assert not brought[0]
    assert meanwhile
    assert not any(meanwhile)


def test_numbers_of_frames_that_leave_come_while_computations_go_on(device, frames, monkeypatch) -> None:
    """Else a step would wait on the way for a bus that loads keep busy."""
    copied, copy = [], device.copy
    monkeypatch.setattr(device, "copy", lambda *ends: (copied.append(device._current), copy(*ends)))  # noqa: SLF001
    for _ in range(3 * SNAPSHOTS):
        frames.bytes.add_(1)
        now = device.compute.clock[device.compute.name]
        frames.begin_read([1, 2])
        numbers, records = copied[-2:]
        assert not numbers.clock.knows((device.compute.name, now))
        assert records.clock.knows((device.compute.name, now))


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


def test_blocks_that_the_device_has_no_memory_to_copy_aside_are_not_read(frames, monkeypatch, caplog) -> None:
    def refuse():
        raise torch.OutOfMemoryError("CUDA out of memory")

    expected = contents(frames)
    with monkeypatch.context() as limited:
        limited.setattr(frames, "_words", refuse)
        reading = frames.begin_read([3, 1])
    assert reading.whole == [False, False]
    assert "CUDA out of memory" in caplog.text
    records, whole = frames.read([3, 1])
    assert whole == [True, True]
    assert (records == expected[[3, 1]]).all()


def test_a_device_that_fails_while_blocks_are_copied_aside_is_lost(frames, monkeypatch) -> None:
    def fail():
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(frames, "_words", fail)
    with pytest.raises(DeviceLostError, match=r"cpu does no more work .*illegal memory access"):
        frames.begin_read([3, 1])


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
    monkeypatch.setattr(transfers, "started", InlineThreads)
    run_transfers(device, frames, seed)


def test_transfers_that_do_not_come_behind_earlier_computations_are_found(device, frames, monkeypatch) -> None:
    monkeypatch.setattr(transfers, "started", InlineThreads)
    monkeypatch.setattr(frames, "mark", lambda: None)
    with pytest.raises(OrderError, match=r"may still use|may not have written"):
        run_transfers(device, frames, 0)


@pytest.mark.parametrize("frame", [-1, FRAMES])
def test_frames_that_do_not_exist_are_refused_before_the_device_sees_them(frames, frame) -> None:
    with pytest.raises(IndexError, match=r"not all in 0 \.\. 9"):
        frames.begin_read([0, frame])
    with pytest.raises(IndexError, match=r"not all in 0 \.\. 9"):
        frames.copy([0], [frame])
    assert frames.read([])[0].shape == (0, frames.bytes[:, 0].numel())
