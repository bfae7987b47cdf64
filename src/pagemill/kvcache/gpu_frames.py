"""GpuFrames: a pool's frames in the memory of a GPU, as the host reads and writes them.

Blocks come and go on streams of their own, beside what the GPU computes. Those that go are first copied aside, which
takes a GPU a few microseconds, so that their frames can be written at once. From there they go to page-locked
("pinned") host memory, which a GPU copies to by itself at the bus's speed. Those that come are put into such memory,
go to the device together, and a kernel puts them into their frames. Who brings them waits until they are there, so that
nothing the GPU computes waits for the bus. Torch keeps pinned memory for the next ones once nobody holds the records.

Where a pool can grow, its addresses are there for all frames, and memory for the first ones only (`MappedMemory`).
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from pagemill.errors import DeviceLostError, KVStoreError
from pagemill.kvcache.device_streams import DeviceStreams, Event
from pagemill.kvcache.frame_access import Places, Reading
from pagemill.kvcache.frames import not_allocated
from pagemill.kvcache.mapped_memory import MappedMemory, open_mapped

logger = logging.getLogger(__name__)

SNAPSHOTS = 4
"""The most readings whose blocks lie on the device a second time, until the bus has taken them."""
COPY_BYTES = 16 << 20
"""Frames are copied together through so much memory of the device."""
WIDEST = 16
"""Bytes at whose multiples records begin: a view of any type may."""
STAGED = 3
"""The most writings whose records lie on the device beside their frames: while one is on the bus, the next one waits
for it, and another is being put into frames."""
STAGE_BYTES = 32 << 20
"""The device's memory for a writing, or more where records take more."""


