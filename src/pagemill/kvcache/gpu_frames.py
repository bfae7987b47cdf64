"""GpuFrames: a pool's frames in the memory of a GPU, as the host reads and writes them.

Blocks come and go through page-locked ("pinned") host memory, which a GPU copies by itself at the bus's speed. Those
that come do so on a stream of their own, beside what the GPU computes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from pagemill.errors import KVMemoryError
from pagemill.kvcache.frame_access import Places
from pagemill.kvcache.frames import not_allocated


class GpuFrames:
    """Keeps frames in a device's memory. Raises KVMemoryError if that cannot be had."""

    def __init__(self, pieces: int, frames: int, piece_bytes: int, device: torch.device) -> None:
        try:
            self.bytes = torch.empty(pieces, frames, piece_bytes, dtype=torch.uint8, device=device)
        except RuntimeError as error:  # torch's out-of-memory is one
            raise not_allocated(pieces * frames * piece_bytes, device, error) from error
        self._loads = torch.cuda.Stream(device) if self.bytes.is_cuda else None  # type: ignore[no-untyped-call]

    def copy(self, source: ArrayLike, target: ArrayLike) -> list[int]:
        for here, there in zip(np.asarray(source).tolist(), np.asarray(target).tolist(), strict=True):
            self.bytes[:, there] = self.bytes[:, here]
        return []

    def read(self, frames: Sequence[int]) -> tuple[NDArray[np.uint8], list[bool]]:
        """Reads after what the GPU has been asked to do so far."""
        pieces = self.bytes[:, torch.tensor(frames, device=self.bytes.device)].transpose(0, 1)
        host = torch.empty(pieces.shape, dtype=torch.uint8, pin_memory=self.bytes.is_cuda)
        host.copy_(pieces)
        return host.numpy().reshape(len(frames), -1), [True] * len(frames)

    def mark(self) -> torch.cuda.Event | None:
        """Returns a mark of what the GPU has been asked to do so far."""
        return None if self._loads is None else torch.cuda.current_stream(self.bytes.device).record_event()

    @contextmanager
    def write(self, frames: Sequence[int], after: torch.cuda.Event | None = None) -> Iterator[Places]:
        if self._loads is not None and after is not None:
            self._loads.wait_event(after)
        yield [GpuRecord(self.bytes[:, frame], self._loads) for frame in frames]

    def release(self, begin: int, end: int) -> None:
        """Keeps the memory: a device's is had as a whole."""


class GpuRecord:
    """A frame's place for a record: `place[:] = record` returns when the GPU has copied it."""

    def __init__(self, frame: Tensor, stream: torch.cuda.Stream | None) -> None:
        self._frame = frame
        self._stream = stream
        self.shape = tuple(frame.shape)

    def __setitem__(self, whole: slice, record: NDArray[np.uint8]) -> None:
        with torch.cuda.stream(self._stream):
            self._frame[whole] = torch.from_numpy(record)


def pin(memory: NDArray[np.uint8]) -> None:
    """Locks memory's pages, so that GPUs copy to and from it by themselves. Raises KVMemoryError."""
    error = torch.cuda.cudart().cudaHostRegister(memory.ctypes.data, memory.nbytes, 0)  # type: ignore[no-untyped-call]
    if int(error) != 0:
        raise KVMemoryError(
            f"{memory.nbytes} bytes of host memory cannot be pinned: {error}; lower kv_host_memory",
            param="kv_host_memory",
        )


def unpin(memory: NDArray[np.uint8]) -> None:
    """Unlocks pinned memory; it must be called before that ends."""
    torch.cuda.cudart().cudaHostUnregister(memory.ctypes.data)  # type: ignore[no-untyped-call]
