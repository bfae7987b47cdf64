"""Reads the GGUF container, metadata and tensor table, and checks every bound.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. The `gguf` package's own reader makes NumPy arrays of
every string of a vocabulary, which takes seconds; importing the package alone takes a tenth of one.
"""

from __future__ import annotations

import itertools
import math
import struct
from typing import Any, NamedTuple

from pagemill.errors import CorruptWeightsError, UnsupportedModelError
from pagemill.models.loading.checkpoint import MappedFile, TensorInfo

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_MOST_DEPTH = 8
"""Arrays may lie so deep in each other; no known key has one in another."""
_LENGTH = struct.Struct("<Q")
_VERSIONS = (2, 3)


class Format(NamedTuple):
    """Describes how a tensor is stored: `number` in the file, `block` weights in `nbytes` bytes."""

    number: int
    name: str
    block: int
    nbytes: int


FORMATS = {
    form.name: form
    for form in (
        Format(0, "F32", 1, 4), Format(1, "F16", 1, 2), Format(30, "BF16", 1, 2), Format(28, "F64", 1, 8),
        Format(24, "I8", 1, 1), Format(25, "I16", 1, 2), Format(26, "I32", 1, 4), Format(27, "I64", 1, 8),
        Format(2, "Q4_0", 32, 18), Format(3, "Q4_1", 32, 20), Format(6, "Q5_0", 32, 22), Format(7, "Q5_1", 32, 24),
        Format(8, "Q8_0", 32, 34), Format(9, "Q8_1", 32, 40),
        Format(10, "Q2_K", 256, 84), Format(11, "Q3_K", 256, 110), Format(12, "Q4_K", 256, 144),
        Format(13, "Q5_K", 256, 176), Format(14, "Q6_K", 256, 210), Format(15, "Q8_K", 256, 292),
        Format(16, "IQ2_XXS", 256, 66), Format(17, "IQ2_XS", 256, 74), Format(22, "IQ2_S", 256, 82),
        Format(18, "IQ3_XXS", 256, 98), Format(21, "IQ3_S", 256, 110), Format(19, "IQ1_S", 256, 50),
        Format(29, "IQ1_M", 256, 56), Format(20, "IQ4_NL", 32, 18), Format(23, "IQ4_XS", 256, 136),
        Format(34, "TQ1_0", 256, 54), Format(35, "TQ2_0", 256, 66), Format(39, "MXFP4", 32, 17),
        Format(40, "NVFP4", 64, 36), Format(41, "Q1_0", 128, 18),
    )
}  # fmt: skip


_BY_NUMBER = {form.number: form for form in FORMATS.values()}


class GGUFFile:
    """Holds a file's metadata, every key with a Python value, and its tensors by name.

    Raises UnsupportedModelError (version, byte order, tensor format) or CorruptWeightsError.
    """

    def __init__(self, file: MappedFile) -> None:
        self._file, self._path, self._size = file, file.path, file.size
        if self._size < 24:
            raise self._corrupt(f"it has {self._size} bytes, fewer than a header")
        self._data = file.data
        self._at = 0
        self.metadata, self.tensors = self._read()
        file.forget(self._at)

    def _read(self) -> tuple[dict[str, Any], dict[str, TensorInfo]]:
        magic = bytes(self._data[:4])
        version, tensor_count, key_count = struct.unpack_from("<IQQ", self._data, 4)
        if magic != b"GGUF":
            raise self._corrupt(f"it begins with {magic!r} instead of b'GGUF'")
        if version not in _VERSIONS:
            raise UnsupportedModelError(
                f"{self._path} is GGUF version {version} (or big-endian); supported are 2 and 3"
            )
        self._at = 24
        metadata: dict[str, Any] = {}
        for _ in range(key_count):
            key = self._string()
            metadata[key] = self._value(self._scalar("I"))
        entries = []
        for _ in range(tensor_count):
            name, dimensions = self._string(), self._scalar("I")
            if dimensions > 4:
                raise self._corrupt(f"tensor {name!r} has {dimensions} dimensions, over 4")
            entries.append((name, tuple(self._scalars("Q", dimensions))[::-1], self._scalar("I"), self._scalar("Q")))
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1:
            raise self._corrupt(f"general.alignment is {alignment!r}")
        start = -(-self._at // alignment) * alignment
        tensors: dict[str, TensorInfo] = {}
        covered = start
        for name, shape, kind, offset in entries:
            if name in tensors:
                raise self._corrupt(f"tensor {name!r} is there twice")
            tensors[name] = tensor = self._tensor(name, shape, kind, start + offset)
            if offset % alignment:
                raise self._corrupt(
                    f"tensor {name!r} begins at byte {offset} of the data, not a multiple of {alignment}"
                )
            covered = max(covered, tensor.begin + tensor.nbytes)
        for before, after in itertools.pairwise(sorted(tensors, key=lambda name: tensors[name].begin)):
            if tensors[after].begin < tensors[before].begin + tensors[before].nbytes:
                raise self._corrupt(f"tensors {before!r} and {after!r} overlap")
        if covered > self._size:
            raise self._corrupt(f"it has {self._size} bytes, but its tensors need {covered}")
        return metadata, tensors

    def _tensor(self, name: str, shape: tuple[int, ...], kind: int, begin: int) -> TensorInfo:
        form = _BY_NUMBER.get(kind)
        if form is None:
            raise UnsupportedModelError(
                f"tensor {name!r} in {self._path} has the unknown format {kind}: the file is corrupt, or newer than "
                f"this program; download it again, or take another quantization"
            )
        if not shape or shape[-1] % form.block:
            raise self._corrupt(
                f"tensor {name!r} has shape {list(shape)}, whose rows are not whole blocks of {form.block} "
                f"({form.name})"
            )
        nbytes = math.prod(shape) // form.block * form.nbytes
        return TensorInfo(shape, form.name, nbytes, self._file, begin)

    def _value(self, kind: int, depth: int = 0) -> Any:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            item, count = self._scalar("I"), self._scalar("Q")
            if item in _SCALARS:
                return list(self._scalars(_SCALARS[item], count))
            if count > self._size:
                raise self._corrupt(f"an array claims {count} elements")
            if item == _STRING:
                return [self._string() for _ in range(count)]
            if depth == _MOST_DEPTH:
                raise self._corrupt(f"arrays lie more than {_MOST_DEPTH} deep in each other")
            return [self._value(item, depth + 1) for _ in range(count)]
        if kind not in _SCALARS:
            raise self._corrupt(f"a metadata value has the unknown type {kind}")
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
            raise self._corrupt(f"a text at byte {begin} is not UTF-8 ({error})") from error

    def _take(self, count: int) -> int:
        begin = self._at
        if begin + count > self._size:
            raise self._corrupt(f"its header needs {count} bytes at {begin}, but it has {self._size}")
        self._at += count
        return begin

    def _corrupt(self, what: str) -> CorruptWeightsError:
        return CorruptWeightsError(f"{self._path} is truncated or corrupt: {what}; download it again")