class GpuFrames:
    """Keeps frames in a device's memory. Copies are asked for by one thread, reads and writes by any. Nobody may use
    frames that are being written.

    more: bytes that lie behind the frames, in one piece with them.
    filled: the first frames, so many have memory, and the others may have some later; then frames are of one piece, and
        the streams have a driver. None: all, for good.
    Raises KVMemoryError if the memory cannot be had.
    """

    def __init__(
        self,
        pieces: int,
        frames: int,
        piece_bytes: int,
        streams: DeviceStreams,
        more: int = 0,
        filled: int | None = None,
    ) -> None:
        nbytes = pieces * frames * piece_bytes
        self._mapped: MappedMemory | None = None
        self._filled = frames if filled is None else filled
        if filled is None:
            try:
                memory = torch.empty(nbytes + more, dtype=torch.uint8, device=streams.where)
            except RuntimeError as error:  # torch's out-of-memory is one
                raise not_allocated(nbytes + more, streams.where, error) from error
        else:
            assert streams.driver is not None
            assert pieces == 1
            parts = [(0, filled * piece_bytes), (nbytes, nbytes + more)]
            self._mapped, memory = open_mapped(streams.driver, nbytes + more, streams.synchronize, parts)
        self.bytes = memory[:nbytes].view(pieces, frames, piece_bytes)
        self._streams = streams
        self._saves, self._numbers = streams.stream(), streams.stream()
        self._loads, self._puts = streams.stream(), streams.stream()
        """The bus brings records in the one, and a kernel puts them into frames in the other: the bus goes on while
        that waits for computations."""
        self._at_once = max(1, COPY_BYTES // (pieces * piece_bytes))
        self._on_their_way: deque[Snapshot] = deque()
        self._lock = threading.Lock()
        self._staged = threading.Semaphore(STAGED)

    def copy(self, source: ArrayLike, target: ArrayLike) -> list[int]:
        """Copies many frames at once, in the order of computations, and waits for nothing. Raises IndexError for frames
        that do not exist."""
        here, there = np.asarray(source).tolist(), np.asarray(target).tolist()
        words = self._words()
        for first in range(0, len(here), self._at_once):
            part = slice(first, first + self._at_once)
            origins = origins_of(here[part], there[part])
            sources, targets = self._upload([*origins.values()]), self._upload([*origins])
            words.index_copy_(1, targets, words.index_select(1, sources))
        return []

    def read(self, frames: Sequence[int]) -> tuple[NDArray[np.uint8], list[bool]]:
        """Reads after what the GPU has been asked to do so far."""
        records, whole, wait = self.begin_read(frames)
        wait()
        return records, whole

    def begin_read(self, frames: Sequence[int]) -> Reading:
        """Copies frames aside in the order of computations, and from there to the host beside these. None can be read
        if one of them has given its memory back. Raises DeviceLostError where the device does no more work."""
        if not len(frames):
            return Reading(np.empty((0, self.bytes[:, 0].numel()), dtype=np.uint8), [])
        try:
            return self._begin_read(frames)
        except RuntimeError as error:  # memory too little is none here, so the device has failed before
            raise DeviceLostError.of(self.bytes.device, error) from error

    def _begin_read(self, frames: Sequence[int]) -> Reading:
        with self._lock:
            if self._filled <= max(frames) < self.bytes.shape[1]:
                return self._unread(len(frames))
            waiting = self._on_their_way
            while waiting and (len(waiting) >= SNAPSHOTS or waiting[0].arrived.query()):
                waiting[0].arrived.synchronize()  # before its memory is another's
                waiting.popleft()
            try:
                host = self._pinned(len(frames) * self.bytes[:, 0].numel())
            except KVStoreError as error:
                logger.warning("%s", error)
                return self._unread(len(frames))
            try:
                # while computations go on, and before loads that wait for the bus
                with self._streams.use(self._numbers):
                    numbers = self._upload(list(frames))
                    come = self._numbers.record_event()
                self._streams.compute.wait_event(come)
                records = self._words().transpose(0, 1).index_select(0, numbers)
            except torch.OutOfMemoryError as error:
                logger.warning("blocks are not copied from the device, which has no memory for it: %s", error)
                return self._unread(len(frames))
            self._saves.wait_event(self._streams.compute.record_event())
            with self._streams.use(self._saves):
                self._streams.copy(records.view(-1).view(torch.uint8), host)
                arrived = self._saves.record_event()
            waiting.append(Snapshot(records, numbers, arrived))
        return Reading(host.numpy().reshape(len(frames), -1), [True] * len(frames), arrived.synchronize)

    def _unread(self, count: int) -> Reading:
        """Returns what was read of frames, so many, that could not be."""
        return Reading(np.zeros((count, self.bytes[:, 0].numel()), np.uint8), [False] * count)

    def _words(self) -> Tensor:
        """Returns the frames as the widest elements that they consist of: kernels move an element per thread."""
        return self.bytes if self.bytes.shape[2] % 8 else self.bytes.view(torch.int64)

    def _upload(self, frames: list[int]) -> Tensor:
        """Returns numbers of frames on the device, int64 [n], in the stream in use. Raises IndexError for those that do
        not exist: if the device found them, it would be lost. Waits for the device where no memory can be pinned."""
        self._check(frames)
        try:
            host = self._streams.pinned(8 * len(frames))
        except RuntimeError:
            return torch.tensor(frames, dtype=torch.int64, device=self._streams.where)
        host.numpy().view(np.int64)[:] = frames
        there = torch.empty(len(frames), dtype=torch.int64, device=self._streams.where)
        self._streams.copy(host, there.view(torch.uint8))
        return there

    def _check(self, frames: Sequence[int]) -> None:
        if min(frames) < 0 or max(frames) >= self._filled:
            raise IndexError(f"frames {[*frames]} are not all in 0 .. {self._filled - 1}")

    def mark(self) -> Event:
        """Returns a mark of what the GPU has been asked to do so far."""
        return self._streams.compute.record_event()

    @contextmanager
    def write(self, frames: Sequence[int], after: Event | None = None) -> Iterator[Places]:
        """Gives places in pinned memory, which the GPU copies to the frames beside computations; waits until it has.
        Raises IndexError for frames that do not exist, and KVStoreError where there is no such memory."""
        if not len(frames):
            yield []
            return
        self._check(frames)
        pieces, _, piece_bytes = self.bytes.shape
        head = -(-8 * len(frames) // WIDEST) * WIDEST
        host = self._pinned(head + len(frames) * pieces * piece_bytes)
        yield host.numpy()[head:].reshape(len(frames), pieces, piece_bytes)
        host.numpy()[: 8 * len(frames)].view(np.int64)[:] = frames
        with self._staged:
            self._put(len(frames), host, head, after)

    def _put(self, count: int, host: Tensor, head: int, after: Event | None) -> None:
        """Brings records, behind `head` bytes that begin with their frames' numbers, to the device, has them put into
        frames, and waits for it. Raises KVStoreError where the device has no memory for them."""
        with self._streams.use(self._loads):
            try:  # one size, which torch finds again among what it keeps
                memory = torch.empty(max(len(host), STAGE_BYTES), dtype=torch.uint8, device=self._streams.where)
            except torch.OutOfMemoryError as error:
                raise KVStoreError(f"the device has no memory for blocks that come: {error}") from error
            staged = memory[: len(host)]
            self._streams.copy(host, staged)
            come = self._loads.record_event()
        with self._streams.use(self._puts):
            self._puts.wait_event(come)
            if after is not None:
                self._puts.wait_event(after)
            words, numbers = self._words(), staged[: 8 * count].view(torch.int64)
            records = staged[head:].view(words.dtype).view(count, self.bytes.shape[0], -1)
            words.index_copy_(1, numbers, records.transpose(0, 1))
            put = self._puts.record_event()
        put.synchronize()

    def _pinned(self, nbytes: int) -> Tensor:
        """Returns pinned memory for records. Raises KVStoreError where the system gives no more of it, as within a
        limit of WSL or of a container."""
        try:
            return self._streams.pinned(nbytes)
        except RuntimeError as error:
            raise KVStoreError(f"{nbytes} bytes of host memory cannot be pinned for blocks: {error}") from error

    def missing(self, frames: int) -> int:
        """Returns how many bytes of the device the first frames, so many, lack."""
        return 0 if self._mapped is None else self._mapped.missing(0, frames * self.bytes.shape[2])

    def resize(self, before: int, after: int) -> None:
        """Waits for the device where frames go. Keeps their memory where it was had as a whole."""
        if self._mapped is None:
            return
        size = self.bytes.shape[2]
        with self._lock:  # nobody begins to read them meanwhile
            if after > before:
                self._mapped.map(0, after * size)
            else:
                self._mapped.unmap(after * size, self.bytes.numel())
            self._filled = after


class Snapshot(NamedTuple):
    """Holds blocks on the device, and the numbers of their frames, until they have arrived at the host."""

    records: Tensor
    numbers: Tensor
    arrived: Event


def origins_of(source: Sequence[int], target: Sequence[int]) -> dict[int, int]:
    """Returns, for copies source[i] -> target[i] that are made in order, by target which frame's first content it holds
    in the end."""
    origins: dict[int, int] = {}
    for here, there in zip(source, target, strict=True):
        origins[there] = origins.get(here, here)
    return origins


def runs_of(frames: Sequence[int]) -> list[tuple[int, int]]:
    """Returns where frames stand, begin and end, of which each is the one behind the last."""
    breaks = [at for at in range(1, len(frames)) if frames[at] != frames[at - 1] + 1]
    return [*pairwise([0, *breaks, len(frames)])]
