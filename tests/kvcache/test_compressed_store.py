"""Blocks in host memory, compressed: to the bit what was stored, within the limit, last used last to go."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pagemill.kvcache.host_store import ENTRY_BYTES, CompressedStore
from pagemill.memory.work import BlockName

RECORD = 48 << 10


def name_of(i: int) -> BlockName:
    return BlockName(bytes([i]) * 32, 0, b"", 0)


def refuse(names, records) -> None:
    raise AssertionError("there is room for all")


def size_of(record) -> int:
    """How many bytes a store holds for it."""
    store = CompressedStore(1 << 20, 2)
    store.write([name_of(0)], [record], refuse)
    return store.nbytes


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("pieces", [1, 6])
def test_what_is_read_is_what_was_written(dtype, pieces) -> None:
    records = np.random.default_rng(0).integers(0, 256, (5, RECORD), dtype=np.uint8)
    values = torch.randn(2, RECORD // dtype.itemsize) * 8
    records[1:3] = values.to(dtype).view(torch.uint8).numpy()
    records[3] = 0
    store = CompressedStore(5 * (RECORD + 2 * ENTRY_BYTES), dtype.itemsize)
    shape = (pieces, RECORD // pieces)
    store.write([name_of(i) for i in range(5)], [record.reshape(shape) for record in records], refuse)
    out = np.full((6, *shape), 0xAA, dtype=np.uint8)
    blocks = [name_of(i)[:2] for i in (4, 1, 9, 0, 2, 3)]
    assert store.read(blocks, list(out)) == store.holds(blocks) == [True, True, False, True, True, True]
    assert (out[[3, 1, 4, 5, 0]].reshape(5, -1) == records).all()
    assert (out[2] == 0xAA).all()


def test_more_blocks_have_room() -> None:
    """Of numbers as they occur in K/V; of bytes without any order, as many as without compression."""
    numbers = (torch.randn(400, RECORD // 2) * torch.rand(RECORD // 2)).to(torch.bfloat16).view(torch.uint8).numpy()
    chance = np.random.default_rng(0).integers(0, 256, (400, RECORD), dtype=np.uint8)
    held = []
    for records in (numbers, chance):
        store = CompressedStore(100 * (RECORD + 2 * ENTRY_BYTES), 2)
        for first in range(0, 200, 4):
            part = range(first, first + 4)
            store.write([name_of(i) for i in part], records[first : first + 4], lambda names, records: None)
        held.append(store.num_blocks())
    assert held[0] >= 125
    assert 99 <= held[1] <= 102


@given(st.lists(st.tuples(st.sampled_from(["write", "use"]), st.lists(st.integers(0, 15), max_size=6)), max_size=20))
def test_it_keeps_what_was_used_last_and_passes_on_the_rest(steps) -> None:
    rng = np.random.default_rng(7)
    records = rng.integers(0, 256, (16, 3000), dtype=np.uint8)
    for i in range(16):
        records[i, : i * 180] = 0  # of many sizes
    store = CompressedStore(9000, 2)
    sizes = [size_of(record) for record in records]
    order: list[int] = []
    for what, numbers in steps:
        if what == "use":
            store.use([name_of(i)[:2] for i in numbers])
            for i in reversed(numbers):
                if i in order:
                    order.remove(i)
                    order.append(i)
            continue
        gone: list[int] = []

        def spill(names, contents, gone=gone) -> None:
            assert all(store.holds([name[:2] for name in names])), "found until they are stored below"
            for name, content in zip(names, contents, strict=True):
                assert (content == records[name.digest[0]]).all()
                gone.append(name.digest[0])

        store.write([name_of(i) for i in numbers], [records[i] for i in numbers], spill)
        expected_gone = []
        order += [i for i in dict.fromkeys(numbers) if i not in order]
        while sum(sizes[held] for held in order) > 9000:
            expected_gone.append(order.pop(0))
        assert gone == expected_gone
        assert [name.digest[0] for name in store.names()] == order[::-1]
        assert store.nbytes == sum(sizes[i] for i in order) <= 9000
        assert store.holds([name_of(i)[:2] for i in range(16)]) == [i in order for i in range(16)]
        out = np.full((16, 3000), 0xAA, dtype=np.uint8)
        assert store.read([name_of(i)[:2] for i in range(16)], out) == [i in order for i in range(16)]
        assert all((out[i] == (records[i] if i in order else 0xAA)).all() for i in range(16))
