"""Pages of frames that come next are there before they are written; nothing that lies in them changes."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch

from pagemill.kvcache.device_pool import DevicePool
from pagemill.kvcache.layer_groups import group_layers
from pagemill.kvcache.layout import block_major, layer_major
from pagemill.kvcache.pages_ahead import SHARE, PagesAhead

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="pages are made ahead on Linux only")
FRAMES = 2048
TOTAL = 128 << 20


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize("layout", [layer_major, block_major])
def test_pages_come_ahead_and_keep_what_lies_in_them(layout) -> None:
    pool = DevicePool(FRAMES, group_layers([None, None]), 4, 64, 16, torch.float32, layout=layout)
    assert pool.nbytes == TOTAL
    pool.layer(1).key[:8] = 5
    before = resident()
    pages = PagesAhead(pool)
    pages._thread.join()
    first = pool.nbytes // SHARE
    assert 0.8 * first < resident() - before < 1.6 * first
    pages.reach(8)
    assert resident() - before < 1.6 * first
    pages.reach(FRAMES // 2)
    assert 0.5 * pool.nbytes <= resident() - before < 0.6 * pool.nbytes
    pages.reach(FRAMES - 1)
    assert resident() - before > 0.95 * pool.nbytes
    assert bool((pool.layer(1).key[:8] == 5).all())
    assert pool.layer(1).key[8:].count_nonzero() == pool.layer(0).key.count_nonzero() == 0


def test_what_a_smaller_pool_gives_back_stays_given() -> None:
    pool = DevicePool(FRAMES, group_layers([None, None]), 4, 64, 16, torch.float32)
    pages = PagesAhead(pool)
    pages._thread.join()
    before = resident()
    pages.reach(FRAMES - 1)
    pages.shrink(FRAMES // 4)
    pool.resize(FRAMES // 4)
    pages.reach(FRAMES // 4 - 1)
    assert resident() - before < 0.3 * TOTAL
    pool.resize(FRAMES)
    pages.reach(FRAMES - 1)
    assert resident() - before > 0.7 * TOTAL
