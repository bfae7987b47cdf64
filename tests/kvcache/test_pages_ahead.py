"""Pages of frames that come next are there before they are written; nothing that lies in them changes."""

from __future__ import annotations

import ctypes
import sys
import threading
from pathlib import Path

import pytest
import torch

from harness import frame_shape
from pagemill.kvcache import pages_ahead
from pagemill.kvcache.device_pool import DevicePool
from pagemill.kvcache.layout import block_major, layer_major
from pagemill.kvcache.pages import HUGE_PAGE, PAGE_BYTES, POPULATE_WRITE
from pagemill.kvcache.pages_ahead import AHEAD_BYTES, SHARE, PagesAhead

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="pages are made ahead on Linux only")
FRAMES = 2048
TOTAL = 128 << 20


def wait_for_the_first() -> None:
    """Waits until the first frames have their pages."""
    for thread in threading.enumerate():
        if thread.name == "pages ahead":
            thread.join()


def resident(pool: DevicePool) -> int:
    """Returns how many of the pool's bytes have pages."""
    begin = pool.storage.data_ptr() // PAGE_BYTES * PAGE_BYTES
    pages = (ctypes.c_ubyte * -(-TOTAL // PAGE_BYTES))()
    assert ctypes.CDLL(None).mincore(ctypes.c_void_p(begin), ctypes.c_size_t(TOTAL), pages) == 0
    return sum(page & 1 for page in pages) * PAGE_BYTES


@pytest.mark.parametrize("layout", [layer_major, block_major])
def test_pages_come_ahead_and_keep_what_lies_in_them(layout) -> None:
    pool = DevicePool(FRAMES, frame_shape([None, None], 4, 64, 16, "float32"), layout=layout)
    assert pool.nbytes == TOTAL
    pool.layer(1).key[:8] = 5
    before = resident(pool)
    pages = PagesAhead(pool)
    wait_for_the_first()
    first = pool.nbytes // SHARE
    assert 0.8 * first < resident(pool) - before < 1.6 * first
    pages.reach(8)
    assert resident(pool) - before < 1.6 * first
    pages.reach(FRAMES // 2)
    assert 0.48 * pool.nbytes < resident(pool) - before < 0.6 * pool.nbytes
    pages.reach(FRAMES - 1)
    assert resident(pool) - before > 0.95 * pool.nbytes
    assert bool((pool.layer(1).key[:8] == 5).all())
    assert pool.layer(1).key[8:].count_nonzero() == pool.layer(0).key.count_nonzero() == 0


def test_what_a_smaller_pool_gives_back_stays_given() -> None:
    pool = DevicePool(FRAMES, frame_shape([None, None], 4, 64, 16, "float32"))
    pages = PagesAhead(pool)
    wait_for_the_first()
    before = resident(pool)
    pages.reach(FRAMES - 1)
    pages.shrink(FRAMES // 4)
    pool.resize(FRAMES // 4)
    pages.reach(FRAMES // 4 - 1)
    assert resident(pool) - before < 0.3 * TOTAL
    pool.resize(FRAMES)
    pages.reach(FRAMES - 1)
    assert resident(pool) - before > 0.7 * TOTAL


@pytest.mark.parametrize("slow", [False, True])
def test_frames_that_are_loaded_have_their_pages_before(slow: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of small pages no more than those; and a step that goes on behind them does not make them again."""
    monkeypatch.setattr(pages_ahead, "SLOW_BYTES_PER_S", float("inf") if slow else 0)
    pool = DevicePool(FRAMES, frame_shape([None, None], 4, 64, 16, "float32"))
    pages = PagesAhead(pool)
    wait_for_the_first()
    ready = min(AHEAD_BYTES, pool.nbytes // SHARE) // pool.layout.frame_bytes
    last = ready + 299
    before, wanted = resident(pool), 300 * pool.layout.frame_bytes
    pages.begin()
    pages.make([*range(last, ready - 1, -1), FRAMES + 5])
    pages.end()
    assert 0.9 * wanted < resident(pool) - before < wanted + ((1 << 20) if slow else 2 * HUGE_PAGE)
    asked: list[tuple[int, int, int]] = []
    advise = pages_ahead.advise
    monkeypatch.setattr(pages_ahead, "advise", lambda *how: asked.append(how) or advise(*how))
    pages.reach(last + 1)
    page = PAGE_BYTES if slow else HUGE_PAGE
    made = [address for address, _, advice in asked if advice == POPULATE_WRITE]
    assert sorted(made) == [piece[last + 1].data_ptr() // page * page for piece in pool.frames.bytes]


def test_what_pages_shall_be_is_said_once_for_all_pieces_of_a_load(monkeypatch: pytest.MonkeyPatch) -> None:
    """To say it, the system stops all who make some."""
    monkeypatch.setattr(pages_ahead, "SLOW_BYTES_PER_S", float("inf"))
    pool = DevicePool(FRAMES, frame_shape([None, None], 4, 64, 16, "float32"))
    pages = PagesAhead(pool)
    wait_for_the_first()
    said: list[int] = []
    advise = pages_ahead.advise

    def note(address: int, nbytes: int, advice: int) -> bool:
        said.append(advice)
        return advise(address, nbytes, advice)

    monkeypatch.setattr(pages_ahead, "advise", note)
    pages.begin()
    for first in range(1000, 1100, 10):
        pages.make(range(first, first + 10))
    pages.reach(1100)
    pages.end()
    others = [advice for advice in said if advice != pages_ahead.POPULATE_WRITE]
    assert others == [pages_ahead.NOT_HUGE] * 2 + [pages_ahead.HUGE] * 2


def huge_bytes() -> int:
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("AnonHugePages"))


def huge_flags(address: int) -> list[bool]:
    """Of the mappings that begin at this address or behind it, up to a pool's size: whether they are to be huge."""
    found, inside = [], False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        words = line.split()
        if "-" in words[0] and not words[0].endswith(":"):
            begin, end = (int(part, 16) for part in words[0].split("-"))
            inside = begin < address + TOTAL and end > address
        elif inside and words[0] == "VmFlags:":
            found.append("hg" in words)
    return found


@pytest.mark.parametrize("slow", [False, True])
def test_later_pages_are_small_where_huge_ones_are_slow(slow: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages_ahead, "SLOW_BYTES_PER_S", float("inf") if slow else 0)
    pool = DevicePool(FRAMES, frame_shape([None, None], 4, 64, 16, "float32"))
    at = pool.storage.data_ptr()
    if huge_flags(at) != [True]:
        pytest.skip("this system has no huge pages")
    pages = PagesAhead(pool)
    wait_for_the_first()
    pool.layer(0).value[: FRAMES // 16] = 7
    before, huge = resident(pool), huge_bytes()
    pages.reach(FRAMES - 1)
    assert resident(pool) - before > 0.9 * (TOTAL - TOTAL // SHARE)
    assert (huge_bytes() - huge < 8 << 20) == slow
    assert huge_flags(at) == [True]
    assert bool((pool.layer(0).value[: FRAMES // 16] == 7).all())
    assert pool.layer(0).value[FRAMES // 16 :].count_nonzero() == pool.layer(1).key.count_nonzero() == 0


def test_a_gpus_memory_has_no_pages_of_the_host_also_when_it_has_shrunk_and_grown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pool = DevicePool(FRAMES, frame_shape([None, None], 4, 64, 16, "float32"), layout=block_major)
    pool.device = torch.device("cuda")
    monkeypatch.setattr(pages_ahead, "advise", lambda *_: pytest.fail("the system is told of a device's addresses"))
    pages = PagesAhead(pool)
    wait_for_the_first()
    pages.shrink(8)
    pages.begin()
    pages.make([9])
    pages.end()
    pages.reach(20)
