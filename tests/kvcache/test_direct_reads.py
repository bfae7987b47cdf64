"""Files are read right, directly or not; directly where the system has nothing of them and everything fits pages."""

from __future__ import annotations

import os

import numpy as np
import pytest

from pagemill.kvcache.direct_reads import DirectReads, whole_pages

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
    reads = DirectReads(path, file)
    yield reads
    reads.close()
    os.close(file)


def test_what_the_system_does_not_have_does_not_go_through_its_memory(file, content) -> None:
    if file._direct < 0 or file._has_pages(0, SIZE):
        pytest.skip("this system does not read directly, or does not say what it has in memory")
    buffers = whole_pages(3, 8192)
    file.read(list(buffers), 65536)
    assert (buffers.ravel() == content[65536 : 65536 + 3 * 8192]).all()
    assert not file._has_pages(0, SIZE)
    file.read([np.empty(8192, dtype=np.uint8)], 100)
    assert file._has_pages(0, SIZE)


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize(("begin", "length", "offset"), [(0, 8192, 4096), (8, 8192, 4096), (0, 5000, 0), (0, 8192, 77)])
def test_every_read_is_right(file, content, begin, length, offset, direct) -> None:
    if not direct:
        os.pread(file._file, SIZE, 0)
    first, second = whole_pages(2, 12288)[:, begin : begin + length]
    file.read([first, second], offset)
    assert (np.concatenate([first, second]) == content[offset : offset + 2 * length]).all()


def test_what_there_is_before_the_end_is_read(file, content) -> None:
    (buffer,) = whole_pages(1, 8192)
    file.read([buffer], SIZE - 4096)
    assert (buffer[:4096] == content[-4096:]).all()
