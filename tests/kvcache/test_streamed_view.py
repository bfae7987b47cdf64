"""Attention over streamed frames, whose parts are brought to a device, has the bits of a pool that holds all."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from at_once import AtOnce
from harness import frame_shape
from interpreter import CAPABILITY, DEVICE
from pagemill.attention.interface import AttentionBatch, GroupBatch, HostLengths
from pagemill.attention.torch_backend import TorchAttention
from pagemill.attention.triton_backend import TritonAttention
from pagemill.errors import KVMemoryError
from pagemill.kvcache.device_pool import DevicePool
from pagemill.kvcache.device_streams import CudaStreams
from pagemill.kvcache.kv_format import kv_format
from pagemill.kvcache.layers_ahead import LayersAhead
from pagemill.kvcache.layout import FrameShape, block_major
from pagemill.kvcache.streamed_view import Numbering

pytestmark = pytest.mark.gpu

LAYERS, BLOCK, KV_HEADS, DIM = 3, 16, 2, 32
POOL, ALL = 6, 11
CONTEXTS = [108, 57]
TABLES = [[7, 10, 3, 6, 8, 0, 5], [9, 2, 4, 1, -1, -1, -1]]
"""Frames of both rows; 6 and higher are streamed."""


@pytest.fixture
def device():
    """Sets the device on which tensors are made, and gives its streams."""
    with torch.device(DEVICE):
        yield AtOnce() if DEVICE == "cpu" else CudaStreams(torch.device(DEVICE))


def batch_of(query_lens: list[int]) -> AttentionBatch:
    """Describes the last tokens of both rows."""
    lens, contexts, tables = (torch.tensor(each, dtype=torch.int32) for each in (query_lens, CONTEXTS, TABLES))
    start = torch.nn.functional.pad(lens.cumsum(0, dtype=torch.int32), (1, 0))
    rows = torch.arange(2).repeat_interleave(lens)
    positions = torch.cat([torch.arange(end - n, end) for end, n in zip(CONTEXTS, query_lens, strict=True)])
    slots = tables[rows, positions // BLOCK].long() * BLOCK + positions % BLOCK
    host = HostLengths(lens.cpu(), contexts.cpu())
    return AttentionBatch(
        start, contexts, positions, (GroupBatch(tables, slots),), max(query_lens), max(CONTEXTS), host
    )


def filled(pool, attention, shape) -> None:
    """Writes all tokens' keys and values, in every layer."""
    slots = torch.arange(ALL * BLOCK)
    for layer in range(LAYERS):
        key, value = torch.randn(2, len(slots), shape.kv_heads, DIM).unbind()
        attention.write(key, None if shape.values_in_keys else value, pool.layer(layer), slots)


@pytest.mark.parametrize("kv", ["float32", "int8", "int4", "fp8_e4m3", "latents"])
@pytest.mark.parametrize("attention", [TorchAttention(), TritonAttention(CAPABILITY)], ids=["torch", "triton"])
def test_not_a_bit_differs(device, attention, kv) -> None:
    shape = frame_shape([None] * LAYERS, KV_HEADS, DIM, BLOCK, "float32" if kv == "latents" else kv)
    if kv == "latents":
        shape = FrameShape(shape.groups, 1, BLOCK, DIM, DIM // 2, kv_format("float32"), values_in_keys=True)
    whole = DevicePool(ALL, shape, DEVICE, block_major)
    filled(whole, attention, shape)
    pool = DevicePool(POOL, shape, DEVICE, block_major, streamed_frames=ALL - POOL, streams=device)
    assert pool.first_streamed == POOL
    records, _ = whole.frames.read(range(ALL))
    with pool.frames.write(range(ALL), pool.frames.mark()) as places:
        for place, record in zip(places, records, strict=True):
            place[:] = record
    ahead = LayersAhead(pool.frames, shape.groups, device)
    streamed = np.array(TABLES, np.int32)
    for query_lens in ([1, 1], [12, 3]):
        batch = batch_of(query_lens)
        there, caches = pool.attended(batch, streams=True)
        begin = ahead.step([streamed[streamed >= POOL] - POOL])
        for layer in range(LAYERS):
            begin(layer)
            query, key, value = torch.randn(3, sum(query_lens), shape.kv_heads, DIM).unbind()
            query, found = query.repeat(1, 2, 1), []
            for of, cache in ((batch, whole.layer(layer)), (there, caches.layer(layer))):
                attention.write(key, None if shape.values_in_keys else value, cache, of.groups[0].slots)
                found.append(attention.attend(query, cache, of, 0, scale=0.2, return_lse=True))
            for one, other in zip(*found, strict=True):
                assert one.isfinite().all()
                assert one.equal(other)
    assert pool.attended(batch, streams=False) == (batch, pool)


def test_frames_and_slots_have_numbers_of_their_own() -> None:
    numbering = Numbering(first=6, stride=64, frame=3, slot=2)
    assert numbering.of(torch.tensor([-1, 0, 5, 6, 8])).tolist() == [-1, 0, 15, 18, 22]


def test_numbers_that_tables_cannot_hold_are_refused(device, monkeypatch) -> None:
    shape = frame_shape([None] * LAYERS, KV_HEADS, DIM, BLOCK, "float32")
    few = torch.iinfo(torch.int8)
    monkeypatch.setattr(torch, "iinfo", lambda dtype: few)
    with pytest.raises(KVMemoryError, match=r"can name 127 places of \d+ bytes.*; lower kv_memory"):
        DevicePool(60, shape, DEVICE, block_major, streamed_frames=40, streams=device)
