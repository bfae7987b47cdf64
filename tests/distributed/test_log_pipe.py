"""Lines that the processes of a fleet log go on being read, whatever becomes of stderr."""

import os
import select
import sys
import threading
from types import SimpleNamespace

import pytest

from pagemill.distributed.log_pipe import log_pipe

AWAITED_S = 10.0


class Stderr:
    """Fails at first, and then writes to a pipe. failed: set once it is about to fail."""

    def __init__(self, fail, descriptor):
        self.failed = threading.Event()
        self._fail, self._descriptor = fail, descriptor

    def fileno(self):
        if self.failed.is_set():
            return self._descriptor
        self.failed.set()
        return self._fail()


@pytest.fixture
def pipe():
    reading, writing = os.pipe()
    yield SimpleNamespace(reading=reading, writing=writing)
    os.close(reading)
    os.close(writing)


@pytest.fixture
def broken():
    reading, writing = os.pipe()
    os.close(reading)
    yield writing
    os.close(writing)


def come(reading, count):
    data = b""
    while len(data) < count and select.select([reading], [], [], AWAITED_S)[0]:
        data += os.read(reading, count)
    return data


def closed():
    raise ValueError("I/O operation on closed file")


@pytest.mark.parametrize("how", ["nobody reads it", "the disk is full", "it is closed"])
def test_lines_are_read_after_stderr_has_failed(tmp_path, monkeypatch, pipe, broken, how):
    with open("/dev/full", "wb") as full:
        stderr = Stderr(
            {"nobody reads it": lambda: broken, "the disk is full": full.fileno, "it is closed": closed}[how],
            pipe.writing,
        )
        monkeypatch.setattr(sys, "stderr", stderr)
        with log_pipe(tmp_path / "log") as path, open(path, "wb", buffering=0) as log:
            log.write(b"lost\n")
            assert stderr.failed.wait(AWAITED_S)
            log.write(b"read\n")
            assert come(pipe.reading, 5) == b"read\n"


def test_all_of_a_line_is_written_where_stderr_takes_parts(tmp_path, monkeypatch, pipe):
    write = os.write
    monkeypatch.setattr(sys, "stderr", SimpleNamespace(fileno=lambda: pipe.writing))
    monkeypatch.setattr(os, "write", lambda to, data: write(to, data[:3] if to == pipe.writing else data))
    with log_pipe(tmp_path / "log") as path, open(path, "wb", buffering=0) as log:
        log.write(b"a whole line\n")
        assert come(pipe.reading, 13) == b"a whole line\n"
