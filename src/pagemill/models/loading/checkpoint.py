"""Defines what every checkpoint format offers: named tensors in memory-mapped files, read piece by piece.

Pages are given back as soon as they have been read, so that a file never counts twice in the process's memory.
"""

from __future__ import annotations

import mmap
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pagemill.errors import CorruptWeightsError, ModelNotFoundError
from pagemill.models.names import WeightNames

PLAIN_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""Formats that are numbers and nothing else, as files name them."""
PIECE_BYTES = 1 << 20
"""Tensors are converted in pieces of about this size, which stay in a core's cache."""


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor of a checkpoint.

    shape: rows first. dtype: as the file names it. nbytes: as stored.
    """

    shape: tuple[int, ...]
    dtype: str
    nbytes: int


class Checkpoint(Protocol):
    """One model on disk.

    config:    normalised configuration, `hf_overrides` applied (families.ModelConfig takes it).
    names:     where the weights are; None: as the family says.
    quantized: whether some weights are stored in a quantized format.
    """

    path: Path
    config: dict[str, Any]
    names: WeightNames | None
    files: list[MappedFile]
    tensors: dict[str, TensorInfo]
    eos_token_ids: tuple[int, ...]
    quantized: bool

    def float_dtypes(self) -> dict[torch.dtype, int]:
        """Returns the stored bytes of each dtype; quantized weights count as float32."""
        ...

    def stored_bits(self, name: str) -> int | None:
        """Returns a quantized tensor's bits per value, rounded up to 4 or 8; None for a plain tensor."""
        ...

    def affine_bits(self, name: str) -> int | None:
        """Returns the bits, 4 or 8, of the integers that `read_affine` reads; None if it cannot read this tensor."""
        ...

    def read_affine(self, name: str) -> tuple[Tensor, Tensor, Tensor]:
        """Returns values uint8 [rows, columns], and scale and low, float32 [rows, columns / 32].

        The weight is scale * value + low, where scale * value is exact.
        """
        ...

    def read_into(self, name: str, out: Tensor) -> None:
        """Copies a tensor into `out` (same shape, any dtype and device), converting."""
        ...


class MappedFile:
    """Maps a file into memory, read-only. Raises ModelNotFoundError or, for an empty file, CorruptWeightsError."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                self.size = file.seek(0, 2)
                if self.size == 0:
                    raise CorruptWeightsError(f"{path} is empty; download it again")
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except FileNotFoundError:
            raise ModelNotFoundError(f"there is no file {path}; check the path, or download the model again") from None
        except OSError as error:
            raise ModelNotFoundError(f"{path} cannot be read: {error}") from error
        self._bytes = np.frombuffer(self._map, dtype=np.uint8)

    def view(self, begin: int, end: int) -> NDArray[np.uint8]:
        """Returns bytes begin to end without copying. Raises CorruptWeightsError if the file is shorter."""
        if not 0 <= begin <= end <= self.size:
            raise CorruptWeightsError(
                f"{self.path} has {self.size} bytes, but bytes {begin} to {end} are needed: it is truncated or "
                f"corrupt; download it again"
            )
        return self._bytes[begin:end]

    def forget(self, begin: int, end: int) -> None:
        """Drops the pages that lie wholly in begin .. end from the process's memory (where the system can)."""
        first, last = -(-begin // mmap.PAGESIZE) * mmap.PAGESIZE, end // mmap.PAGESIZE * mmap.PAGESIZE
        if last > first and hasattr(mmap, "MADV_DONTNEED"):
            self._map.madvise(mmap.MADV_DONTNEED, first, last - first)


def copy_stored(file: MappedFile, begin: int, dtype: torch.dtype, out: Tensor) -> None:
    """Copies out.numel() elements of `dtype`, stored at `begin`, into contiguous `out`, piece by piece."""
    flat = out.view(-1)
    step = PIECE_BYTES // dtype.itemsize
    buffer = torch.empty(min(step, flat.numel()), dtype=dtype)
    raw = buffer.view(torch.uint8).numpy()
    for start in range(0, flat.numel(), step):
        stop = min(start + step, flat.numel())
        first, last = begin + start * dtype.itemsize, begin + stop * dtype.itemsize
        raw[: last - first] = file.view(first, last)
        flat[start:stop].copy_(buffer[: stop - start])
        file.forget(first, last)
