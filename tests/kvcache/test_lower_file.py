"""Lower frames on disk: what is written through calls is read in mapped memory, and what a disk loses is noticed."""

from __future__ import annotations

import os
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from disk_blocks import write_frames

from pagemill.errors import KVStoreError
from pagemill.kvcache import lower_file
from pagemill.kvcache.device_pool import DevicePool
from pagemill.kvcache.kv_format import kv_format
from pagemill.kvcache.layer_groups import group_layers
from pagemill.kvcache.layout import block_major, layer_major


@pytest.fixture(params=[(layer_major, torch.float32), (layer_major, torch.int8), (block_major, torch.bfloat16)])
def pool(request, tmp_path):
    layout, dtype = request.param
    layers = group_layers([None, 64, None, 64])
    pool = DevicePool(
        9, layers, 3, 20, 8, kv_format(str(dtype)), layout=layout, lower_frames=5, lower_folder=tmp_path / "new"
    )
    assert list((tmp_path / "new").iterdir()) == [], "no crash leaves it behind"
    return pool


def random_records(pool, count):
    return np.random.default_rng(3).integers(0, 256, (count, pool.record_bytes), dtype=np.uint8)


def raw(pool, frame):
    return pool._bytes[:, frame].reshape(-1)


def test_frames_are_copied_down_and_up(pool):
    low = pool.first_lower
    above, below = random_records(pool, 2)
    write_frames(pool, [2, low + 1], np.stack([above, below]))
    assert (raw(pool, low + 1) == below).all(), "mapped where attention reads it"
    assert pool.copy_frames(torch.tensor([2, low + 1, 4, low + 4]), torch.tensor([low + 4, 4, 2, 5])) == []
    for frame, record in ((low + 4, above), (4, below), (2, below), (5, above)):
        assert (raw(pool, frame) == record).all(), frame
    records, whole = pool.read_frames([low + 1, 2, low + 4])
    assert whole == [True] * 3
    assert (records == np.stack([below, below, above])).all()
    assert not pool.take_loss()


def test_what_is_loaded_into_lower_frames_is_there_when_all_has_arrived(pool):
    frames = [3, pool.first_lower + 2, pool.first_lower]
    wanted = random_records(pool, 3)
    with pool.records(frames) as records:
        for record, content in zip(records, wanted, strict=True):
            record[:] = content.reshape(record.shape)
    assert (pool.read_frames(frames)[0] == wanted).all()


def test_a_frame_that_can_not_be_read_or_written_is_said_and_no_other_suffers(pool):
    low, file = pool.first_lower, pool._file._file.fileno()
    wanted = random_records(pool, 3)
    write_frames(pool, [0, 1, low], wanted)
    pool.copy_frames(torch.tensor([1]), torch.tensor([low + 4]))
    size = os.fstat(file).st_size
    os.ftruncate(file, pool._file._offset(pool.pieces[0] - 1, 4))
    records, whole = pool.read_frames([0, low + 4, low])
    assert whole == [True, False, True]
    assert (records[::2] == wanted[::2]).all()
    assert pool.copy_frames(torch.tensor([low + 4, low, 3, 0]), torch.tensor([3, 4, 6, 7])) == [3, 6]
    assert (pool.read_frames([4, 7])[0] == wanted[[2, 0]]).all()
    os.ftruncate(file, size)
    pool._file._file = open(os.devnull, "rb")  # noqa: SIM115
    assert pool.copy_frames(torch.tensor([0, 1]), torch.tensor([low + 4, 8])) == [low + 4]
    assert (raw(pool, 8) == wanted[1]).all()
    with pytest.raises(KVStoreError, match="cannot be written"):
        write_frames(pool, [low], wanted[:1])
    with pytest.raises(KVStoreError, match="cannot be written"), pool.records([low]):
        pass


def test_what_the_system_could_not_write_later_is_noticed_until_it_is_taken_note_of(pool, monkeypatch):
    low, wanted = pool.first_lower, random_records(pool, 1)
    write_frames(pool, [low], wanted)
    with monkeypatch.context() as patch:
        patch.setattr(lower_file, "_libc", SimpleNamespace(sync_file_range=lambda *_: -1))
        assert pool.read_frames([low])[1] == [False]
    assert pool.copy_frames(torch.tensor([low]), torch.tensor([1])) == [1]
    assert pool.take_loss()
    assert not pool.take_loss()
    write_frames(pool, [low], wanted)
    assert pool.copy_frames(torch.tensor([low]), torch.tensor([1])) == []
    assert (raw(pool, 1) == wanted[0]).all()


def test_lower_frames_are_written_by_calls_only(pool):
    regions = [
        (pool.streamed_region(piece).begin, pool.streamed_region(piece).bytes) for piece in range(pool.pieces[0])
    ]
    with open("/proc/self/maps") as maps:
        access = {int(line.split("-")[0], 16): line.split()[1] for line in maps}
    assert [access[begin] for begin, _ in regions] == ["r--s"] * len(regions)
