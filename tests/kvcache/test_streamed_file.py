"""Streamed frames on disk: what is written through calls is read in mapped memory, and what a disk loses is noticed."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch
from disk_blocks import write_frames

from harness import frame_shape
from pagemill.errors import KVStoreError
from pagemill.kvcache import streamed_file
from pagemill.kvcache.device_pool import DevicePool
from pagemill.kvcache.layout import block_major, layer_major


@pytest.fixture(params=[(layer_major, torch.float32), (layer_major, torch.int8), (block_major, torch.bfloat16)])
def pool(request, tmp_path):
    layout, dtype = request.param
    pool = DevicePool(
        9,
        frame_shape([None, 64, None, 64], 3, 20, 8, str(dtype)),
        layout=layout,
        streamed_frames=5,
        streamed_folder=tmp_path / "new",
    )
    assert list((tmp_path / "new").iterdir()) == [], "no crash leaves it behind"
    return pool


def random_records(pool, count):
    return np.random.default_rng(3).integers(0, 256, (count, pool.layout.frame_bytes), dtype=np.uint8)


def raw(pool, frame):
    return pool.frames.bytes[:, frame].numpy().reshape(-1)


def test_frames_are_copied_down_and_up(pool):
    low = pool.first_streamed
    above, below = random_records(pool, 2)
    write_frames(pool, [2, low + 1], np.stack([above, below]))
    assert (raw(pool, low + 1) == below).all(), "mapped where attention reads it"
    assert pool.frames.copy(torch.tensor([2, low + 1, 4, low + 4]), torch.tensor([low + 4, 4, 2, 5])) == []
    for frame, record in ((low + 4, above), (4, below), (2, below), (5, above)):
        assert (raw(pool, frame) == record).all(), frame
    records, whole = pool.frames.read([low + 1, 2, low + 4])
    assert whole == [True] * 3
    assert (records == np.stack([below, below, above])).all()
    assert not pool.streamed_file.take_loss()


def test_what_is_loaded_into_streamed_frames_is_there_when_all_has_arrived(pool):
    frames = [3, pool.first_streamed + 2, pool.first_streamed]
    wanted = random_records(pool, 3)
    with pool.frames.write(frames) as records:
        for record, content in zip(records, wanted, strict=True):
            record[:] = content.reshape(record.shape)
    assert (pool.frames.read(frames)[0] == wanted).all()


def test_a_frame_that_can_not_be_read_or_written_is_said_and_no_other_suffers(pool):
    low, file = pool.first_streamed, pool.streamed_file.fileno()
    wanted = random_records(pool, 3)
    write_frames(pool, [0, 1, low], wanted)
    pool.frames.copy(torch.tensor([1]), torch.tensor([low + 4]))
    size = os.fstat(file).st_size
    regions = pool.streamed_file.regions
    os.ftruncate(file, (len(regions) - 1) * regions[0].bytes + 4 * pool.layout.piece_bytes)  # in the last piece
    records, whole = pool.frames.read([0, low + 4, low])
    assert whole == [True, False, True]
    assert (records[::2] == wanted[::2]).all()
    assert pool.frames.copy(torch.tensor([low + 4, low, 3, 0]), torch.tensor([3, 4, 6, 7])) == [3, 6]
    assert (pool.frames.read([4, 7])[0] == wanted[[2, 0]]).all()
    os.ftruncate(file, size)
    with open(os.devnull, "rb") as unwritable:
        os.dup2(unwritable.fileno(), file)
    assert pool.frames.copy(torch.tensor([0, 1]), torch.tensor([low + 4, 8])) == [low + 4]
    assert (raw(pool, 8) == wanted[1]).all()
    with pytest.raises(KVStoreError, match="cannot be written"):
        write_frames(pool, [low], wanted[:1])
    with pytest.raises(KVStoreError, match="cannot be written"), pool.frames.write([low]):
        pass


def test_what_the_system_could_not_write_later_is_noticed_until_it_is_taken_note_of(pool, monkeypatch):
    low, wanted = pool.first_streamed, random_records(pool, 1)
    write_frames(pool, [low], wanted)
    with monkeypatch.context() as patch:
        patch.setattr(streamed_file, "written_back", lambda *_: False)
        assert pool.frames.read([low])[1] == [False]
    assert pool.frames.copy(torch.tensor([low]), torch.tensor([1])) == [1]
    assert pool.streamed_file.take_loss()
    assert not pool.streamed_file.take_loss()
    write_frames(pool, [low], wanted)
    assert pool.frames.copy(torch.tensor([low]), torch.tensor([1])) == []
    assert (raw(pool, 1) == wanted[0]).all()


def test_streamed_frames_are_written_by_calls_only(pool):
    regions = pool.streamed_file.regions
    with open("/proc/self/maps") as maps:
        access = {int(line.split("-")[0], 16): line.split()[1] for line in maps}
    assert [access[begin] for begin, _ in regions] == ["r--s"] * len(regions)
