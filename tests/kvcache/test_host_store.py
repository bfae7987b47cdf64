"""The host tier's memory: it comes with the blocks, and not in pieces that take longer than a block."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import numpy as np
import pytest

from pagemill.errors import KVMemoryError
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
