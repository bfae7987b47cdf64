"""Moves blocks between a pool's frames and host memory: by the frames alone, and as the engine does, to its host tier
and back."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import count, cycle, islice
from typing import Any, Protocol

from pagemill.engine.tiers import copying_cores
from pagemill.kvcache.frame_access import FrameAccess, Reading
from pagemill.kvcache.host_store import HostStore
from pagemill.kvcache.offload_tiers import OffloadTiers
from pagemill.kvcache.transfers import BATCH_BYTES, THREADS, Transfers, piece_of
from pagemill.memory.work import BlockName, Load, Save

READINGS = 8
"""Readings that are under way at most, whose records take pinned memory."""
LOADS = 4
"""Loads that are under way at most beside steps."""
BACKLOG_BYTES = 256 << 20
"""So much is let wait to be stored, as `Transfers` has it."""


class Way(Protocol):
    """Moves blocks out of frames and into frames. out, back: how many have moved so far."""

    name: str

    @property
    def out(self) -> int: ...

    @property
    def back(self) -> int: ...

    def save(self, frames: Sequence[int]) -> None:
        """Moves blocks out, and waits until all are in host memory."""

    def load(self, frames: Sequence[int]) -> None:
        """Moves blocks back, and waits until all are in their frames."""

    def begin(self, out: Sequence[int], back: Sequence[int]) -> None:
        """Moves blocks in both directions beside the next step, as far as those before are done. Waits for nothing but
        what the engine would wait for."""

    def settle(self) -> None:
        """Waits for what is under way."""

    def close(self) -> None:
        """Settles, and ends threads."""


class FramesAlone:
    """Implements `Way` by the frames' own reads and writes, in the engine's portions. Nobody looks at the records."""

    name = "frames"

    def __init__(self, frames: FrameAccess, block_bytes: int) -> None:
        self._frames = frames
        self._block_bytes, self._batch = block_bytes, max(1, BATCH_BYTES // block_bytes)
        self._threads = ThreadPoolExecutor(THREADS)
        self._under_way: deque[Future[None]] = deque()
        self.out = self.back = 0

    def save(self, frames: Sequence[int]) -> None:
        readings: deque[Reading] = deque()
        for first in range(0, len(frames), self._batch):
            if len(readings) == READINGS:
                readings.popleft().wait()
            readings.append(self._read(frames[first : first + self._batch]))
        for reading in readings:
            reading.wait()

    def load(self, frames: Sequence[int]) -> None:
        for writing in self._write(frames):
            writing.result()

    def begin(self, out: Sequence[int], back: Sequence[int]) -> None:
        for first in range(0, len(out), self._batch):
            self._read(out[first : first + self._batch])
        while self._under_way and self._under_way[0].done():
            self._under_way.popleft().result()
        if len(self._under_way) < LOADS * -(-len(back) // self._piece(len(back))):
            self._under_way += self._write(back)

    def settle(self) -> None:
        while self._under_way:
            self._under_way.popleft().result()
        wait_for(self._frames)

    def close(self) -> None:
        self.settle()
        self._threads.shutdown()

    def _piece(self, count: int) -> int:
        return piece_of(count, self._block_bytes, THREADS)

    def _read(self, frames: Sequence[int]) -> Reading:
        reading = self._frames.begin_read(frames)
        if not all(reading.whole):
            raise RuntimeError("frames could not be read")
        self.out += len(frames)
        return reading

    def _write(self, frames: Sequence[int]) -> list[Future[None]]:
        before = self._frames.mark()

        def write(part: Sequence[int]) -> None:
            with self._frames.write(part, before):
                pass
            self.back += len(part)

        count = self._piece(len(frames))
        parts = (frames[first : first + count] for first in range(0, len(frames), count))
        return [self._threads.submit(write, part) for part in parts]


class ThroughHostTier:
    """Implements `Way` by `Transfers` over a host tier for `capacity` blocks. Once that is full, each block that comes
    makes another leave. What the engine would drop, since the tier cannot keep up, does not count."""

    name = "host tier"

    def __init__(self, frames: FrameAccess, block_bytes: int, capacity: int) -> None:
        self._frames = frames
        self._store = HostStore(capacity, block_bytes, copying_cores(idle=True))
        self._transfers = Transfers(frames, OffloadTiers([self._store], block_bytes))
        self._at_once = max(1, BACKLOG_BYTES // block_bytes)
        self._numbers, self._loads = count(), count()
        self._kept: list[tuple[bytes, int]] = []
        """Used last first: what is stored beside a load makes the others leave."""
        self._under_way = 0

    @property
    def out(self) -> int:
        return self._transfers.stats().blocks_saved

    @property
    def back(self) -> int:
        return self._transfers.stats().blocks_loaded

    def save(self, frames: Sequence[int]) -> None:
        self._kept = []
        for first in range(0, len(frames), self._at_once):
            saves = self._saves(frames[first : first + self._at_once])
            self._transfers.save(saves)
            self._transfers.flush()
            self._kept = [save.name[:2] for save in saves][::-1] + self._kept
        if dropped := self._transfers.stats().blocks_dropped:
            raise RuntimeError(f"{dropped} blocks were dropped")

    def load(self, frames: Sequence[int]) -> None:
        self._transfers.load(Load(next(self._loads), [*islice(cycle(self._kept), len(frames))], [*frames]))
        while self._transfers.loading:
            for arrived in self._transfers.finished(wait_s=1.0).values():
                if not all(arrived):
                    raise RuntimeError("blocks have not come back")
        wait_for(self._frames)

    def begin(self, out: Sequence[int], back: Sequence[int]) -> None:
        self._under_way -= len(self._transfers.finished())
        self._transfers.save(self._saves(out))
        if self._under_way < LOADS:
            self._transfers.load(Load(next(self._loads), [*islice(cycle(self._kept), len(back))], [*back]))
            self._under_way += 1

    def settle(self) -> None:
        while self._transfers.loading:
            self._under_way -= len(self._transfers.finished(wait_s=1.0))
        self._transfers.flush()
        wait_for(self._frames)

    def close(self) -> None:
        self.settle()
        self._transfers.close()
        self._store.close()

    def _saves(self, frames: Sequence[int]) -> list[Save]:
        return [
            Save(frame, BlockName(next(self._numbers).to_bytes(8, "little"), 0, b"", 0, "default")) for frame in frames
        ]


def wait_for(frames: FrameAccess) -> None:
    """Waits until the device has done what it has been asked to compute."""
    mark: Any = frames.mark()
    if mark is not None:
        mark.synchronize()
