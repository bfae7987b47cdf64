"""CompressedStore: the host tier with blocks that take less memory and come back to the bit.

Of a floating-point number's bytes, that with sign and exponent differs little within a block, and the others look like
chance. So the first bytes of all elements are put together, then all second ones and so on, before zstd.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import zstandard
from numpy.typing import NDArray

from pagemill.kvcache.host_store import HostTier
from pagemill.kvcache.lower_tiers import Spill
from pagemill.kvcache.records import Places, Records
from pagemill.memory.work import BlockName

ENTRY_BYTES = 512
"""What a block takes besides its content: names, and a place in the order of use."""
LEVEL = 1
"""Of zstd. Higher ones take twice as long and more, and save nothing more of such bytes."""


class CompressedStore(HostTier[bytes, tuple[bytes, BlockName]]):
    """A LowerTier. Thread-safe. What was used longest ago makes room.

    limit_bytes: what contents take, compressed, with ENTRY_BYTES each; itemsize: of a record's elements.
    """

    def __init__(self, limit_bytes: int, itemsize: int) -> None:
        super().__init__()
        self.capacity = limit_bytes // ENTRY_BYTES
        self._limit = limit_bytes
        self._itemsize = itemsize
        self._bytes = 0
        self._compressor = zstandard.ZstdCompressor(LEVEL)

    def read(self, blocks: Sequence[tuple[bytes, int]], out: Places) -> list[bool]:
        with self._lock:
            held = [self._held.get(block, self._leaving.get(block)) for block in blocks]
        for row, entry in enumerate(held):
            if entry is not None:
                out[row][:] = self._unpack(entry[0]).reshape(out[row].shape)
        return [entry is not None for entry in held]

    def write(self, names: Sequence[BlockName], records: Records, spill: Spill) -> None:
        for name, record in zip(names, records, strict=True):
            if name[:2] not in self._held:
                content = self._pack(record)  # before the lock, for which others would wait
                with self._lock:
                    self._put(name, content)
        try:
            if self._leaving:
                leaving = list(self._leaving.values())
                spill([name for _, name in leaving], [self._unpack(content) for content, _ in leaving])
        finally:
            with self._lock:
                self._leaving.clear()

    def close(self) -> None:
        """Nothing is left to do."""

    def _put(self, name: BlockName, content: bytes) -> None:
        self._bytes += len(content) + ENTRY_BYTES
        while self._held and self._bytes > self._limit:
            block, old = self._held.popitem(last=False)
            self._leaving[block] = old
            self._bytes -= len(old[0]) + ENTRY_BYTES
        self._held[name[:2]] = content, name

    def _pack(self, record: NDArray[np.uint8]) -> bytes:
        planes = np.ascontiguousarray(record.reshape(-1, self._itemsize).T)
        packed: bytes = self._compressor.compress(planes.data)
        return packed

    def _unpack(self, content: bytes) -> NDArray[np.uint8]:
        planes = np.frombuffer(zstandard.ZstdDecompressor().decompress(content), dtype=np.uint8)
        return np.ascontiguousarray(planes.reshape(self._itemsize, -1).T).reshape(-1)
