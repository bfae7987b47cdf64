"""DeviceFrames: frames in the memory of a GPU, as the host reads and writes them.

Blocks come and go through page-locked ("pinned") host memory, which a GPU copies by itself at the bus's speed. Those
that come do so on a stream of their own, beside what the GPU computes.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pagemill.errors import KVMemoryError


class DeviceFrames:
    """frames: [pieces, frames, elements], the contiguous pieces of every frame."""

    def __init__(self, frames: Tensor) -> None:
        self._bytes = frames.view(torch.uint8)
        self._loads = torch.cuda.Stream(frames.device) if frames.is_cuda else None  # type: ignore[no-untyped-call]

    def copy(self, source: Tensor, target: Tensor) -> None:
        """Frames source[i] -> target[i], in order: a frame may come twice."""
        for here, there in zip(source.tolist(), target.tolist(), strict=True):
            self._bytes[:, there] = self._bytes[:, here]

    def read(self, frames: Sequence[int]) -> NDArray[np.uint8]:
        """Records [n, record bytes], after what the GPU has been asked to do so far."""
        pieces = self._bytes[:, torch.tensor(frames, device=self._bytes.device)].transpose(0, 1)
        host = torch.empty(pieces.shape, dtype=torch.uint8, pin_memory=self._bytes.is_cuda)
        host.copy_(pieces)
        return host.numpy().reshape(len(frames), -1)

    def mark(self) -> torch.cuda.Event | None:
        """What the GPU has been asked to do so far."""
        return None if self._loads is None else torch.cuda.current_stream(self._bytes.device).record_event()

    def records(self, frames: Sequence[int], after: torch.cuda.Event | None) -> list[DeviceRecord]:
        """To be written by any thread, when the GPU has done what `after` marks."""
        if self._loads is not None and after is not None:
            self._loads.wait_event(after)
        return [DeviceRecord(self._bytes[:, frame], self._loads) for frame in frames]


class DeviceRecord:
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
    """To be called before pinned memory ends."""
    torch.cuda.cudart().cudaHostUnregister(memory.ctypes.data)  # type: ignore[no-untyped-call]
