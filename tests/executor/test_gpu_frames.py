"""Frames on a GPU go to the host beside its steps, in an order that a device checks."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pagemill.kvcache.gpu_frames import SNAPSHOTS, GpuFrames, origins_of

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


@pytest.mark.parametrize("frame", [-1, FRAMES])
def test_frames_that_do_not_exist_are_refused_before_the_device_sees_them(frames, frame) -> None:
    with pytest.raises(IndexError, match=r"not all in 0 \.\. 9"):
        frames.begin_read([0, frame])
    with pytest.raises(IndexError, match=r"not all in 0 \.\. 9"):
        frames.copy([0], [frame])
    assert frames.read([])[0].shape == (0, frames.bytes[:, 0].numel())
