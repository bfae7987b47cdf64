"""Digests of weight files: every byte counts, and each file is read for them once."""

import hashlib
import os
import random

import pytest
import xxhash

from pagemill.models.loading import file_digest as digests
from pagemill.models.loading.checkpoint import MappedFile
from pagemill.models.loading.file_digest import file_digest
from pagemill.models.loading.pieces import piece_threads

MIB = 1 << 20


@pytest.fixture
def read(monkeypatch, tmp_path):
    """The files that were read for their digests."""
    monkeypatch.setenv("PAGEMILL_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(digests, "LEAST_KEPT_BYTES", 1000)
    monkeypatch.setattr(digests, "SETTLED_NS", -1)
    files, reading = [], digests.digest_of
    monkeypatch.setattr(digests, "digest_of", lambda file: files.append(file) or reading(file))
    return files


def file_of(path, content: bytes) -> MappedFile:
    path.write_bytes(content)
    return MappedFile(path)


def test_a_digest_is_of_every_byte_however_many_threads_read_it(tmp_path):
    content = bytearray(random.Random(1).randbytes(18 * MIB + 5))
    parts = [xxhash.xxh3_128_digest(content[begin : begin + 16 * MIB]) for begin in (0, 16 * MIB)]
    with piece_threads():
        assert file_digest(file_of(tmp_path / "w", content)) == hashlib.sha256(b"".join(parts)).digest()
    seen = {file_digest(MappedFile(tmp_path / "w"))}
    for place in (0, 7 * MIB + 123, 16 * MIB - 1, 16 * MIB, len(content) - 1):
        content[place] ^= 1
        seen.add(file_digest(file_of(tmp_path / "w", content)))
    assert len(seen) == 6


def test_a_file_is_read_once_until_it_is_another(tmp_path, read):
    path = tmp_path / "w"
    first = file_digest(file_of(path, bytes(5000)))
    assert file_digest(MappedFile(path)) == first
    assert len(read) == 1
    kept = path.stat()
    with path.open("r+b") as file:
        file.write(b"\1")
    os.utime(path, ns=(kept.st_atime_ns, kept.st_mtime_ns))
    second = file_digest(MappedFile(path))
    assert second != first
    other = tmp_path / "other"
    other.write_bytes(bytes(5000))
    other.rename(path)
    assert file_digest(MappedFile(path)) == first
    assert len(read) == 3
    assert [path.name for path in (tmp_path / "home" / "digests").iterdir()] == [
        f"{hashlib.sha256(str(path).encode()).hexdigest()[:32]}.json"
    ]


def test_what_was_written_just_now_is_read_again(tmp_path, read, monkeypatch):
    monkeypatch.setattr(digests, "SETTLED_NS", 3600 * 10**9)
    file = file_of(tmp_path / "w", bytes(5000))
    assert file_digest(file) == file_digest(file)
    assert len(read) == 2


@pytest.mark.parametrize("damage", [b"", b"{", b"[]", b'{"file": 1}', b"\xff", "digest"])
def test_a_damaged_entry_is_made_again(tmp_path, read, damage):
    file = file_of(tmp_path / "w", bytes(5000))
    first = file_digest(file)
    (entry,) = (tmp_path / "home" / "digests").iterdir()
    entry.write_bytes(entry.read_bytes().replace(first[1:].hex().encode(), b"") if damage == "digest" else damage)
    assert [file_digest(file), file_digest(file)] == [first, first]
    assert len(read) == 2


def test_where_nothing_can_be_kept_files_are_read_each_time(tmp_path, read, caplog):
    (tmp_path / "home").write_text("no folder")
    file = file_of(tmp_path / "w", bytes(5000))
    assert file_digest(file) == file_digest(file)
    assert len(read) == 2
    assert "is not kept in" in caplog.text
