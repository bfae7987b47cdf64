"""A device's memory that comes and goes under addresses that stay, by a driver that fails where it is told to."""

from __future__ import annotations

import faulthandler
import gc
import os
import signal
from collections import Counter

import numpy as np
import pytest
import torch
from fake_driver import GRANULARITY, POISON, FakeDriver, Misuse
from hypothesis import given, settings
from hypothesis import strategies as st

from at_once import AtOnce
from harness import frame_shape
from pagemill.errors import DeviceLostError, DriverError, KVMemoryError
from pagemill.kvcache import device_pool, mapped_memory
from pagemill.kvcache.device_pool import DevicePool
from pagemill.kvcache.gpu_frames import GpuFrames
from pagemill.kvcache.layout import block_major
from pagemill.kvcache.mapped_memory import open_mapped
from pagemill.kvcache.streaming_gpu_frames import Parts, StreamingGpuFrames

G = GRANULARITY
CARD = 40 * G


class Mapped(AtOnce):
    """Streams of a device whose memory is mapped."""

    def __init__(self, driver: FakeDriver) -> None:
        self.driver = driver

    def synchronize(self) -> None:
        self.driver.calls.append("wait")


@pytest.fixture
def driver():
    driver = FakeDriver(CARD)
    yield driver
    driver.fail()
    if driver.reserved:
        gc.collect()
    driver.check_empty()
    assert driver.free_bytes == CARD


def opened(driver, nbytes, *filled):
    return open_mapped(driver, nbytes, lambda: driver.calls.append("wait"), filled)


def test_memory_comes_and_goes_in_granules_and_what_stays_keeps_its_contents(driver) -> None:
    memory, tensor = opened(driver, 10 * G, (0, 3 * G + 1))
    address = tensor.data_ptr()
    assert (len(tensor), driver.free_bytes) == (10 * G, CARD - 4 * G)
    tensor[: 4 * G] = torch.arange(4 * G) % 251
    assert memory.missing(0, 7 * G) == 3 * G
    memory.map(0, 7 * G)
    assert (driver.free_bytes, tensor.data_ptr()) == (CARD - 7 * G, address)
    tensor[6 * G :][:G] = 7
    memory.unmap(G + 1, 10 * G)
    assert driver.free_bytes == CARD - 2 * G
    assert (tensor[: 2 * G] == torch.arange(2 * G) % 251).all()
    memory.map(0, 10 * G)
    assert driver.calls.count("open") == 3, "neighbours are opened together"
    tensor[2 * G :] = 9
    assert (tensor[: 2 * G] == torch.arange(2 * G) % 251).all()


def test_ranges_are_rounded_so_that_nothing_live_goes(driver) -> None:
    memory, tensor = opened(driver, 8 * G, (0, 8 * G))
    tensor.fill_(5)
    for begin, end, left in ((1, G, 8), (1, 2 * G - 1, 8), (G, 2 * G, 7), (3 * G - 1, 5 * G + 1, 5), (6 * G, 6 * G, 5)):
        memory.unmap(begin, end)
        assert driver.free_bytes == CARD - left * G
    assert all((piece == 5).all() for piece in driver.pieces(tensor))
    memory.map(4 * G - 1, 4 * G + 1)
    memory.map(2 * G + 1, 2 * G + 1)
    assert driver.free_bytes == CARD - 7 * G


def test_large_memory_is_cut_into_larger_granules(driver, monkeypatch) -> None:
    monkeypatch.setattr(mapped_memory, "MOST_GRANULES", 4)
    memory, _ = opened(driver, 10 * G + 5, (0, 1))
    assert memory.granule == 3 * G
    assert [*driver.reserved.values()] == [12 * G]
    memory.map(0, 10 * G + 5)
    assert driver.free_bytes == CARD - 12 * G


