"""GpuFrames: a pool's frames in the memory of a GPU, as the host reads and writes them.

Blocks come and go on streams of their own, beside what the GPU computes. Those that go are first copied aside, which
takes a GPU a few microseconds, so that their frames can be written at once. From there they go to page-locked
("pinned") host memory, which a GPU copies to by itself at the bus's speed. Those that come are put into such memory,
and go to their frames together. Torch keeps it for the next ones once nobody holds the records.
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

from pagemill.errors import KVStoreError
from pagemill.kvcache.device_streams import DeviceStreams, Event
from pagemill.kvcache.frame_access import Places, Reading
from pagemill.kvcache.frames import not_allocated

logger = logging.getLogger(__name__)

SNAPSHOTS = 4
"""The most readings whose blocks lie on the device a second time, until the bus has taken them."""
COPY_BYTES = 16 << 20
"""Frames are copied together through so much memory of the device."""
WIDEST = 16
"""Bytes at whose multiples records begin: a view of any type may."""
STAGED = 4
"""The most writings that are under way, after which the next one waits for the bus."""
RUN_BYTES = 1 << 20
"""Records go straight to their frames if those that lie side by side have so many bytes on average. Others go to the
device's memory as one, from where a kernel puts them into their frames: a copy takes some microseconds to begin."""


class GpuFrames:
    """Keeps frames in a device's memory. Copies are asked for by one thread, reads and writes by any.

    more: bytes that lie behind the frames, in one piece with them. Raises KVMemoryError if the memory cannot be had.
    """

    def __init__(self, pieces: int, frames: int, piece_bytes: int, streams: DeviceStreams, more: int = 0) -> None:
        nbytes = pieces * frames * piece_bytes
        try:
            memory = torch.empty(nbytes + more, dtype=torch.uint8, device=streams.where)
        except RuntimeError as error:  # torch's out-of-memory is one
            raise not_allocated(nbytes + more, streams.where, error) from error
        self.bytes = memory[:nbytes].view(pieces, frames, piece_bytes)
        self._streams = streams
        self._loads, self._saves = streams.stream(), streams.stream()
        self._at_once = max(1, COPY_BYTES // (pieces * piece_bytes))
        self._on_their_way: deque[Snapshot] = deque()
        self._lock = threading.Lock()
        self._coming: deque[Event] = deque()
        self._written: Event | None = None
        """The last writing that nothing follows yet."""
        self._writing = threading.Lock()

    def copy(self, source: ArrayLike, target: ArrayLike) -> list[int]:
        """Copies many frames at once, in the order of computations, and waits for nothing. Raises IndexError for frames
        that do not exist."""
        self.follow_writes()
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
        """Copies frames aside in the order of computations, and from there to the host beside these."""
        if not len(frames):
            return Reading(np.empty((0, self.bytes[:, 0].numel()), dtype=np.uint8), [])
        self.follow_writes()
        with self._lock:
            waiting = self._on_their_way
            while waiting and (len(waiting) >= SNAPSHOTS or waiting[0].arrived.query()):
                waiting[0].arrived.synchronize()  # before its memory is another's
                waiting.popleft()
            try:
                host = self._pinned(len(frames) * self.bytes[:, 0].numel())
            except KVStoreError as error:
                logger.warning("%s", error)
                return Reading(np.zeros((len(frames), self.bytes[:, 0].numel()), np.uint8), [False] * len(frames))
            records = self._words().transpose(0, 1).index_select(0, self._upload(list(frames)))
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
        do not exist: if the device found them, it would be lost. Waits for the device where no memory can be pinned."""
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
        if min(frames) < 0 or max(frames) >= self.bytes.shape[1]:
            raise IndexError(f"frames {[*frames]} are not all in 0 .. {self.bytes.shape[1] - 1}")

    def mark(self) -> Event:
        """Returns a mark of what the GPU has been asked to do so far."""
        return self._streams.compute.record_event()

    @contextmanager
    def write(self, frames: Sequence[int], after: Event | None = None) -> Iterator[Places]:
        """Gives places in pinned memory, which the GPU copies to the frames beside computations: they follow where
        `follow_writes` says so. Raises IndexError for frames that do not exist, and KVStoreError where there is no such
        memory."""
        if not len(frames):
            yield []
            return
        self._check(frames)
        pieces, _, piece_bytes = self.bytes.shape
        head = -(-8 * len(frames) // WIDEST) * WIDEST
        self._wait_for_room()
        host = self._pinned(head + len(frames) * pieces * piece_bytes)
        yield host.numpy()[head:].reshape(len(frames), pieces, piece_bytes)
        host.numpy()[: 8 * len(frames)].view(np.int64)[:] = frames
        with self._writing:
            try:
                self._put(frames, host, head, after)
            finally:
                self._written = self._loads.record_event()
                self._coming.append(self._written)

    def _pinned(self, nbytes: int) -> Tensor:
        """Returns pinned memory for records. Raises KVStoreError where the system gives no more of it, as within a
        limit of WSL or of a container."""
        try:
            return self._streams.pinned(nbytes)
        except RuntimeError as error:
            raise KVStoreError(f"{nbytes} bytes of host memory cannot be pinned for blocks: {error}") from error

    def _wait_for_room(self) -> None:
        """Waits until fewer than STAGED writings are under way. Holds nothing meanwhile that computations need: these
        may have to come first."""
        while True:
            with self._writing:
                while self._coming and self._coming[0].query():
                    self._coming.popleft()
                oldest = self._coming[0] if len(self._coming) >= STAGED else None
            if oldest is None:
                return
            oldest.synchronize()

    def _put(self, frames: Sequence[int], host: Tensor, head: int, after: Event | None) -> None:
        """Copies records, behind `head` bytes that begin with the frames' numbers, to their frames."""
        pieces, _, piece_bytes = self.bytes.shape
        runs = runs_of(frames)
        with self._streams.use(self._loads):
            if pieces == 1 and (len(host) - head) // len(runs) >= RUN_BYTES:
                if after is not None:
                    self._loads.wait_event(after)
                for first, end in runs:
                    records = host[head + first * piece_bytes : head + end * piece_bytes]
                    frame = frames[first]
                    self._streams.copy(records, self.bytes[0, frame : frame + end - first].view(-1))
                return
            staged = torch.empty(len(host), dtype=torch.uint8, device=self._streams.where)
            self._streams.copy(host, staged)
            if after is not None:
                self._loads.wait_event(after)
            words, numbers = self._words(), staged[: 8 * len(frames)].view(torch.int64)
            records = staged[head:].view(words.dtype).view(len(frames), pieces, -1)
            words.index_copy_(1, numbers, records.transpose(0, 1))

    def follow_writes(self) -> None:
        """Lets computations that are asked for from now on follow the writings that have ended."""
        with self._writing:
            written, self._written = self._written, None
        if written is not None:
            self._streams.compute.wait_event(written)

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


def runs_of(frames: Sequence[int]) -> list[tuple[int, int]]:
    """Returns where frames stand, begin and end, of which each is the one behind the last."""
    breaks = [at for at in range(1, len(frames)) if frames[at] != frames[at - 1] + 1]
    return [*pairwise([0, *breaks, len(frames)])]
