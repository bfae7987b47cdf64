"""Blocks for the tests of stores on disk: block i of one long chain, with a content that follows from i."""

import hashlib
from functools import cache

import numpy as np

from pagemill.kvcache.disk_store import DiskStore
from pagemill.kvcache.store_format import StoreFormat
from pagemill.memory.work import BlockName

RECORD = 5000
FORMAT = StoreFormat("test", "ab" * 32, "float32,16", "reference", RECORD)
ROOT = bytes(32)


def digest_of(i: int) -> bytes:
    return hashlib.sha256(str(i).encode()).digest()


def name_of(i: int, group: int = 0) -> BlockName:
    return BlockName(digest_of(i), group, digest_of(i - 1) if i else ROOT, i)


@cache
def content(i: int, group: int = 0) -> np.ndarray:
    bytes = np.random.default_rng([i, group]).integers(0, 256, RECORD, dtype=np.uint8)
    bytes.flags.writeable = False
    return bytes


def store_of(path, blocks: int = 1000) -> DiskStore:
    return DiskStore(path, FORMAT, blocks * 8192)


def write(store: DiskStore, indices, group: int = 0) -> int:
    return store.write([name_of(i, group) for i in indices], [content(i, group) for i in indices])


def read(store: DiskStore, indices, group: int = 0) -> list[int]:
    """Those that were found. What was found must be right."""
    out = np.full((len(indices), RECORD), 0xA5, dtype=np.uint8)
    found = store.read([(digest_of(i), group) for i in indices], out)
    for row, i in enumerate(indices):
        if found[row]:
            np.testing.assert_array_equal(out[row], content(i, group))
    return [i for i, whole in zip(indices, found, strict=True) if whole]


def write_frames(pool, frames, records: np.ndarray) -> None:
    """The reverse of `pool.frames.read`."""
    with pool.frames.write(frames) as places:
        for place, record in zip(places, records, strict=True):
            place[:] = record.reshape(place.shape)
