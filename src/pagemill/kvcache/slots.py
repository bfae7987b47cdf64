"""Slots: how a block lies in a store's file, behind a header that says which it is, and a checksum over both."""

from __future__ import annotations

import struct

import numpy as np
import xxhash
from numpy.typing import NDArray

from pagemill.kvcache.layout import PAGE_BYTES
from pagemill.memory.work import BlockName

_HEADER = struct.Struct("<8s32s32sII")  # magic, digest, parent, group, depth; then the checksum
_CHECKSUM_BYTES = 8
_MAGIC = b"pmillKV1"
HEADER_BYTES = _HEADER.size


class Slots:
    """Of equal size, whole pages: `head_bytes`, which end with zeros, then a record of `record_bytes`."""

    def __init__(self, record_bytes: int) -> None:
        self.nbytes = -(-(_HEADER.size + _CHECKSUM_BYTES + record_bytes) // PAGE_BYTES) * PAGE_BYTES
        self.head_bytes = self.nbytes - record_bytes

    def head(self, name: BlockName, record: NDArray[np.uint8]) -> bytes:
        """What lies before a block's record."""
        fields = _HEADER.pack(_MAGIC, name.digest, name.parent, name.group, name.depth)
        return (fields + _checksum(fields, record)).ljust(self.head_bytes, b"\0")

    def block_in(self, image: bytes) -> tuple[BlockName, NDArray[np.uint8]] | None:
        """Whose block a slot holds, and its record; None if they are not whole."""
        head, record = np.split(np.frombuffer(image, dtype=np.uint8), [self.head_bytes])
        name = name_in(image)
        return (name, record) if name is not None and is_whole(head, record, name.digest, name.group) else None


def name_in(head: bytes) -> BlockName | None:
    """Whose slot it is, by its first HEADER_BYTES, which nothing vouches for; None if nothing was written there."""
    magic, digest, parent, group, depth = _HEADER.unpack_from(head)
    return BlockName(digest, group, parent, depth) if magic == _MAGIC else None


def is_whole(head: NDArray[np.uint8], record: NDArray[np.uint8], digest: bytes, group: int) -> bool:
    """Whether head and record are what was written of this block, to the bit."""
    raw = head[: _HEADER.size + _CHECKSUM_BYTES].tobytes()
    name = name_in(raw)
    if name is None or (name.digest, name.group) != (digest, group):
        return False
    return raw[_HEADER.size :] == _checksum(raw[: _HEADER.size], record)


def _checksum(fields: bytes, record: NDArray[np.uint8]) -> bytes:
    checksum = xxhash.xxh3_64(fields)
    checksum.update(record.data)
    return checksum.digest()