def test_the_device_is_waited_for_before_memory_goes_and_not_when_it_comes(driver) -> None:
    memory, _tensor = opened(driver, 8 * G, (0, 4 * G))
    memory.map(0, 8 * G)
    memory.unmap(G - 1, G + 1)
    assert "wait" not in driver.calls
    memory.unmap(5 * G, 8 * G)
    assert driver.calls[-7:] == ["wait", *["unmap"] * 3, *["release"] * 3]


def test_all_goes_back_with_the_last_view_behind_the_devices_work(driver) -> None:
    memory, tensor = opened(driver, 8 * G, (0, 4 * G))
    view = tensor[G : 2 * G].view(2, -1)
    del tensor
    gc.collect()
    assert driver.mapped
    view.fill_(3)
    driver.calls.clear()
    del view
    gc.collect()
    driver.check_empty()
    assert Counter(driver.calls) == {"wait": 1, "unmap": 4, "release": 4, "free": 1}
    assert driver.calls[0] == "wait"
    del memory


@pytest.mark.parametrize("fails", range(10))
def test_a_start_that_fails_leaves_nothing(driver, fails) -> None:
    """reserve, three times create and map, open, tensor; the tenth call does not come any more."""
    driver.fail(fails, 1)
    if fails == 9:
        _memory, _tensor = opened(driver, 8 * G, (0, 3 * G))
        assert driver.calls == ["reserve", *["create", "map"] * 3, "open", "tensor"]
        return
    with pytest.raises(KVMemoryError, match="fails here") as caught:
        opened(driver, 8 * G, (0, 3 * G))
    assert caught.value.param == "kv_memory"
    driver.check_empty()


def test_a_growth_beyond_the_card_says_what_was_had(driver) -> None:
    memory, tensor = opened(driver, 50 * G, (0, 30 * G))
    words = (
        rf"cannot have {45 * G} bytes of cpu: it lacked {15 * G}, and got {10 * G} of them \(create: .* ask for less"
    )
    with pytest.raises(KVMemoryError, match=words):
        memory.map(0, 45 * G)
    assert driver.free_bytes == 10 * G
    tensor[: 30 * G] = 1
    memory.map(0, 40 * G)


def test_what_the_driver_does_not_take_back_is_offered_again(driver, caplog) -> None:
    memory, _tensor = opened(driver, 8 * G, (0, 8 * G))
    driver.fail(5, 1)  # behind the wait and four times unmap
    memory.unmap(4 * G, 8 * G)
    assert driver.free_bytes == CARD - 8 * G
    assert f"does not take {4 * G} bytes of the KV pool back yet: release fails here" in caplog.text
    memory.unmap(3 * G, 8 * G)
    assert driver.free_bytes == CARD - 3 * G
    caplog.clear()  # whose error knows this test, and its memory


def test_a_driver_that_neither_takes_nor_restores_has_lost_its_device(driver) -> None:
    memory, _tensor = opened(driver, 8 * G, (0, 8 * G))
    driver.fail(3, 2)  # the third unmap, and the map that undoes the first
    with pytest.raises(DeviceLostError, match="map fails here"):
        memory.unmap(2 * G, 8 * G)


def test_the_end_gives_back_what_it_can(driver, caplog) -> None:
    _memory, tensor = opened(driver, 8 * G, (0, 4 * G))
    driver.fail(2, 1)
    del tensor
    gc.collect()
    assert f"leaves {G} bytes of the KV pool mapped: unmap fails here" in caplog.text
    assert "does not take the KV pool's addresses back" in caplog.text
    (address,) = driver.mapped
    _, handle = driver.mapped[address]
    driver.unmap(address, G)
    driver.release(handle)
    driver.free(*next(iter(driver.reserved.items())))


def test_a_failed_device_gets_its_memory_back_too(driver, caplog) -> None:
    def wait():
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    _memory, tensor = open_mapped(driver, 8 * G, wait, [(0, 4 * G)])
    del tensor
    gc.collect()
    driver.check_empty()
    assert "goes back to cpu, which has failed: CUDA error: an illegal" in caplog.text


