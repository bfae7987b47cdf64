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
from pagemill.kvcache.layout import HUGE_PAGE

SIZE = 1 << 20


@pytest.fixture
def content() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, SIZE, dtype=np.uint8)


@pytest.fixture
def file(tmp_path, content):
    path = tmp_path / "blocks"
    path.write_bytes(content.tobytes())
    file = os.open(path, os.O_RDWR)
    os.fsync(file)
    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
    reads = DirectReads(path, file, SIZE)
    yield reads
    reads.close()
    os.close(file)


def test_what_the_system_does_not_have_does_not_go_through_its_memory(file, content) -> None:
    if file._direct < 0 or file._has_pages(0, SIZE):
        pytest.skip("this system does not read directly, or does not say what it has in memory")
    assert (file.read(24576, 65536) == content[65536 : 65536 + 24576]).all()
    assert not file._has_pages(0, SIZE)
    assert (file.read(8192, 100) == content[100:8292]).all()
    assert file._has_pages(0, SIZE)


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize(("nbytes", "offset"), [(16384, 4096), (5000, 0), (8192, 77), (SIZE, 0)])
def test_every_read_is_right(file, content, nbytes, offset, direct) -> None:
    if not direct:
        os.pread(file._file, SIZE, 0)
    assert (file.read(nbytes, offset) == content[offset : offset + nbytes]).all()


def test_what_there_is_before_the_end_is_read(file, content) -> None:
    assert (file.read(8192, SIZE - 4096)[:4096] == content[-4096:]).all()


def test_what_one_thread_reads_no_other_overwrites(file, content) -> None:
    first = file.read(8192, 0)
    with ThreadPoolExecutor(1) as other:
        assert (other.submit(file.read, 8192, 8192).result() == content[8192:16384]).all()
    assert (first == content[:8192]).all()
    assert first.ctypes.data % HUGE_PAGE == 0


def test_threads_that_read_directly_leave_others_the_cores(file, content, monkeypatch) -> None:
    if file._direct < 0:
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
    monkeypatch.setattr(file, "_has_pages", lambda *where: False)
    with ThreadPoolExecutor(4) as threads:
        parts = list(threads.map(lambda at: file.read(8192, at).copy(), range(0, 16 * 8192, 8192)))
    assert (np.concatenate(parts) == content[: 16 * 8192]).all()
    assert max(seen) == READS_AT_ONCE
