"""The GGUF container: metadata and tensor table, read with every bound checked.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. The `gguf` package's own reader makes NumPy arrays of
every string of a vocabulary, which takes seconds.
"""

from __future__ import annotations

import itertools
import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from pagemill.errors import CorruptWeightsError, ModelNotFoundError, UnsupportedModelError

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_VERSIONS = (2, 3)


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """shape: rows first (the file stores it the other way round); begin, nbytes: place in the file."""

    name: str
    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    begin: int
    nbytes: int


class GGUFFile:
    """metadata: every key of the file, strings and arrays as Python values; tensors by name.

    Raises ModelNotFoundError, UnsupportedModelError (version, byte order, tensor format) or CorruptWeightsError.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                self._size = file.seek(0, 2)
                if self._size < 24:
                    raise self._corrupt(f"it has {self._size} bytes, fewer than a header")
                self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except FileNotFoundError:
            raise ModelNotFoundError(f"there is no file {path}; check the path, or download the model again") from None
        except OSError as error:
            raise ModelNotFoundError(f"{path} can not be read: {error}") from error
        self._at = 0
        try:
            self.metadata, self.tensors = self._read()
        finally:
            self._data.close()

    def _read(self) -> tuple[dict[str, Any], dict[str, GGUFTensor]]:
        magic = bytes(self._data[:4])
        version, tensor_count, key_count = struct.unpack_from("<IQQ", self._data, 4)
        if magic != b"GGUF":
            raise self._corrupt(f"it begins with {magic!r} instead of b'GGUF'")
        if version not in _VERSIONS:
            raise UnsupportedModelError(f"{self.path} is GGUF version {version} (or big-endian); supported are 2 and 3")
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
        tensors: dict[str, GGUFTensor] = {}
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
        ordered = sorted(tensors.values(), key=lambda tensor: tensor.begin)
        for before, after in itertools.pairwise(ordered):
            if after.begin < before.begin + before.nbytes:
                raise self._corrupt(f"tensors {before.name!r} and {after.name!r} overlap")
        if covered > self._size:
            raise self._corrupt(f"it has {self._size} bytes, but its tensors need {covered}")
        return metadata, tensors

    def _tensor(self, name: str, shape: tuple[int, ...], kind: int, begin: int) -> GGUFTensor:
        try:
            quantization = GGMLQuantizationType(kind)
        except ValueError:
            raise UnsupportedModelError(
                f"tensor {name!r} in {self.path} has the unknown format {kind}: the file is corrupt, or newer than "
                f"this program; download it again, or take another quantization"
            ) from None
        block, size = GGML_QUANT_SIZES[quantization]
        if not shape or shape[-1] % block:
            raise self._corrupt(
                f"tensor {name!r} has shape {list(shape)}, whose rows are not whole blocks of {block} "
                f"({quantization.name})"
            )
        return GGUFTensor(name, shape, quantization, begin, math.prod(shape) // block * size)

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            item, count = self._scalar("I"), self._scalar("Q")
            if item in _SCALARS:
                return list(self._scalars(_SCALARS[item], count))
            if count > self._size:
                raise self._corrupt(f"an array claims {count} elements")
            return [self._value(item) for _ in range(count)]
        if kind not in _SCALARS:
            raise self._corrupt(f"a metadata value has the unknown type {kind}")
        return self._scalar(_SCALARS[kind])

    def _scalar(self, code: str) -> Any:
        return self._scalars(code, 1)[0]

    def _scalars(self, code: str, count: int) -> tuple[Any, ...]:
        begin = self._take(struct.calcsize("<" + code) * count)
        return struct.unpack_from(f"<{count}{code}", self._data, begin)

    def _string(self) -> str:
        length = self._scalar("Q")
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
        return CorruptWeightsError(f"{self.path} is truncated or corrupt: {what}; download it again")