def test_the_fake_driver_ends_who_uses_what_is_not_mapped_and_finds_misuse(driver) -> None:
    at = driver.reserve(2 * G)
    handle = driver.create(G)
    driver.map(at, G, handle)
    driver.open(at, G)
    tensor = driver.tensor(at, 2 * G, None)
    assert (tensor[:G] == POISON).all()
    assert status_of(lambda: tensor[0].item()) == 0
    assert status_of(lambda: tensor[G].item()) == signal.SIGSEGV
    driver.unmap(at, G)
    assert status_of(lambda: tensor[0].item()) == signal.SIGSEGV
    driver.release(handle)
    driver.free(at, 2 * G)
    at = driver.reserve(4 * G)
    first, second = driver.create(G), driver.create(G)
    driver.map(at, G, first)
    for call in (
        lambda: driver.reserve(G + 1),
        lambda: driver.create(G // 2),
        lambda: driver.map(at, G, second),
        lambda: driver.map(at + G, G, first),
        lambda: driver.map(at + 4 * G, G, second),
        lambda: driver.map(at + G, 2 * G, second),
        lambda: driver.open(at, 2 * G),
        lambda: driver.unmap(at + G, G),
        lambda: driver.unmap(at, 2 * G),
        lambda: driver.release(first),
        lambda: driver.free(at, 3 * G),
        lambda: driver.tensor(at, 4 * G, None),
        driver.check_empty,
    ):
        with pytest.raises(Misuse):
            call()
    driver.unmap(at, G)
    driver.release(first)
    driver.release(second)
    driver.free(at, 4 * G)


def status_of(call) -> int:
    """Returns how a child of this process ends that does something."""
    if (child := os.fork()) == 0:
        faulthandler.disable()
        call()
        os._exit(0)
    return os.waitpid(child, 0)[1] & 0x7F  # without whether it has left its memory in a file


# Frames and pools


FRAME = 3 * G // 4 // 8 * 8
"""A frame's bytes: several begin in a granule, and some lie in two."""
FRAMES, STREAMED = 24, 3


def frames_of(driver, filled, streams):
    if streams:
        return StreamingGpuFrames(FRAMES, FRAME, Mapped(driver), STREAMED, Parts(4, FRAME // 4), filled)
    return GpuFrames(1, FRAMES, FRAME, Mapped(driver), filled=filled)


resizes = st.tuples(st.integers(1, FRAMES), st.none() | st.integers(0, 30), st.sampled_from([1, 1, 2, 3]))
"""The number of frames, the call that fails, and how many behind it do."""


@settings(max_examples=40, deadline=None)
@given(st.integers(1, FRAMES), st.lists(resizes, max_size=8), st.booleans())
def test_frames_that_are_there_keep_their_contents_whatever_fails(first, steps, streams) -> None:
    driver = FakeDriver(30 * G)
    frames = frames_of(driver, first, streams)
    base, model = frames.bytes.data_ptr(), {}
    number, lost = first, False
    for wanted, fails, count in [(first, None, 0), *steps]:
        driver.fail(*(() if fails is None else (fails, count)))
        try:
            frames.resize(number, wanted)
            number = wanted
        except (KVMemoryError, DriverError):
            pass  # and it is as it was
        except DeviceLostError:
            lost = True
            break
        driver.fail()
        model = {frame: value for frame, value in model.items() if frame < number}
        for frame, value in model.items():
            assert (frames.bytes[0, frame] == value).all()
        assert frames.missing(number) == 0
        model = {frame: (frame * 7 + wanted) % 251 for frame in range(number)}
        with frames.write([*model]) as places:
            places[:] = np.array([*model.values()], np.uint8)[:, None, None]
        records, whole = frames.read(range(number))
        assert all(whole)
        assert (records == np.array([*model.values()], np.uint8)[:, None]).all()
        if number < FRAMES:
            assert frames.read([0, number])[1] == [False, False]
            with pytest.raises(IndexError):
                frames.copy([0], [number])
            with pytest.raises(IndexError), frames.write([number]):
                pass
        if streams:
            frames.copy([0, number - 1], [FRAMES, FRAMES + 2])
            beside = [0, FRAMES + 2] if number == FRAMES else [0, FRAMES + 2, number]
            records, whole = frames.read(beside)
            assert whole == [number == FRAMES, True, False][: len(beside)]
            assert (records[1] == model[number - 1]).all()
    driver.fail()
    assert frames.bytes.data_ptr() == base
    assert lost or number == 1 or driver.free_bytes < 30 * G
    frames.bytes = None
    driver.check_empty()


def pool_of(driver, num_frames=5, streamed=0, room=CARD):
    shape = frame_shape([None] * 3, 3, 20, 8, "float16")
    return DevicePool(
        num_frames, shape, layout=block_major, room=room, streamed_frames=streamed, streams=Mapped(driver)
    )


@pytest.mark.parametrize("streamed", [0, 4])
def test_a_pool_grows_and_shrinks_under_its_views(driver, streamed) -> None:
    pool = pool_of(driver, streamed=streamed)
    assert pool.capacity == CARD // pool.layout.frame_bytes > 20
    assert pool.first_streamed == pool.capacity
    key = pool.layer(2).key
    address = key.data_ptr()
    key[:5] = torch.arange(5.0)[:, None, None, None]
    pool.resize(20)
    key[5:20] = 7
    assert pool.missing(20) == 0 < pool.missing(pool.capacity)
    taken = CARD - driver.free_bytes
    pool.resize(3)
    assert driver.free_bytes > CARD - taken
    assert key[:3, 0, 0, 0].tolist() == [0, 1, 2]
    assert (key.data_ptr(), pool.nbytes) == (address, 3 * pool.layout.frame_bytes)
    with pytest.raises(KVMemoryError, match=r"made to grow to .* start with more kv_memory"):
        pool.resize(pool.capacity + 1)


def test_a_pool_grows_no_further_than_the_card_and_keeps_its_size(driver) -> None:
    pool = pool_of(driver, room=2 * CARD)
    most = CARD // pool.layout.frame_bytes
    with pytest.raises(KVMemoryError, match="ask for less, or free memory"):
        pool.resize(most + 3)
    assert pool.num_frames == 5
    pool.resize(most)


def test_host_memory_that_cannot_be_pinned_is_told_as_such(driver, monkeypatch, caplog) -> None:
    """It is asked for before any of the card's."""

    def refuse(self: Mapped, nbytes: int) -> torch.Tensor:
        assert driver.free_bytes == CARD
        raise KVMemoryError("it cannot be pinned", param="kv_host_memory")

    monkeypatch.setattr(Mapped, "pinned_whole", refuse)
    with pytest.raises(KVMemoryError, match="it cannot be pinned"):
        pool_of(driver, streamed=4)
    assert not caplog.records


@pytest.mark.parametrize("streamed", [0, 4])
@pytest.mark.parametrize("why", ["no room", "no driver", "a driver that fails"])
def test_a_pool_without_a_driver_keeps_its_memory(driver, monkeypatch, caplog, streamed, why) -> None:
    streams, shape = Mapped(driver), frame_shape([None] * 3, 3, 20, 8, "float16")
    if why == "no driver":
        streams.driver = None
    elif why == "a driver that fails":
        driver.fail(2, 1)
    room = 0 if why == "no room" else CARD
    monkeypatch.setattr(device_pool, "CudaStreams", lambda device: streams)
    pool = DevicePool(5, shape, "meta", block_major, room, streamed)  # any device that is not the host
    assert pool.capacity == pool.first_streamed == 5
    assert ("meta keeps its memory, and cannot grow: " in caplog.text) == (why == "a driver that fails")
    pool.layer(0).key.fill_(3)
    pool.resize(2)
    assert (pool.layer(0).key == 3).all()
    pool.resize(5)
    with pytest.raises(KVMemoryError, match="made to grow to 5"):
        pool.resize(6)
