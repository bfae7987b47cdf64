"""Files are read right, directly or not; directly where the system has nothing of them and everything fits pages."""

from __future__ import annotations

import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from pagemill.kvcache import direct_reads
from pagemill.kvcache.direct_reads import READS_AT_ONCE, DirectReads
from pagemill.kvcache.pages import HUGE_PAGE

SIZE = 1 << 20


def read(file: DirectReads, nbytes: int, offset: int) -> np.ndarray:
    with file.read(nbytes, offset) as memory:
        return memory.copy()


@pytest.fixture
def content() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, SIZE, dtype=np.uint8)


@pytest.fixture
def descriptor(tmp_path, content):
    path = tmp_path / "blocks"
    path.write_bytes(content.tobytes())
    file = os.open(path, os.O_RDWR)
    os.fsync(file)
    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
    yield file
    os.close(file)


@pytest.fixture
def file(tmp_path, descriptor):
    reads = DirectReads(tmp_path / "blocks", descriptor, SIZE)
    yield reads
    reads.close()


def test_what_the_system_does_not_have_does_not_go_through_its_memory(file, content) -> None:
    if not file.direct or file.has_pages(0, SIZE):
        pytest.skip("this system does not read directly, or does not say what it has in memory")
    assert (read(file, 24576, 65536) == content[65536 : 65536 + 24576]).all()
    assert not file.has_pages(0, SIZE)
    assert (read(file, 8192, 100) == content[100:8292]).all()
    assert file.has_pages(0, SIZE)


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize(("nbytes", "offset"), [(16384, 4096), (5000, 0), (8192, 77), (SIZE, 0)])
def test_every_read_is_right(file, descriptor, content, nbytes, offset, direct) -> None:
    if not direct:
        os.pread(descriptor, SIZE, 0)
    assert (read(file, nbytes, offset) == content[offset : offset + nbytes]).all()


def test_what_there_is_before_the_end_is_read(file, content) -> None:
    assert (read(file, 8192, SIZE - 4096)[:4096] == content[-4096:]).all()


def test_what_is_in_use_is_not_read_over(file, content) -> None:
    with file.read(8192, 0) as first:
        for offset in range(8192, 6 * 8192, 8192):
            assert (read(file, 8192, offset) == content[offset : offset + 8192]).all()
        assert (first == content[:8192]).all()
        assert first.ctypes.data % HUGE_PAGE == 0


def test_a_read_that_fails_gives_its_memory_back(file, descriptor) -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)
    for _ in range(9):
        with pytest.raises(OSError, match="Bad file descriptor"):
            read(file, 8192, 77)


def test_threads_that_read_directly_leave_others_the_cores(file, content, monkeypatch) -> None:
    if not file.direct:
        pytest.skip("this system does not read directly")
    lock, reading, seen = threading.Lock(), [0], []
    preadv = os.preadv

    def slow(*how) -> int:
        with lock:
            reading[0] += 1
            seen.append(reading[0])
        time.sleep(0.02)
        with lock:
            reading[0] -= 1
        return preadv(*how)

    monkeypatch.setattr(direct_reads.os, "preadv", slow)
    monkeypatch.setattr(file, "has_pages", lambda *where: False)
    with ThreadPoolExecutor(4) as threads:
        parts = list(threads.map(lambda at: read(file, 8192, at), range(0, 16 * 8192, 8192)))
    assert (np.concatenate(parts) == content[: 16 * 8192]).all()
    assert max(seen) == READS_AT_ONCE
