"""Defines what every checkpoint format offers: named tensors in memory-mapped files, read piece by piece.

What all formats share stands here too: overrides of their configuration.

Pages are given back as soon as they have been read, so that a file never counts twice in the process's memory.
"""

from __future__ import annotations

import mmap
import os
import weakref
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pagemill.errors import (
    CorruptWeightsError,
    ModelConfigError,
    ModelNotFoundError,
    UnknownArgumentError,
    UnsupportedModelError,
)
from pagemill.models.loading.pieces import PIECE_BYTES, each_piece
from pagemill.models.names import WeightNames
from pagemill.ops.quantized import Float8Weight, QuantizedWeight

PLAIN_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""Formats that are numbers and nothing else, as files name them."""
_LEGACY = ("rope_theta", "rope_scaling", "rope_parameters", "original_max_position_embeddings")


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Describes one tensor of a checkpoint.

    shape: rows first. dtype: as the file names it. nbytes: as stored. begin: its first byte in the file.
    """

    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    file: MappedFile
    begin: int


class Checkpoint:
    """Describes one model on disk. Each format derives from it, and reads only headers and configuration at first.

    config:    normalised configuration, `hf_overrides` applied (families.ModelConfig takes it).
    names:     where the weights are; None: as the family says.
    quantization: how some weights are stored, in integers ("gguf", "gptq", "awq") or in "fp8"; None: none are.
    readable:  dtypes that `read_into` converts.
    is_headless: True if it may lack the head that its configuration asks for: a base model was saved.
    """

    path: Path
    config: dict[str, Any]
    files: list[MappedFile]
    tensors: dict[str, TensorInfo]
    eos_token_ids: tuple[int, ...]
    names: WeightNames | None = None
    quantization: str | None = None
    readable: Sequence[str] = tuple(PLAIN_DTYPES)
    is_headless: bool = False

    def float_dtypes(self) -> dict[torch.dtype, int]:
        """Returns the stored bytes of each dtype of plain numbers."""
        sizes: Counter[torch.dtype] = Counter()
        for info in self.tensors.values():
            if info.dtype in PLAIN_DTYPES:
                sizes[PLAIN_DTYPES[info.dtype]] += info.nbytes
        return sizes

    def stored_bits(self, name: str) -> int | None:
        """Returns the bits per value that hold a quantized tensor: 4, 5, 6 or 8; None for a plain tensor."""
        return None

    def affine_bits(self, name: str) -> int | None:
        """Returns the bits of the integers that `read_affine` reads: 4, 5, 6 or 8; None if it cannot read this tensor.

        Those of 6 bits have a scale for each 16 columns and lie about 32; all others have one for each 32.
        """
        return None

    def read_affine(self, name: str) -> tuple[Tensor, Tensor, Tensor]:
        """Returns values uint8 [rows, columns], and scale and low, float32 [rows, columns / 32 or 16].

        The weight is scale * value + low, where scale * value is exact.
        """
        raise TypeError(f"tensor {name!r} is not quantized")

    def rounds(self, name: str) -> bool:
        """Returns True for a tensor that `round_into` reads."""
        return False

    def round_into(self, name: str, out: QuantizedWeight) -> bool:
        """Reads a tensor into `out`, in memory, in 8 bits, or in 4 with slopes and offsets, where it is stored in so
        many: rounded as `quantize_int8` does it, or as `keep_int4` does. Returns whether all weights are finite."""
        raise TypeError(f"tensor {name!r} cannot be rounded while it is read")

    def stores_float8(self, name: str) -> bool:
        """Returns True for a weight in fp8, which `read_float8` reads."""
        return False

    def read_float8(self, name: str) -> Float8Weight:
        """Returns a weight in fp8 with its scales."""
        raise TypeError(f"tensor {name!r} is not stored in fp8")

    def adds_nothing(self, name: str) -> bool:
        """Returns True for a tensor that may be left out, since its numbers change nothing."""
        return False

    def stores_alike(self, first: str, second: str) -> bool:
        """Returns True if two tensors are stored with the same shape, dtype and bytes."""
        one, other = self.tensors[first], self.tensors[second]
        if (one.shape, one.dtype, one.nbytes) != (other.shape, other.dtype, other.nbytes):
            return False
        for begin in range(0, one.nbytes, PIECE_BYTES):
            pieces = np.empty((2, min(PIECE_BYTES, one.nbytes - begin)), np.uint8)
            for info, piece in zip((one, other), pieces, strict=True):
                info.file.read(info.begin + begin, piece)
            if not np.array_equal(*pieces):
                return False
        return True

    def read_into(self, name: str, out: Tensor) -> None:
        """Copies a tensor into contiguous `out` (same shape, any dtype and device), converting, piece by piece.

        Raises UnsupportedModelError for a tensor whose dtype is not `readable`.
        """
        info = self.tensors[name]
        if info.dtype not in PLAIN_DTYPES:
            raise UnsupportedModelError(
                f"tensor {name!r} in {info.file.path} is stored as {info.dtype}; supported are "
                f"{', '.join(self.readable)}",
                param="dtype",
            )
        flat, dtype = out.view(-1), PLAIN_DTYPES[info.dtype]
        in_place = out.is_cpu and out.dtype == dtype

        def read(start: int, stop: int) -> None:
            here = flat[start:stop]
            piece = here if in_place else torch.empty(stop - start, dtype=dtype, device="cpu")
            info.file.read(info.begin + start * dtype.itemsize, piece.view(torch.uint8).numpy())
            if not in_place:
                here.copy_(piece)

        each_piece(flat.numel(), PIECE_BYTES // dtype.itemsize, read)


class FileState(NamedTuple):
    """Says what a file is, in bytes, nanoseconds and by inode: it differs once the file was written to, or replaced."""

    size: int
    modified_ns: int
    changed_ns: int
    inode: int


class MappedFile:
    """Maps a file into memory, read-only, as `data`. modified_ns: when it was last written.

    Raises ModelNotFoundError or, for an empty file, CorruptWeightsError.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                self.size = file.seek(0, 2)
                if self.size == 0:
                    raise CorruptWeightsError(f"{path} is truncated or corrupt: it is empty; download it again")
                self.modified_ns = os.fstat(file.fileno()).st_mtime_ns
                self.data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
                self._descriptor = os.dup(file.fileno())
        except FileNotFoundError:
            raise ModelNotFoundError(f"there is no file {path}; check the path, or download the model again") from None
        except OSError as error:
            raise ModelNotFoundError(f"{path} cannot be read: {error}") from error
        self._array = np.frombuffer(self.data, dtype=np.uint8)
        weakref.finalize(self, os.close, self._descriptor)

    def state(self) -> FileState:
        """Returns what the file is now."""
        stat = os.fstat(self._descriptor)
        return FileState(stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino)

    def read(self, begin: int, out: NDArray[np.uint8]) -> None:
        """Reads bytes from `begin` on into contiguous `out`. It maps no pages, and may run in several threads at once.

        Raises CorruptWeightsError if the file is shorter.
        """
        self.view(begin, begin + len(out))
        done = 0
        while done < len(out):
            count = os.preadv(self._descriptor, [out.data[done:]], begin + done)
            if count == 0:
                raise CorruptWeightsError(f"{self.path} became shorter while it was read; download it again")
            done += count

    def view(self, begin: int, end: int) -> NDArray[np.uint8]:
        """Returns bytes begin to end without copying. Raises CorruptWeightsError if the file is shorter."""
        if not 0 <= begin <= end <= self.size:
            raise CorruptWeightsError(
                f"{self.path} has {self.size} bytes, but bytes {begin} to {end} are needed: it is truncated or "
                f"corrupt; download it again"
            )
        return self._array[begin:end]

    def forget(self, end: int) -> None:
        """Drops the pages that lie wholly before `end` from the process's memory (where the system can)."""
        nbytes = end // mmap.PAGESIZE * mmap.PAGESIZE
        if nbytes and hasattr(mmap, "MADV_DONTNEED"):
            self.data.madvise(mmap.MADV_DONTNEED, 0, nbytes)


def apply_overrides(config: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the configuration with `overrides` on top.

    rope_theta and rope_scaling, the names of older configurations, reach into `rope_parameters` where that exists, so
    that they have their effect whichever form the checkpoint uses.
    """
    merged = dict(config)
    for key, value in overrides.items():
        parameters = merged.get("rope_parameters")
        if key not in ("rope_theta", "rope_scaling") or not isinstance(parameters, dict):
            merged[key] = value
            continue
        kinds = [kind for kind in ("full_attention",) if isinstance(parameters.get(kind), dict)]
        flat = parameters[kinds[0]] if kinds else parameters
        if key == "rope_theta":
            flat = {**flat, "rope_theta": value}
        else:
            scaling = _table(key, value)
            scaling["rope_type"] = scaling.pop("type", None) or scaling.get("rope_type", "default")
            flat = {"rope_theta": flat.get("rope_theta"), "partial_rotary_factor": flat.get("partial_rotary_factor")}
            flat = {name: given for name, given in flat.items() if given is not None} | scaling
        merged["rope_parameters"] = {**parameters, kinds[0]: flat} if kinds else flat
    return merged


def _table(key: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping | None):
        raise ModelConfigError(f"{key} is {value!r}; it must be a table, as in config.json", param=key)
    return dict(value or {})


def check_overrides(overrides: Mapping[str, Any], known: Mapping[str, Any]) -> None:
    """Raises UnknownArgumentError for a key that the configuration does not have: it would be ignored."""
    for key in overrides:
        if key not in known and key not in _LEGACY:
            raise UnknownArgumentError.of("hf_overrides", key, [*known, *_LEGACY])
