"""GpuFrames: a pool's frames in the memory of a GPU, as the host reads and writes them.

Blocks come and go on streams of their own, beside what the GPU computes. Those that go are first copied aside, which
takes a GPU a few microseconds, so that their frames can be written at once. From there they go to page-locked
("pinned") host memory, which a GPU copies to by itself at the bus's speed. Torch keeps such memory for the next reading
once nobody holds the records.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from pagemill.errors import KVMemoryError
from pagemill.kvcache.device_streams import DeviceStreams, Event, Stream
from pagemill.kvcache.frame_access import Places, Reading
from pagemill.kvcache.frames import not_allocated

SNAPSHOTS = 4
"""The most readings whose blocks lie on the device a second time, until the bus has taken them."""
COPY_BYTES = 16 << 20
"""Frames are copied together through so much memory of the device."""


class GpuFrames:
    """Keeps frames in a device's memory. Copies are asked for by one thread, reads and writes by any. Raises
    KVMemoryError if the memory cannot be had."""

    def __init__(self, pieces: int, frames: int, piece_bytes: int, streams: DeviceStreams) -> None:
        try:
            self.bytes = torch.empty(pieces, frames, piece_bytes, dtype=torch.uint8, device=streams.where)
        except RuntimeError as error:  # torch's out-of-memory is one
            raise not_allocated(pieces * frames * piece_bytes, streams.where, error) from error
        self._streams = streams
        self._loads, self._saves = streams.stream(), streams.stream()
        self._at_once = max(1, COPY_BYTES // (pieces * piece_bytes))
        self._on_their_way: deque[Snapshot] = deque()
        self._lock = threading.Lock()

    def copy(self, source: ArrayLike, target: ArrayLike) -> list[int]:
        """Copies many frames at once, in the order of computations, and waits for nothing. Raises IndexError for frames
        that do not exist."""
        here, there = np.asarray(source).tolist(), np.asarray(target).tolist()
        words = self._words()
        for first in range(0, len(here), self._at_once):
            part = slice(first, first + self._at_once)
            origins = origins_of(here[part], there[part])
            records = words.index_select(1, self._upload([*origins.values()]))
            words.index_copy_(1, self._upload([*origins]), records)
        return []

    def read(self, frames: Sequence[int]) -> tuple[NDArray[np.uint8], list[bool]]:
        """Reads after what the GPU has been asked to do so far."""
        records, whole, wait = self.begin_read(frames)
        wait()
        return records, whole

    def begin_read(self, frames: Sequence[int]) -> Reading:
        """Copies frames aside in the order of computations, and from there to the host beside these."""
        if not len(frames):
            return Reading(np.empty((0, self.bytes[:, 0].numel()), dtype=np.uint8), [])
        with self._lock:
            waiting = self._on_their_way
            while waiting and (len(waiting) >= SNAPSHOTS or waiting[0].arrived.query()):
                waiting[0].arrived.synchronize()  # before its memory is another's
                waiting.popleft()
            records = self._words().transpose(0, 1).index_select(0, self._upload(list(frames)))
            host = self._streams.pinned(records.nbytes)
            self._saves.wait_event(self._streams.compute.record_event())
            with self._streams.use(self._saves):
                self._streams.copy(records.view(-1).view(torch.uint8), host)
                arrived = self._saves.record_event()
            waiting.append(Snapshot(records, arrived))
        return Reading(host.numpy().reshape(len(frames), -1), [True] * len(frames), arrived.synchronize)

    def _words(self) -> Tensor:
        """Returns the frames as the widest elements that they consist of: kernels move an element per thread."""
        return self.bytes if self.bytes.shape[2] % 8 else self.bytes.view(torch.int64)

    def _upload(self, frames: list[int]) -> Tensor:
        """Returns numbers of frames on the device, int64 [n], for computations. Raises IndexError for those that
        do not exist: if the device found them, it would be lost."""
        if min(frames) < 0 or max(frames) >= self.bytes.shape[1]:
            raise IndexError(f"frames {frames} are not all in 0 .. {self.bytes.shape[1] - 1}")
        host = self._streams.pinned(8 * len(frames))
        host.numpy().view(np.int64)[:] = frames
        there = torch.empty(len(frames), dtype=torch.int64, device=self._streams.where)
        self._streams.copy(host, there.view(torch.uint8))
        return there

    def mark(self) -> Event:
        """Returns a mark of what the GPU has been asked to do so far."""
        return self._streams.compute.record_event()

    @contextmanager
    def write(self, frames: Sequence[int], after: Event | None = None) -> Iterator[Places]:
        if after is not None:
            self._loads.wait_event(after)
        yield [GpuRecord(self.bytes[:, frame], self._streams.use, self._loads) for frame in frames]
        self._loads.record_event().synchronize()

    def release(self, begin: int, end: int) -> None:
        """Keeps the memory: a device's is had as a whole."""


class Snapshot(NamedTuple):
    """Holds blocks on the device until they have arrived at the host."""

    records: Tensor
    arrived: Event


def origins_of(source: Sequence[int], target: Sequence[int]) -> dict[int, int]:
    """Returns, for copies source[i] -> target[i] that are made in order, by target which frame's first content it holds
    in the end."""
    origins: dict[int, int] = {}
    for here, there in zip(source, target, strict=True):
        origins[there] = origins.get(here, here)
    return origins


class GpuRecord:
    """A frame's place for a record: `place[:] = record` returns when the GPU has copied it."""

    def __init__(self, frame: Tensor, use: Callable[[Stream], AbstractContextManager[object]], stream: Stream) -> None:
        self._frame = frame
        self._use = use
        self._stream = stream
        self.shape = tuple(frame.shape)

    def __setitem__(self, whole: slice, record: NDArray[np.uint8]) -> None:
        with self._use(self._stream):
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
