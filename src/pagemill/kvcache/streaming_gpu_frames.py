"""StreamingGpuFrames: a pool's frames in the memory of a GPU, and beside them streamed frames in pinned host memory.

A step brings of streamed frames what its next layer attends to room on the GPU, in the order of one stream, which all
other copies from and to streamed frames follow as well. These the host waits for: what lies in a streamed frame is
there, and only steps read it beside the host.

The room has a slot for each place of a frame, and two more for each streamed frame: place p of frame i goes to slot
p + 2 i. So layers of neighbouring places use other slots: one is brought while the other is attended. And slots of a
place lie as far from that place in the pool's frames, whatever the place: a layer's view of the pool finds them by one
numbering, see `StreamedView`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from pagemill.kvcache.device_streams import DeviceStreams, Event
from pagemill.kvcache.frame_access import Places, Reading
from pagemill.kvcache.gpu_frames import COPY_BYTES, GpuFrames, origins_of, runs_of


class Parts(NamedTuple):
    """States how many parts a frame has, one for each place of a layer, and the bytes of each."""

    places: int
    nbytes: int


def room_of(streamed: int, parts: Parts) -> int:
    """Returns the bytes of the device that so many streamed frames take."""
    return (2 * streamed + parts.places) * parts.nbytes


class StreamingGpuFrames(GpuFrames):
    """Keeps frames in a device's memory, and those numbered from `frames` on, so many as `streamed`, in pinned memory
    of the host. One thread asks for copies and brings parts; any reads and writes. filled: see `GpuFrames`. Raises
    KVMemoryError if the memory cannot be had.
    """

    def __init__(
        self,
        frames: int,
        frame_bytes: int,
        streams: DeviceStreams,
        streamed: int,
        parts: Parts,
        filled: int | None = None,
    ) -> None:
        self._memory = streams.pinned_whole(streamed * parts.places * parts.nbytes).view(parts.places, -1)
        """uint8 [places, streamed frames * part bytes]: neighbours' parts are brought with one copy."""
        super().__init__(1, frames, frame_bytes, streams, room_of(streamed, parts), filled)
        self._first = frames
        self._all = frames + streamed
        self._parts = parts
        self._outside: NDArray[np.uint8] = self._memory.numpy().reshape(parts.places, streamed, parts.nbytes)
        self._bus = streams.stream()
        self._brought: Event | None = None
        """The last part that was asked for."""

    def bring(self, place: int, runs: Sequence[tuple[int, int]]) -> Event:
        """Begins to bring a place of streamed frames, behind all computations that have been asked for. Returns when
        they have come.

        runs: first frame and end, of frames side by side, counted from the first streamed one.
        """
        nbytes = self._parts.nbytes
        begin, apart = self.bytes.numel() + place * nbytes, 2 * nbytes
        at_once = max(1, COPY_BYTES // nbytes)
        bus, streams = self._bus, self._streams
        bus.wait_event(streams.compute.record_event())
        with streams.use(bus):
            for first, end in runs:
                for at in range(first, end, at_once):
                    count = min(at_once, end - at)
                    come = torch.empty(count, nbytes, dtype=torch.uint8, device=streams.where)
                    streams.copy(self._memory[place, at * nbytes : (at + count) * nbytes], come.view(-1))
                    slots = torch.as_strided(self.bytes, (count, nbytes), (apart, 1), begin + at * apart)
                    _wide(slots).copy_(_wide(come))
                    del come  # before the next is asked for
            self._brought = bus.record_event()
        return self._brought

    def copy(self, source: ArrayLike, target: ArrayLike) -> list[int]:
        """Copies as `GpuFrames.copy` does; but what comes from streamed frames, or goes there, is waited for."""
        here, there = np.asarray(source).tolist(), np.asarray(target).tolist()
        if max(here + there, default=0) < self._first:
            return super().copy(here, there)
        self._check(here + there)

        def ways(pair: tuple[int, int]) -> tuple[bool, bool]:
            return pair[0] >= self._first, pair[1] >= self._first

        for (leaves, goes), pairs in groupby(zip(here, there, strict=True), ways):
            origins = origins_of(*zip(*pairs, strict=True))
            if not leaves and not goes:
                super().copy([*origins.values()], [*origins])
            elif leaves and goes:
                self._wait()
                froms, tos = ([frame - self._first for frame in part] for part in (origins.values(), origins))
                self._outside[:, tos] = self._outside[:, froms]
            else:
                move = self._put_out if goes else self._take_in
                frames = [*origins]
                for first in range(0, len(frames), self._at_once):
                    part = frames[first : first + self._at_once]
                    move([origins[frame] for frame in part], part)
        return []

    def _put_out(self, source: list[int], target: list[int]) -> None:
        """Copies frames of the pool to streamed ones."""
        count, nbytes = self._parts
        streams, bus, runs = self._streams, self._bus, runs_of(target)
        records = self._words().index_select(1, self._upload(source))[0].view(torch.uint8)
        parts = records[:, : count * nbytes].view(-1, count, nbytes).transpose(0, 1).contiguous()
        bus.wait_event(streams.compute.record_event())
        with streams.use(bus):
            for place in range(count):
                for first, end in runs:
                    at = (target[first] - self._first) * nbytes
                    out = self._memory[place, at : at + (end - first) * nbytes]
                    streams.copy(parts[place, first:end].view(-1), out)
            done = bus.record_event()
        done.synchronize()

    def _take_in(self, source: list[int], target: list[int]) -> None:
        """Copies streamed frames to frames of the pool."""
        count, nbytes = self._parts
        streams, bus, runs = self._streams, self._bus, runs_of(source)
        with streams.use(bus):
            parts = torch.empty(count, len(source), nbytes, dtype=torch.uint8, device=streams.where)
            for place in range(count):
                for first, end in runs:
                    at = (source[first] - self._first) * nbytes
                    out = self._memory[place, at : at + (end - first) * nbytes]
                    streams.copy(out, parts[place, first:end].view(-1))
            come = bus.record_event()
        streams.compute.wait_event(come)
        records = parts.transpose(0, 1).reshape(len(source), count * nbytes)
        self.bytes[0, :, : count * nbytes].index_copy_(0, self._upload(target), records)
        streams.compute.record_event().synchronize()

    def begin_read(self, frames: Sequence[int]) -> Reading:
        """Reads streamed frames at once, and others as `GpuFrames.begin_read` does."""
        if max(frames, default=0) < self._first:
            return super().begin_read(frames)
        self._check([frame for frame in frames if not self._has_gone(frame)])
        within = [at for at, frame in enumerate(frames) if frame < self._first]
        reading = super().begin_read([frames[at] for at in within])
        records = np.zeros((len(frames), self.bytes.shape[2]), dtype=np.uint8)
        of_parts = records[:, : self._outside.shape[0] * self._parts.nbytes].reshape(len(frames), *self._parts)
        for at, frame in enumerate(frames):
            if frame >= self._first:
                of_parts[at] = self._outside[:, frame - self._first]

        def wait() -> None:
            reading.wait()
            records[within] = reading.records

        whole = [True] * len(frames)
        for at, here in zip(within, reading.whole, strict=True):
            whole[at] = here
        return Reading(records, whole, wait)

    @contextmanager
    def write(self, frames: Sequence[int], after: Event | None = None) -> Iterator[Places]:
        """Gives places as `GpuFrames.write` does, and memory that is copied to streamed frames at the end."""
        if max(frames, default=0) < self._first:
            with super().write(frames, after) as places:
                yield places
            return
        self._check(frames)
        staged = {frame: np.zeros((1, self.bytes.shape[2]), np.uint8) for frame in frames if frame >= self._first}
        with super().write([frame for frame in frames if frame < self._first], after) as places:
            left = iter(places)
            yield [staged[frame] if frame in staged else next(left) for frame in frames]
        if after is not None:
            after.synchronize()
        self._wait()
        count, nbytes = self._parts
        for frame, record in staged.items():
            self._outside[:, frame - self._first] = record[0, : count * nbytes].reshape(count, nbytes)

    def _wait(self) -> None:
        """Waits until nothing that was brought is read any more: of a step that has failed, some may be."""
        if self._brought is not None:
            self._brought.synchronize()

    def _has_gone(self, frame: int) -> bool:
        """Returns whether a frame of the pool has no memory."""
        return self._filled <= frame < self._first

    def _check(self, frames: Sequence[int]) -> None:
        if min(frames) < 0 or max(frames) >= self._all or any(map(self._has_gone, frames)):
            gone = f", of which {self._filled} .. {self._first - 1} have gone" if self._filled < self._first else ""
            raise IndexError(f"frames {[*frames]} are not all in 0 .. {self._all - 1}{gone}")


def _wide(parts: Tensor) -> Tensor:
    """Returns bytes as the widest elements that they consist of."""
    return parts if parts.shape[1] % 8 else parts.view(torch.int64)
