"""Reads the GGUF container: metadata, and where each tensor lies and in which format, every bound checked."""

from __future__ import annotations

import itertools
import math
from typing import NamedTuple

from pagemill.errors import UnsupportedModelError
from pagemill.hub.gguf_header import GGUFHeader, TensorEntry
from pagemill.models.loading.checkpoint import MappedFile, TensorInfo


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
        self._file = file
        self._header = GGUFHeader(file.path, file.data)
        self.metadata = self._header.metadata
        self.tensors = self._read()
        file.forget(self._header.nbytes)

    def _read(self) -> dict[str, TensorInfo]:
        alignment = self.metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1:
            raise self._header.corrupt(f"general.alignment is {alignment!r}")
        covered = start = -(-self._header.nbytes // alignment) * alignment
        tensors: dict[str, TensorInfo] = {}
        for entry in self._header.entries:
            if entry.name in tensors:
                raise self._header.corrupt(f"tensor {entry.name!r} is there twice")
            tensors[entry.name] = tensor = self._tensor(entry, start)
            if entry.begin % alignment:
                raise self._header.corrupt(
                    f"tensor {entry.name!r} begins at byte {entry.begin} of the data, not a multiple of {alignment}"
                )
            covered = max(covered, tensor.begin + tensor.nbytes)
        for before, after in itertools.pairwise(sorted(tensors, key=lambda name: tensors[name].begin)):
            if tensors[after].begin < tensors[before].begin + tensors[before].nbytes:
                raise self._header.corrupt(f"tensors {before!r} and {after!r} overlap")
        if covered > self._file.size:
            raise self._header.corrupt(f"it has {self._file.size} bytes, but its tensors need {covered}")
        return tensors

    def _tensor(self, entry: TensorEntry, start: int) -> TensorInfo:
        form = _BY_NUMBER.get(entry.kind)
        if form is None:
            raise UnsupportedModelError(
                f"tensor {entry.name!r} in {self._file.path} has the unknown format {entry.kind}: the file is corrupt, "
                f"or newer than this program; download it again, or take another quantization"
            )
        if not entry.shape or entry.shape[-1] % form.block:
            raise self._header.corrupt(
                f"tensor {entry.name!r} has shape {list(entry.shape)}, whose rows are not whole blocks of {form.block} "
                f"({form.name})"
            )
        nbytes = math.prod(entry.shape) // form.block * form.nbytes
        return TensorInfo(entry.shape, form.name, nbytes, self._file, start + entry.begin)
