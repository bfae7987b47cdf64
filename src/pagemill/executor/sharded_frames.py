"""ShardedFrames: gives offload stores the frames of all ranks as those of one pool.

A record is that of a pool with all KV heads, whatever the number of ranks: a block that two ranks have stored is found
by one, and by four. So tiers, sessions and digests know nothing of ranks. All records pass through rank 0's process.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pagemill.errors import EngineDeadError, KVStoreError
from pagemill.executor.rank_messages import FrameWrites, ReadFrames, WriteFrames
from pagemill.executor.ranks import Ranks
from pagemill.kvcache.frame_access import FrameAccess, Places, Reading
from pagemill.kvcache.layout import FrameShape, layer_major

Bytes = NDArray[np.uint8]


class RecordParts:
    """Cuts records of a shape with all KV heads into those of ranks, and joins them. Layer-major: in each piece, the
    heads lie one after the other.

    heads: by rank, which heads it has; several may have the same.
    """

    def __init__(self, whole: FrameShape, part: FrameShape, heads: Sequence[slice]) -> None:
        self._pieces = whole.places
        self._piece, self._part = (layer_major(shape, 1).piece_bytes for shape in (whole, part))
        head = whole.block_size * whole.format.slot_bytes(1, whole.key_dim, whole.value_dim)
        self._ranges = [slice(each.start * head, each.stop * head) for each in heads]

    def empty(self, count: int) -> Bytes:
        """Returns so many whole records, [n, pieces, piece bytes], of zeros."""
        return np.zeros((count, self._pieces, self._piece), dtype=np.uint8)

    def join(self, parts: Sequence[Bytes]) -> Bytes:
        """Returns whole records [n, pieces, piece bytes] for all ranks' [n, record bytes]."""
        records = self.empty(len(parts[0]))
        for part, where in zip(parts, self._ranges, strict=True):
            pieces = part.reshape(len(records), self._pieces, self._part)
            records[:, :, where] = pieces[:, :, : where.stop - where.start]
        return records

    def cut(self, records: Bytes) -> list[Bytes]:
        """Returns each rank's records [n, pieces, piece bytes] for whole ones."""
        parts = [np.zeros((len(records), self._pieces, self._part), dtype=np.uint8) for _ in self._ranges]
        for part, where in zip(parts, self._ranges, strict=True):
            part[:, :, : where.stop - where.start] = records[:, :, where]
        return parts


class ShardedFrames:
    """Implements `FrameAccess` over rank 0's frames and the other ranks'."""

    def __init__(self, own: FrameAccess, ranks: Ranks, parts: RecordParts) -> None:
        self._own = own
        self._ranks = ranks
        self._parts = parts

    def read(self, frames: Sequence[int]) -> tuple[Bytes, list[bool]]:
        try:
            answers = self._ask([ReadFrames([*frames])] * len(self._ranks))
        except KVStoreError:
            return np.zeros((len(frames), 0), dtype=np.uint8), [False] * len(frames)
        records, whole = self._own.read(frames)
        parts = [records]
        for content, read in answers:
            parts.append(np.frombuffer(content, dtype=np.uint8).reshape(len(frames), -1))
            whole = [a and b for a, b in zip(whole, read, strict=True)]
        return self._parts.join(parts).reshape(len(frames), -1), whole

    def begin_read(self, frames: Sequence[int]) -> Reading:
        return Reading(*self.read(frames))

    def mark(self) -> object | None:
        return self._own.mark()

    def begin_writes(self) -> None:
        self._own.begin_writes()
        self._tell(FrameWrites(True))

    def end_writes(self) -> None:
        self._own.end_writes()
        self._tell(FrameWrites(False))

    @contextmanager
    def write(self, frames: Sequence[int], after: Any) -> Iterator[Places]:
        records = self._parts.empty(len(frames))
        yield records
        own, *others = self._parts.cut(records)
        with self._own.write(frames, after) as places:
            for place, record in zip(places, own, strict=True):
                place[:] = record
        self._ask([WriteFrames([*frames], part.tobytes()) for part in others])

    def follow_writes(self) -> None:
        """Lets this rank's device follow; the others' have done so when they answered."""
        self._own.follow_writes()

    def _tell(self, message: FrameWrites) -> None:
        with suppress(KVStoreError):
            self._ask([message] * len(self._ranks))

    def _ask(self, messages: Sequence[Any]) -> list[Any]:
        """Returns the ranks' answers. Raises KVStoreError, as a block that cannot be had, where a rank is lost: the
        next step says so."""
        try:
            return self._ranks.ask_frames(messages)
        except EngineDeadError as error:
            raise KVStoreError(error.message) from error
