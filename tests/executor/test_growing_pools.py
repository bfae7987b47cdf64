"""Pools of a device that checks the order, whose memory a driver maps: they grow and shrink while requests run."""

from __future__ import annotations

import gc
import random
from itertools import cycle

import pytest
import rank_on_checked_device
from checked_device import OrderError
from checked_driver import CheckedDriver
from divided_memory import divides_slots
from late import Late
from static_attention import StaticAttention
from test_gpu_executor import BACKEND, SMALL, greedy, on_cpu, small_requests
from test_streaming_gpu import ALONE, LONG, POOL, alone, deep_model  # noqa: F401, a fixture

from core.drive import drive, request
from kvcache.fake_driver import GRANULARITY
from pagemill.config import EngineConfig
from pagemill.engine.core import EngineCore
from pagemill.errors import DeviceLostError, KVMemoryError, ResizeFailedError
from pagemill.executor import graphs, ranks
from pagemill.executor.interface import ExecutorMemory
from pagemill.executor.load import open_executor
from pagemill.kvcache.gpu_frames import GpuFrames
from pagemill.kvcache.streaming_gpu_frames import StreamingGpuFrames

FRAME_BYTES = 8192
CARD = 64 * FRAME_BYTES


@pytest.fixture
def driver(device, monkeypatch):
    """The driver of the device, whose card has 64 frames' memory."""
    driver = CheckedDriver(device, CARD)
    monkeypatch.setattr(device, "memory", lambda: ExecutorMemory(driver.free_bytes, CARD))
    yield driver
    driver.fail()
    device.broken = False
    if driver.reserved:
        gc.collect()
    driver.check_empty()


def opened(small_model, device, backend=BACKEND, **settings):
    config = EngineConfig(model=small_model, **SMALL | settings)
    return config, open_executor(config, backend=backend, device=device)


@pytest.mark.parametrize("seed", [2, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (0, 3, 4, 6))])
def test_random_schedules_bring_the_tokens_of_the_host(small_model, device, driver, seed) -> None:
    """Whatever is used of what is not mapped ends the process."""
    config, executor = opened(small_model, device)
    late, draw, requests = Late(config, executor, seed), random.Random(seed), small_requests(seed, 10)
    assert isinstance(executor.pool.frames, GpuFrames)
    late.add(requests[:4])
    left, sizes, frames = requests[4:], set(), cycle([14, 8, 30, 9])
    while left:
        for _ in range(draw.randint(1, 9)):
            late.step()
        late.add([left.pop(0)])
        late.resize(next(frames))
        sizes.add(driver.free_bytes)
    tokens = late.run()
    assert len(sizes) > 2
    assert not late.errors
    assert tokens == on_cpu(config, requests)
    late.executor.close()


def test_a_graph_stays_right_when_the_pool_has_grown(small_model, device, driver, monkeypatch) -> None:
    monkeypatch.setattr(graphs, "WORTH_IT", 1)
    monkeypatch.setattr(graphs, "LEAST_CONTEXT", 32)
    config, executor = opened(small_model, device, BACKEND._replace(attention=StaticAttention()), kv_memory=40 * 8192)
    late, requests = Late(config, executor), [request(f"r{i}", [5, 9, 3 + i], greedy(max_tokens=60)) for i in range(3)]
    late.add(requests)
    for frames in (20, 50, 12, 40):
        for _ in range(12):
            late.step()
        graphs_then = {graph: graph.replays for graph in device.graphs}
        late.resize(frames)
    tokens = late.run()
    assert any(graph.replays > before > 0 for graph, before in graphs_then.items())
    assert tokens == on_cpu(config, requests)
    late.executor.close()


def test_frames_that_a_step_in_flight_may_use_are_not_unmapped(small_model, device, driver, monkeypatch) -> None:
    config, executor = opened(small_model, device, kv_memory=40 * 8192)
    late = Late(config, executor)
    late.add([request("r", [5, 9, 3], greedy(max_tokens=8))])
    late.step()
    with monkeypatch.context() as patch:
        patch.setattr(executor.pool.frames._mapped, "_wait", lambda: None)  # noqa: SLF001
        with pytest.raises(OrderError, match="memory is unmapped while compute may still use it"):
            executor.resize(20)
    late.run()
    executor.close()


def test_blocks_on_their_way_to_the_host_are_waited_for_too(device, driver) -> None:
    frames = GpuFrames(1, 10, FRAME_BYTES, device, filled=10)
    frames.bytes.zero_()
    reading = frames.begin_read([7, 2])
    frames.resize(10, 4)
    reading.wait()
    assert not reading.records.any()
    assert frames.begin_read([1, 4]).whole == [False, False]


