"""The host tier's memory: it comes with the blocks, and not in pieces that take longer than a block."""

from __future__ import annotations

import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from pagemill import _kernels
from pagemill.config import EngineConfig
from pagemill.engine import tiers
from pagemill.errors import KVMemoryError, KVStoreError
from pagemill.kvcache.host_store import HostStore
from pagemill.memory.work import BlockName

RECORD = 128 << 10
CAPACITY = 512


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def spill(names, records):
    raise AssertionError("there is room for all")


@pytest.mark.skipif(sys.platform != "linux", reason="resident memory is read as Linux tells it")
def test_memory_comes_with_the_blocks():
    store = HostStore(CAPACITY, RECORD)
    record = np.ones(RECORD, np.uint8)
    before = resident()
    for at, most in ((1, 1 << 20), (CAPACITY // 4, 20 << 20)):
        names = [BlockName(bytes([at % 256, n]), 0, b"", 0) for n in range(at)]
        store.write(names, [record] * at, spill)
        assert resident() - before < most
    assert store.num_blocks() == 1 + CAPACITY // 4


def test_more_than_the_machine_can_give_is_refused():
    with pytest.raises(KVMemoryError, match=f"{RECORD << 45} bytes.*lower kv_host_memory") as error:
        HostStore(1 << 45, RECORD)
    assert error.value.param == "kv_host_memory"


@pytest.fixture
def kernel_threads():
    """Kernels have as many threads afterwards as before."""
    before = _kernels.num_threads()
    yield
    _kernels.set_num_threads(before)


@pytest.mark.parametrize("nbytes", [1, 300_000, (256 << 10) - 1, 512 << 10])
@pytest.mark.parametrize("threads", [1, 3])
def test_records_of_any_length_are_copied_whole(kernel_threads, nbytes, threads):
    _kernels.set_num_threads(threads)
    sources = np.random.default_rng(0).integers(0, 256, (5, nbytes), dtype=np.uint8)
    targets = np.zeros((6, 1, nbytes + 1), np.uint8)
    _kernels.copy_records([target[0, :-1] for target in targets[:5]], [*sources])
    assert (targets[:5, 0, :-1] == sources).all()
    assert (targets[:, 0, -1] == 0).all()
    assert (targets[5] == 0).all()


def test_records_that_do_not_fit_are_refused():
    whole, wide = np.zeros((2, 8), np.uint8), np.zeros((2, 16), np.uint8)
    for targets, sources in (
        ([whole[0]], [whole[0, :4]]),
        ([whole[0, :4]], [whole[1]]),
        ([wide[0, ::2]], [whole[0]]),
        ([whole[0]], [wide[:, :4]]),
        ([whole[0]], [whole[0].view(np.int8)]),
        ([*whole], [whole[0]]),
    ):
        with pytest.raises(ValueError, match=r"without gaps|one target"):
            _kernels.copy_records(targets, sources)
    whole.flags.writeable = False
    with pytest.raises(TypeError):
        _kernels.copy_records([whole[0]], [wide[0, :8]])


def test_several_cores_copy_blocks_both_ways_at_once(kernel_threads, monkeypatch):
    store, calls, copy = HostStore(4, RECORD, 3), [], _kernels.copy_records
    assert _kernels.num_threads() >= 3
    monkeypatch.setattr(_kernels, "copy_records", lambda to, sources: (calls.append(len(to)), copy(to, sources)))
    records = np.random.default_rng(0).integers(0, 256, (3, RECORD), np.uint8)
    names = [BlockName(bytes([n]), 0, b"", 0) for n in range(3)]
    store.write(names, [*records], spill)
    out = np.zeros((4, 2, RECORD // 2), np.uint8)
    assert store.read([(bytes([n]), 0) for n in (2, 9, 0, 1)], out) == [True, False, True, True]
    assert (out.reshape(4, -1)[[2, 3, 0]] == records).all()
    assert calls == [3, 3]


class Slow:
    """A place that takes a record when others are there too."""

    shape = (RECORD,)

    def __init__(self, go):
        self.go = go

    def __setitem__(self, whole, record):
        self.go()
        self.record = record.copy()


def block(n: int, value: int):
    return [BlockName(bytes([n]), 0, b"", 0)], [np.full(RECORD, value, np.uint8)]


def test_blocks_are_read_side_by_side_and_stay_until_they_are():
    store, readers = HostStore(1, RECORD), threading.Barrier(2)
    store.write(*block(1, 1), spill)
    entered, go = threading.Event(), threading.Event()

    def wait():
        readers.wait(30)
        entered.set()
        assert go.wait(30)

    places = [Slow(wait), Slow(wait)]
    with ThreadPoolExecutor(4) as threads:
        reads = [threads.submit(store.read, [(bytes([1]), 0)], [place]) for place in places]
        assert entered.wait(30)  # both are reading
        written = threads.submit(store.write, *block(2, 2), lambda names, records: None)
        later = threads.submit(store.read, [(bytes([2]), 0)], out := np.zeros((1, RECORD), np.uint8))
        assert not wait_for([written], timeout=0.05).done
        go.set()
        assert [read.result() for read in reads] == [[True]] * 2
        written.result()
        later.result()
    assert all((place.record == 1).all() for place in places)
    assert store.read([(bytes([2]), 0)], out) == [True]
    assert (out == 2).all()


@pytest.mark.parametrize("cores", [1, 3])
def test_what_leaves_is_whole_until_the_tier_below_has_it(kernel_threads, cores):
    store, spilled = HostStore(3, RECORD, cores), []

    def values(numbers):
        out = np.zeros((len(numbers), RECORD), np.uint8)
        found = store.read([(bytes([n]), 0) for n in numbers], out)
        return [
            int(record[0]) if there and (record == record[0]).all() else None
            for there, record in zip(found, out, strict=True)
        ]

    def take(names, records):
        assert values(range(1, 6)) == [1, 2, 3, 4, 5]
        spilled.extend((name.digest[0], record.copy()) for name, record in zip(names, records, strict=True))
        if len(spilled) == 2:
            raise KVStoreError("the disk is full")

    for n in (1, 2, 3):
        store.write(*block(n, n), spill)
    (four,), (of_four,) = block(4, 4)
    (five,), (of_five,) = block(5, 5)
    with pytest.raises(KVStoreError):
        store.write([four, five], [of_four, of_five], take)
    of_four[:] = of_five[:] = 0  # they have been copied
    assert [(n, set(record.tolist())) for n, record in spilled] == [(1, {1}), (2, {2})]
    assert values(range(1, 6)) == [None, None, 3, 4, 5]
    store.close()


@pytest.mark.parametrize(("overlaps", "cores"), [(False, 1), (True, 5)])
def test_cores_that_steps_leave_idle_copy_blocks(kernel_threads, monkeypatch, overlaps, cores):
    asked = []
    monkeypatch.setattr(tiers, "usable_cores", lambda: 10)
    monkeypatch.setattr(tiers, "HostStore", lambda *args: asked.append(args) or HostStore(*args))
    facts = SimpleNamespace(
        record_bytes=RECORD, frame_bytes=RECORD, fingerprint=b"", kv_format="", numerics="", overlaps=overlaps
    )
    config = EngineConfig(model="some", enable_prefix_caching=False)
    executor, memory = SimpleNamespace(facts=facts, frames=None), SimpleNamespace(wanted={b"some"})
    assert tiers.make_tiers(config, executor, memory, tiers.Streamed(), 4 * RECORD, False, None) is not None
    assert asked == [(4, RECORD, cores, {b"some"})]


def test_who_reads_while_blocks_come_reads_them_whole(monkeypatch):
    """A reader may begin while a block still lies where it came from: `write` returns when it has been read."""
    store, out = HostStore(3, RECORD), np.zeros(RECORD, np.uint8)
    names, records = block(1, 7)
    started, go = threading.Event(), threading.Event()

    class Place:
        shape = (RECORD,)

        def __setitem__(self, whole, record):
            started.set()
            assert go.wait(10)
            out[:] = record

    reader = threading.Thread(target=store.read, args=([names[0][:2]], [Place()]))
    keep = store._keep  # noqa: SLF001

    def keep_while_one_reads(coming):
        reader.start()
        assert started.wait(10)
        keep(coming)

    monkeypatch.setattr(store, "_keep", keep_while_one_reads)
    with ThreadPoolExecutor(1) as writer:
        written = writer.submit(store.write, names, records, spill)
        assert started.wait(10)
        assert not wait_for([written], timeout=0.1).done
        go.set()
        written.result(10)
        records[0][:] = 0
    reader.join(10)
    assert (out == 7).all()
    store.close()
