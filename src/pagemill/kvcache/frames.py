"""FrameStorage: the bytes of a pool's frames, in memory of the host or of a device, and partly in a file."""

from __future__ import annotations

import logging
import mmap
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from pagemill import _kernels
from pagemill.errors import KVMemoryError, KVStoreError
from pagemill.kvcache.frame_access import Places, Reading
from pagemill.kvcache.pages import HUGE, private_memory
from pagemill.kvcache.streamed_file import Region, StreamedFile

logger = logging.getLogger(__name__)

_NORESERVE = 0x4000 if sys.platform == "linux" else 0
"""The system need not set memory aside: a file takes its place, or most of it stays unused."""


class FrameStorage(Protocol):
    """Holds frames as contiguous pieces, each of the same size in every frame. `read`, `begin_read`, `mark` and
    `write` are those of `FrameAccess`."""

    bytes: Tensor
    """uint8 [pieces, frames, piece bytes]"""

    def copy(self, source: ArrayLike, target: ArrayLike) -> list[int]:
        """Copies frames source[i] -> target[i] (integers [n]), in order: a frame may come twice. Returns the targets
        that do not hold what they should, since a disk did not read or write it."""

    def read(self, frames: Sequence[int]) -> tuple[NDArray[np.uint8], list[bool]]: ...

    def begin_read(self, frames: Sequence[int]) -> Reading: ...

    def mark(self) -> object | None: ...

    def write(self, frames: Sequence[int], after: Any = None) -> AbstractContextManager[Places]: ...

    def resize(self, before: int, after: int) -> None:
        """Lets the first `after` frames have memory in the place of the first `before`. That of others goes back, where
        that can be; then they hold nothing of use. Raises KVMemoryError or DriverError, and changes nothing, where a
        device refuses it."""


class HostFrames:
    """Keeps frames in host memory: page-aligned, in huge pages where the system has them. Pages that were never written
    cost nothing.

    Raises KVMemoryError if the memory cannot be had.
    """

    def __init__(self, pieces: int, frames: int, piece_bytes: int, *, reserve: bool = True) -> None:
        nbytes = pieces * frames * piece_bytes
        try:
            self._memory = private_memory(nbytes, HUGE, 0 if reserve else _NORESERVE)
        except (OSError, OverflowError, ValueError) as error:
            raise not_allocated(nbytes, "cpu", error) from error
        self.bytes = torch.frombuffer(self._memory, dtype=torch.uint8).view(pieces, frames, piece_bytes)
        self._array: NDArray[np.uint8] = self.bytes.numpy()

    def copy(self, source: ArrayLike, target: ArrayLike) -> list[int]:
        """Raises IndexError for frames that do not exist."""
        here, there = (np.ascontiguousarray(frames, dtype=np.int64) for frames in (source, target))
        if not here.size:
            return []
        frames = self._array.shape[1]
        for ids in (here, there):
            if ids.min() < 0 or ids.max() >= frames:
                raise IndexError(f"frames {ids.tolist()} are not all in 0 .. {frames - 1}")
        return self._copy(here, there)

    def _copy(self, source: NDArray[np.int64], target: NDArray[np.int64]) -> list[int]:
        pieces, frames, size = self._array.shape
        _kernels.copy_frames(self.bytes.data_ptr(), pieces, frames * size, size, size, source, target)
        return []

    def read(self, frames: Sequence[int]) -> tuple[NDArray[np.uint8], list[bool]]:
        records = np.empty((len(frames), *self._array.shape[::2]), dtype=np.uint8)
        whole = [self._read_into(record, frame) for record, frame in zip(records, frames, strict=True)]
        return records.reshape(len(frames), -1), whole

    def begin_read(self, frames: Sequence[int]) -> Reading:
        return Reading(*self.read(frames))

    def _read_into(self, record: NDArray[np.uint8], frame: int) -> bool:
        """Copies a frame into a record. Returns whether it could be read."""
        record[:] = self._array[:, frame]
        return True

    def mark(self) -> None:
        """Marks nothing: what is asked for is done at once."""

    @contextmanager
    def write(self, frames: Sequence[int], after: Any = None) -> Iterator[Places]:
        yield [self._array[:, frame] for frame in frames]

    def resize(self, before: int, after: int) -> None:
        pieces, frames, size = self._array.shape
        for piece in range(pieces):
            first, last = ((piece * frames + frame) * size for frame in (after, before))
            first, last = -(-first // mmap.PAGESIZE) * mmap.PAGESIZE, last // mmap.PAGESIZE * mmap.PAGESIZE
            if first < last:
                self._memory.madvise(mmap.MADV_DONTNEED, first, last - first)


class FileBackedFrames(HostFrames):
    """Keeps frames in host memory, and those from `first` on in a file in `folder`, mapped behind them. Raises
    KVMemoryError; and KVStoreError if the disk has no room."""

    def __init__(self, pieces: int, frames: int, piece_bytes: int, *, first: int, folder: Path) -> None:
        super().__init__(pieces, frames, piece_bytes, reserve=False)
        self._first = first
        streamed = self.bytes[:, first:]
        regions = [Region(piece.data_ptr(), streamed.shape[1] * piece_bytes) for piece in streamed]
        self.file = StreamedFile(folder, regions, piece_bytes)

    @contextmanager
    def write(self, frames: Sequence[int], after: Any = None) -> Iterator[Places]:
        """Gives the frames themselves, or memory that is copied into the file at the end."""
        staged = {frame: np.empty_like(self._array[:, 0]) for frame in frames if frame >= self._first}
        yield [staged[frame] if frame in staged else self._array[:, frame] for frame in frames]
        for frame, record in staged.items():
            self._put(frame, record)

    def _copy(self, source: NDArray[np.int64], target: NDArray[np.int64]) -> list[int]:
        if max(source.max(), target.max()) < self._first:
            return super()._copy(source, target)
        lost = set[int]()
        for here, there in zip(source.tolist(), target.tolist(), strict=True):
            lost.discard(there)
            if here in lost:
                lost.add(there)
                continue
            try:
                self._put(there, self._get(here))
            except KVStoreError as error:
                logger.error("%s", error)
                lost.add(there)
        return sorted(lost)

    def _read_into(self, record: NDArray[np.uint8], frame: int) -> bool:
        try:
            record[:] = self._get(frame)
        except KVStoreError as error:
            logger.warning("%s", error)
            return False
        return True

    def _get(self, frame: int) -> NDArray[np.uint8]:
        return self._array[:, frame] if frame < self._first else self.file.read(frame - self._first)

    def _put(self, frame: int, record: NDArray[np.uint8]) -> None:
        if frame < self._first:
            self._array[:, frame] = record
        else:
            self.file.write(frame - self._first, record)


def not_allocated(nbytes: int, device: object, error: Exception) -> KVMemoryError:
    """Returns the error for a pool whose memory cannot be had."""
    return KVMemoryError(
        f"the KV pool of {nbytes} bytes could not be allocated on {device}: {error}; lower kv_memory", param="kv_memory"
    )
