"""A pool's memory on a GPU, by CUDA's own driver: it goes back to the card and comes again, and contents and graphs
stay.

Without a GPU all are skipped.
"""

from __future__ import annotations

import gc

import numpy as np
import pytest
import torch

from attention.paged_case import PagedCase
from harness import frame_shape
from interpreter import CAPABILITY, DEVICE
from pagemill.errors import KVMemoryError
from pagemill.kvcache.device_pool import DevicePool
from pagemill.kvcache.device_streams import CudaStreams
from pagemill.kvcache.layout import block_major
from pagemill.kvcache.mapped_memory import open_mapped

pytestmark = [pytest.mark.gpu, pytest.mark.alone_on_gpu, pytest.mark.skipif(DEVICE == "cpu", reason="no GPU")]

MIB = 1 << 20


@pytest.fixture
def streams():
    streams = CudaStreams(torch.device("cuda"))
    assert streams.driver is not None, "this GPU's driver maps no memory: its pools cannot grow"
    return streams


def free() -> int:
    torch.cuda.synchronize()
    gc.collect()
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0]


def is_about(found: int, expected: int) -> bool:
    """Returns whether two sizes of free memory are equal but for what the driver takes for itself."""
    return abs(found - expected) <= 16 * MIB


def pool_of(streams, num_frames: int, streamed: int = 0, room: int = 4 << 30) -> DevicePool:
    """Returns a pool of frames of 1 MiB."""
    shape = frame_shape([None] * 16, 8, 128, 16, "bfloat16")
    pool = DevicePool(num_frames, shape, "cuda", block_major, room, streamed, streams=streams)
    assert pool.layout.frame_bytes == MIB
    return pool


def test_the_driver_names_its_granularity_and_takes_all_back(streams) -> None:
    driver, before = streams.driver, free()
    assert driver.granularity >= MIB
    memory, tensor = open_mapped(driver, 1 << 30, streams.synchronize, [(0, 256 * MIB)])
    assert (tensor.device, tensor.dtype, len(tensor)) == (streams.where, torch.uint8, 1 << 30)
    assert is_about(before - free(), 256 * MIB)
    memory.map(0, 1 << 30)
    tensor.fill_(7)
    assert is_about(before - free(), 1 << 30)
    memory.unmap(0, 512 * MIB)
    assert is_about(before - free(), 512 * MIB)
    assert (tensor[512 * MIB :] == 7).all()
    del memory, tensor
    assert is_about(before, free())


@pytest.mark.parametrize("streamed", [0, 8])
def test_a_pool_gives_memory_to_the_card_and_keeps_what_stays(streams, streamed) -> None:
    before = free()
    pool = pool_of(streams, 256, streamed)
    assert pool.capacity == 4096
    empty = before - free() - 256 * MIB
    key, value = pool.layer(5)[:2]
    address = key.data_ptr()
    numbers = torch.arange(1024, device="cuda").to(torch.bfloat16)[:, None, None, None]
    key[:256], value[:256] = numbers[:256], -numbers[:256]
    for size in (1024, 300, 700, 100, 256):
        pool.resize(size)
        kept = min(size, 100 if size == 256 else 256)
        assert is_about(before - free() - empty, size * MIB)
        assert key.data_ptr() == address
        assert (key[:kept] == numbers[:kept]).all()
        assert (value[:kept] == -numbers[:kept]).all()
        key[:size], value[:size] = numbers[:size], -numbers[:size]
    records, whole = pool.frames.read([0, 255])
    assert whole == [True, True]
    with pool.frames.write([3]) as places:
        places[0][:] = records[1].reshape(places[0].shape)
    pool.frames.copy([3], [4])
    assert (pool.frames.read([4])[0] == records[1]).all()
    assert pool.frames.read([0, 256])[1] == [False, False]
    if streamed:
        pool.frames.copy([255, 4], [pool.first_streamed, pool.first_streamed + 7])
        assert (pool.frames.read([pool.first_streamed + 7])[0][0] == records[1]).all()
    del pool, key, value, numbers
    assert is_about(before, free())


def test_what_the_card_does_not_have_is_refused_and_nothing_is_kept(streams) -> None:
    pool = pool_of(streams, 64, room=torch.cuda.mem_get_info()[1])
    pool.layer(0).key[:64] = 3
    before, most = free(), pool.capacity
    with pytest.raises(KVMemoryError, match=r"cuMemCreate\(.*CUDA_ERROR_OUT_OF_MEMORY.*ask for less, or free memory"):
        pool.resize(most)
    assert pool.num_frames == 64
    assert is_about(before, free())
    assert (pool.layer(0).key[:64] == 3).all()
    pool.resize(128)


def test_memory_is_unmapped_behind_work_that_uses_it(streams) -> None:
    """An illegal address would be met by whoever waits next, and end the process's use of the GPU."""
    pool = pool_of(streams, 1024)
    key, busy, beside = pool.layer(0).key, torch.ones(8192, 8192, device="cuda"), streams.stream()
    for _ in range(20):
        busy = busy @ busy
    key[:1024] = 5
    beside.wait_event(streams.compute.record_event())
    with streams.use(beside):
        total = key[:1024].sum(dtype=torch.float64)
    reading = pool.frames.begin_read([1000, 1023])
    pool.resize(8)
    reading.wait()
    assert np.frombuffer(reading.records[1][:2].tobytes(), np.uint16) == torch.tensor(5.0).bfloat16().view(torch.int16)
    assert float(total) == 5.0 * 1024 * key[0].numel()
    assert (key[:8] == 5).all()


def test_a_captured_graph_replays_when_the_pool_has_grown_and_shrunk(streams) -> None:
    pool = pool_of(streams, 64)
    key, which = pool.layer(2).key, torch.tensor([3, 60], device="cuda")
    graph, result = torch.cuda.CUDAGraph(), torch.zeros(2, device="cuda")
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):  # as torch asks for before a capture
        result.copy_(key[which].float().mean(dim=(1, 2, 3)))
    torch.cuda.current_stream().wait_stream(side)
    with torch.cuda.graph(graph):
        result.copy_(key[which].float().mean(dim=(1, 2, 3)))
    for size, frames in ((64, [3, 60]), (512, [3, 500]), (16, [3, 15]), (300, [290, 299])):
        pool.resize(size)
        for frame in frames:
            key[frame] = frame % 64
        which.copy_(torch.tensor(frames))
        graph.replay()
        assert result.tolist() == [frame % 64 for frame in frames]


def test_tritons_kernels_write_and_read_what_came_to_the_pool_later(streams) -> None:
    """They ask the driver what the addresses are that they are given."""
    pytest.importorskip("triton")
    from pagemill.attention.triton_backend import TritonAttention

    case = PagedCase(
        [(300, 1), (70, 70), (40, 3)], head_dim=128, dtype=torch.float16, query_dtype=torch.float16, device="cuda",
        layout=block_major,
    )  # fmt: skip
    total, shape = case.pool.num_frames, case.pool.shape
    case.pool = DevicePool(1, shape, "cuda", block_major, room=1 << 30, streams=streams)
    case.pool.resize(total)
    backend = TritonAttention(CAPABILITY)
    case.write_all(backend)
    query, batch = case.whole()
    output, _ = backend.attend(query, case.cache, batch, 0, scale=0.1)
    expected, _ = case.expected(scale=0.1)
    torch.testing.assert_close(output.cpu().float(), expected.float(), atol=5e-3, rtol=5e-3)
