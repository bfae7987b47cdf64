"""Writes packed weights to a file, and maps them: processes that map the same file have one copy in memory.

The file has parts, each at a multiple of 4096 bytes, then an index in JSON, then a trailer, which has a checksum of the
index. The index names the parts and has a checksum of each 8 MiB of them.

Bytes go to the file in pieces of 8 MiB, which lie in whole huge pages of the system's cache where the file system has
such. A mapping that asks for huge pages then has them: decoding from small ones takes 2 to 4 % longer.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import struct
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray
from torch import Tensor

from pagemill.models.loading.pieces import each_piece
from pagemill.ops.cpu_ops import DTYPES, CpuLinear
from pagemill.ops.interface import Linear

PIECE = 8 << 20
_PAGE = 4096
_MAGIC = b"pmillW1\0"
TRAILER = struct.Struct("<8sQQ8s")
"""Magic, where the index begins, its bytes, its checksum."""
_DTYPES = {code: dtype for dtype, code in DTYPES.items()}


class DamagedWeightsError(ValueError):
    """A file of packed weights that is not what was written, or not for this model."""


class PackedWriter:
    """Implements `Keep`: makes each part and writes it to a file; what it returns is of no use but for its sizes.

    file: an empty one. reserve: called with the bytes that the file is about to have; once it returns False, nothing
    more is written, and bytes are only counted.
    """

    checked = False

    def __init__(self, file: int, reserve: Callable[[int], bool]) -> None:
        self._file, self._reserve, self._fits = file, reserve, True
        self._buffer = memoryview(bytearray(PIECE))
        self._filled = self._written = 0
        self._checksums: list[str] = []
        self._parts: dict[str, Any] = {}

    def linear(self, name: str, make: Callable[[], Linear]) -> Linear:
        layer = make()
        assert isinstance(layer, CpuLinear)
        numbers, arrays = layer.parts()
        self._parts[name] = [numbers, [None if array is None else self._put(array) for array in arrays]]
        return _Written(layer.in_features, layer.out_features)

    def tensor(self, name: str, make: Callable[[], Tensor]) -> Tensor:
        tensor = make()
        content = tensor.contiguous().view(torch.uint8).numpy().reshape(-1)
        self._parts[name] = [DTYPES[tensor.dtype], [*tensor.shape], self._put(content)]
        return tensor.new_empty(0)

    def finish(self, key: str) -> int:
        """Writes the index, and waits until the disk has all. Returns the bytes of the whole file. Raises OSError."""
        self._flush()
        index = json.dumps({"key": key, "checksums": self._checksums, "parts": self._parts}).encode()
        trailer = TRAILER.pack(_MAGIC, self._written, len(index), xxhash.xxh3_64_digest(index))
        self._write(index + trailer)
        os.fsync(self._file)
        return self._written

    def _put(self, content: NDArray[np.uint8]) -> list[int]:
        """Returns where it lies in the file, and its bytes."""
        self._append(memoryview(bytes(-self._filled % _PAGE)))
        begin = self._written + self._filled
        self._append(content.data)
        return [begin, content.nbytes]

    def _append(self, content: memoryview) -> None:
        while len(content):
            count = min(len(content), PIECE - self._filled)
            self._buffer[self._filled : self._filled + count] = content[:count]
            content = content[count:]
            self._filled += count
            if self._filled == PIECE:
                self._flush()

    def _flush(self) -> None:
        piece = self._buffer[: self._filled]
        self._checksums.append(xxhash.xxh3_64_hexdigest(piece))
        self._write(piece)
        self._filled = 0

    def _write(self, content: bytes | memoryview) -> None:
        self._written += len(content)
        self._fits = self._fits and self._reserve(self._written)
        if self._fits:
            _write(self._file, content)


class PackedFile:
    """Implements `Keep`: gives the parts of a file where they lie in its mapping. nbytes: of the mapping.

    Reads all of the file. Raises OSError, and DamagedWeightsError unless each byte is as written, under this key.
    """

    checked = True

    def __init__(self, path: Path, key: str) -> None:
        with path.open("rb") as file:
            self.nbytes = os.fstat(file.fileno()).st_size
            if self.nbytes < TRAILER.size:
                raise DamagedWeightsError(f"it has {self.nbytes} bytes, fewer than the {TRAILER.size} of its end")
            mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        with suppress(AttributeError, OSError):  # small pages do as well
            mapping.madvise(mmap.MADV_HUGEPAGE)
        self._bytes = np.frombuffer(mapping, dtype=np.uint8)
        index, self._end = self._read_index()
        if index.get("key") != key:
            raise DamagedWeightsError("it was made for another model, or by another version")
        self._parts = index["parts"]
        self._verify(index["checksums"])

    def linear(self, name: str, make: Callable[[], Linear]) -> Linear:
        with _reading(name):
            numbers, places = self._parts[name]
            return CpuLinear.of_parts(numbers, [None if place is None else self._at(*place) for place in places])

    def tensor(self, name: str, make: Callable[[], Tensor]) -> Tensor:
        with _reading(name), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it is read-only, and nothing writes to it
            code, shape, place = self._parts[name]
            content, dtype = self._at(*place), _DTYPES[code]
            if content.nbytes != math.prod(shape) * dtype.itemsize:
                raise ValueError(f"it has {content.nbytes} bytes, but the shape {shape} of {dtype}")
            return torch.from_numpy(content).view(dtype).view(shape)

    def _read_index(self) -> tuple[dict[str, Any], int]:
        """Returns the index, and where the parts end."""
        end = self.nbytes - TRAILER.size
        magic, begin, nbytes, checksum = TRAILER.unpack(self._bytes[end:].tobytes())
        if magic != _MAGIC or begin + nbytes != end:
            raise DamagedWeightsError("its end is not where it should be")
        content = self._bytes[begin:end].tobytes()
        if xxhash.xxh3_64_digest(content) != checksum:
            raise DamagedWeightsError("its index is damaged")
        index: dict[str, Any] = json.loads(content)
        return index, begin

    def _verify(self, checksums: list[str]) -> None:
        def check(begin: int, end: int) -> None:
            if xxhash.xxh3_64_hexdigest(self._bytes[begin:end].data) != checksums[begin // PIECE]:
                raise DamagedWeightsError(f"its bytes {begin} to {end} are damaged")

        if len(checksums) != -(-self._end // PIECE):
            raise DamagedWeightsError(f"it has {self._end} bytes of parts, but {len(checksums)} checksums")
        each_piece(self._end, PIECE, check)

    def _at(self, begin: int, nbytes: int) -> NDArray[np.uint8]:
        """Returns these bytes, or those of them that the file has; whoever takes them checks how many they are."""
        return self._bytes[begin : begin + nbytes]


@contextmanager
def _reading(name: str) -> Iterator[None]:
    try:
        yield
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise DamagedWeightsError(f"its part {name!r} cannot be used: {error}") from error


class _Written:
    """Stands for a layer that was written to a file."""

    def __init__(self, in_features: int, out_features: int) -> None:
        self.in_features, self.out_features = in_features, out_features

    def __call__(self, x: Tensor) -> Tensor:
        raise TypeError("a layer that was written has to be mapped first")

    def rows(self, ids: Tensor) -> Tensor:
        raise TypeError("a layer that was written has to be mapped first")


def _write(file: int, content: bytes | memoryview) -> None:
    view = memoryview(content)
    while len(view):
        view = view[os.write(file, view) :]