def test_an_engine_gives_memory_to_others_and_takes_it_again_where_they_have_left_it(small_model, device, driver):
    config, executor = opened(small_model, device, kv_memory=40 * 8192)
    executor._steps._kept_bytes = 6 * FRAME_BYTES  # noqa: SLF001, what steps need
    core = EngineCore(config, executor=executor)
    most = core.ready.num_frames
    core.add_request(request("r", [5, 9, 3], greedy(max_tokens=8)))
    core.step()
    before = driver.free_bytes
    assert core.resize("used").num_frames == 1
    assert driver.free_bytes == CARD - FRAME_BYTES > before
    others = [driver.create(GRANULARITY) for _ in range(driver.free_bytes // GRANULARITY - 8)]
    with pytest.raises(KVMemoryError, match=rf"cannot grow to {most} blocks: that takes .* and {2 * FRAME_BYTES} are "):
        core.resize(None)
    assert core.ready.num_frames == executor.pool.num_frames == 1
    with pytest.raises(KVMemoryError, match=rf"kv_memory is .* but only {3 * FRAME_BYTES} are free"):
        core.resize(9 * FRAME_BYTES)
    assert core.resize(3 * FRAME_BYTES).num_frames == 3
    for handle in others:
        driver.release(handle)
    assert core.resize(None).num_frames == most
    assert driver.free_bytes == before
    run = drive(core, [])
    assert run.tokens == on_cpu(config, [request("r", [5, 9, 3], greedy(max_tokens=8))])
    core.close()


@pytest.mark.parametrize("calls", [0, 3, 49, 50])
def test_a_growth_that_fails_at_any_call_changes_nothing(small_model, device, driver, calls) -> None:
    config, executor = opened(small_model, device)
    core = EngineCore(config, executor=executor)
    driver.fail(calls, 1)
    taken = driver.free_bytes
    with pytest.raises(KVMemoryError, match=r"fails here.*ask for less, or free memory"):
        core.resize(33 * FRAME_BYTES)
    assert (driver.free_bytes, core.ready.num_frames, executor.pool.num_frames) == (taken, 8, 8)
    assert core.resize(33 * FRAME_BYTES).num_frames == 33
    core.close()


def test_a_shrink_that_fails_is_answered_and_the_pool_keeps_its_size(small_model, device, driver) -> None:
    config, executor = opened(small_model, device, kv_memory=40 * 8192)
    core = EngineCore(config, executor=executor)
    core.add_request(request("r", [5, 9, 3], greedy(max_tokens=8)))
    core.step()
    driver.fail(4, 1)
    with pytest.raises(
        ResizeFailedError, match=r"DriverError: unmap fails here; it keeps its size\. Ended: 0 requests"
    ):
        core.resize(20 * FRAME_BYTES)
    assert core.ready.num_frames == executor.pool.num_frames == 40
    assert driver.free_bytes == 24 * FRAME_BYTES
    assert drive(core, []).tokens == on_cpu(config, [request("r", [5, 9, 3], greedy(max_tokens=8))])
    core.close()


def test_a_device_that_is_lost_while_a_pool_shrinks_is_a_dead_engine(small_model, device, driver) -> None:
    config, executor = opened(small_model, device, kv_memory=40 * 8192)
    core = EngineCore(config, executor=executor)
    device.broken = True
    with pytest.raises(DeviceLostError, match="an illegal memory access"):
        core.resize(20 * FRAME_BYTES)
    device.broken = False
    core.close()


@pytest.mark.slow
def test_pools_grow_beside_streamed_frames(deep_model, device, driver, monkeypatch) -> None:  # noqa: F811
    """Slots lie behind the addresses of all frames, and stay."""
    monkeypatch.setattr(StreamingGpuFrames, "__init__", divides_slots(device, StreamingGpuFrames.__init__))
    config = EngineConfig(model=deep_model, **LONG)
    executor = open_executor(config, backend=BACKEND, device=device)
    late = Late(config, executor)
    assert executor.pool.first_streamed == executor.pool.capacity > POOL
    late.add(ALONE)
    frames = cycle([POOL + 4, POOL, POOL + 1])
    while late.scheduler.has_work():
        for _ in range(7):
            late.step()
        late.resize(next(frames))
    assert late.run() == alone(deep_model)
    executor.close()


def test_ranks_grow_together_or_not_at_all(small_model, device, driver, monkeypatch) -> None:
    monkeypatch.setattr(ranks, "MODULE", rank_on_checked_device.__name__)
    monkeypatch.setenv(rank_on_checked_device.MAPS, str(CARD // 4))
    config, executor = opened(
        small_model, device, rank_on_checked_device.STATIC, tensor_parallel_size=2, enforce_eager=True
    )
    core, size = EngineCore(config, executor=executor), executor.facts.frame_bytes
    assert core.ready.num_frames == 8
    before = driver.free_bytes
    with pytest.raises(KVMemoryError, match=r"cannot have .* bytes of cpu: it lacked .*ask for less, or free memory"):
        core.resize(40 * size)  # rank 1 has no memory for them
    assert (core.ready.num_frames, executor.pool.num_frames, driver.free_bytes) == (8, 8, before)
    requests = small_requests(2, 4)
    for frames in (30, 8):
        assert core.resize(frames * size).num_frames == frames
        run = drive(core, requests)
    assert run.tokens == on_cpu(EngineConfig(model=small_model, **SMALL), requests)
    core.close()
