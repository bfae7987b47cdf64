"""Reads what stands before the weights in a GGUF file, metadata and the table of tensors, and checks every bound.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. The `gguf` package's own reader makes NumPy arrays of
every string of a vocabulary, which takes seconds; importing the package alone takes a tenth of one.
"""

from __future__ import annotations

import mmap
import os
import struct
from pathlib import Path
from typing import Any, NamedTuple

from pagemill.errors import CorruptWeightsError, UnsupportedModelError

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_MOST_DEPTH = 8
"""Arrays may lie so deep in each other; no known key has one in another."""
_LENGTH = struct.Struct("<Q")
_VERSIONS = (2, 3)


class TensorEntry(NamedTuple):
    """Describes a tensor as the table does. shape: rows first. begin: in bytes, in the part that holds the weights."""

    name: str
    shape: tuple[int, ...]
    kind: int
    begin: int


class GGUFHeader:
    """Holds a file's metadata, every key with a Python value, and the entries of its table of tensors.

    nbytes: the bytes before the weights, without what pads them. Raises UnsupportedModelError (version, byte order) or
    CorruptWeightsError.
    """

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self._path, self._data, self._size = path, data, len(data)
        if self._size < 24:
            raise self.corrupt(f"it has {self._size} bytes, fewer than a header")
        magic = bytes(data[:4])
        version, tensor_count, key_count = struct.unpack_from("<IQQ", data, 4)
        if magic != b"GGUF":
            raise self.corrupt(f"it begins with {magic!r} instead of b'GGUF'")
        if version not in _VERSIONS:
            raise UnsupportedModelError(f"{path} is GGUF version {version} (or big-endian); supported are 2 and 3")
        self.nbytes = 24
        self.metadata: dict[str, Any] = {}
        for _ in range(key_count):
            key = self._string()
            self.metadata[key] = self._value(self._scalar("I"))
        self.entries = [self._entry() for _ in range(tensor_count)]

    @classmethod
    def of(cls, path: Path) -> GGUFHeader:
        """Returns the header of a file that nobody has mapped."""
        with path.open("rb") as file:
            if not os.fstat(file.fileno()).st_size:
                raise CorruptWeightsError(f"{path} is truncated or corrupt: it is empty; download it again")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return cls(path, data)

    def corrupt(self, what: str) -> CorruptWeightsError:
        return CorruptWeightsError(f"{self._path} is truncated or corrupt: {what}; download it again")

    def _entry(self) -> TensorEntry:
        name, dimensions = self._string(), self._scalar("I")
        if dimensions > 4:
            raise self.corrupt(f"tensor {name!r} has {dimensions} dimensions, over 4")
        return TensorEntry(name, self._scalars("Q", dimensions)[::-1], self._scalar("I"), self._scalar("Q"))

    def _value(self, kind: int, depth: int = 0) -> Any:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            item, count = self._scalar("I"), self._scalar("Q")
            if item in _SCALARS:
                return list(self._scalars(_SCALARS[item], count))
            if count > self._size:
                raise self.corrupt(f"an array claims {count} elements")
            if item == _STRING:
                return [self._string() for _ in range(count)]
            if depth == _MOST_DEPTH:
                raise self.corrupt(f"arrays lie more than {_MOST_DEPTH} deep in each other")
            return [self._value(item, depth + 1) for _ in range(count)]
        if kind not in _SCALARS:
            raise self.corrupt(f"a metadata value has the unknown type {kind}")
        return self._scalar(_SCALARS[kind])

    def _scalar(self, code: str) -> Any:
        return self._scalars(code, 1)[0]

    def _scalars(self, code: str, count: int) -> tuple[Any, ...]:
        begin = self._take(struct.calcsize("<" + code) * count)
        return struct.unpack_from(f"<{count}{code}", self._data, begin)

    def _string(self) -> str:
        (length,) = _LENGTH.unpack_from(self._data, self._take(8))
        begin = self._take(length)
        try:
            return self._data[begin : begin + length].decode()
        except UnicodeDecodeError as error:
            raise self.corrupt(f"a text at byte {begin} is not UTF-8 ({error})") from error

    def _take(self, count: int) -> int:
        begin = self.nbytes
        if begin + count > self._size:
            raise self.corrupt(f"its header needs {count} bytes at {begin}, but it has {self._size}")
        self.nbytes += count
        return begin
