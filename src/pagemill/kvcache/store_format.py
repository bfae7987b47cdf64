"""The format of a disk store: what all its blocks have in common, and how one lies in its file, behind a header that
says which it is, and a checksum over both."""

from __future__ import annotations

import hashlib
import json
import re
import struct
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import numpy as np
import xxhash
from numpy.typing import NDArray

from pagemill.hub.registry import cache_dir
from pagemill.kvcache.pages import PAGE_BYTES
from pagemill.memory.work import BlockName

VERSION = 1
_PATTERNS = {
    "fingerprint": "([0-9a-f]{2})+",
    "kv_format": "[^,]+,[1-9][0-9]{0,5}(,.*)?",
    "record_bytes": "[1-9][0-9]{0,9}",
}

_HEADER = struct.Struct("<8s32s32sII")  # magic, digest, parent, group, depth; then the checksum
_CHECKSUM_BYTES = 8
_MAGIC = b"pmillKV1"
HEADER_BYTES = _HEADER.size
HEAD_BYTES = HEADER_BYTES + _CHECKSUM_BYTES


def default_root() -> Path:
    """Returns the folder of this user's stores, unless another is asked for."""
    return cache_dir() / "kv"


@dataclass(frozen=True, slots=True)
class StoreFormat:
    """Names what all blocks of a store have in common. Every field but `model`, which is for people, keeps stores
    apart.

    fingerprint: digest of the model's weights and configuration, hexadecimal; kv_format: dtype, block size and layout;
    numerics: names of the kernels; record_bytes: K and V of one block of one layer group.
    """

    model: str
    fingerprint: str
    kv_format: str
    numerics: str
    record_bytes: int
    version: int = VERSION

    def __str__(self) -> str:
        model = f"{self.model} (weights {self.fingerprint[:8]}…)"
        return f"{model} in {self.kv_format} by {self.numerics}, {self.record_bytes:,} bytes each"

    @property
    def key(self) -> str:
        """Name of the store's folder."""
        apart = asdict(self)
        del apart["model"]
        return hashlib.sha256(json.dumps(apart, sort_keys=True).encode()).hexdigest()[:24]

    @property
    def block_size(self) -> int:
        """Tokens of a block, the second field of `kv_format`."""
        return int(self.kv_format.split(",")[1])

    def to_json(self) -> str:
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> StoreFormat:
        """Parses what `to_json` gives. Raises ValueError for other text, and for a format of another version."""
        values = json.loads(text)
        types = {field.name: field.type for field in fields(cls)}
        if not isinstance(values, dict) or {name: type(value).__name__ for name, value in values.items()} != types:
            raise ValueError(f"a format has these fields and no others: {types}")
        format = cls(**values)
        if format.version != VERSION:
            raise ValueError(f"its version is {format.version}, and this pagemill knows {VERSION}")
        for name, pattern in _PATTERNS.items():
            if not re.fullmatch(pattern, str(values[name])):
                raise ValueError(f"its {name} is {values[name]!r}")
        return format


class Slots:
    """Lays out slots of equal size, whole pages: `head_bytes`, which end with zeros, then a record of
    `record_bytes`."""

    def __init__(self, record_bytes: int) -> None:
        self.nbytes = -(-(HEAD_BYTES + record_bytes) // PAGE_BYTES) * PAGE_BYTES
        self.head_bytes = self.nbytes - record_bytes

    def head(self, name: BlockName, record: NDArray[np.uint8]) -> bytes:
        """Returns the bytes that lie before a block's record."""
        return head_of(name, record).ljust(self.head_bytes, b"\0")

    def block_in(self, image: bytes) -> tuple[BlockName, NDArray[np.uint8]] | None:
        """Returns the name of the block that a slot holds, and its record; None if they are not whole."""
        head, record = np.split(np.frombuffer(image, dtype=np.uint8), [self.head_bytes])
        name = name_in(image)
        return (name, record) if name is not None and is_whole(head, record, name.digest, name.group) else None


def head_of(name: BlockName, record: NDArray[np.uint8]) -> bytes:
    """Returns HEAD_BYTES: a block's header, and the checksum over it and the record."""
    fields = _HEADER.pack(_MAGIC, name.digest, name.parent, name.group, name.depth)
    return fields + _checksum(fields, record)


def name_in(head: bytes) -> BlockName | None:
    """Returns the name in a slot's first HEADER_BYTES, without a check; None if nothing was written there."""
    magic, digest, parent, group, depth = _HEADER.unpack_from(head)
    return BlockName(digest, group, parent, depth) if magic == _MAGIC else None


def is_whole(head: NDArray[np.uint8], record: NDArray[np.uint8], digest: bytes, group: int) -> bool:
    """Returns whether head and record are what was written of this block, to the bit. record: [record_bytes], or
    [pieces, piece bytes]."""
    raw = head[:HEAD_BYTES].tobytes()
    name = name_in(raw)
    if name is None or (name.digest, name.group) != (digest, group):
        return False
    return raw[HEADER_BYTES:] == _checksum(raw[:HEADER_BYTES], record)


def _checksum(fields: bytes, record: NDArray[np.uint8]) -> bytes:
    checksum = xxhash.xxh3_64(fields)
    for piece in record.reshape(1, -1) if record.ndim == 1 else record:
        checksum.update(piece.data)
    return checksum.digest()
