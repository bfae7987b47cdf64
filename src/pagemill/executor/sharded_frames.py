"""ShardedFrames: gives offload stores the frames of all ranks as those of one pool.

A record is that of a pool with all KV heads, whatever the number of ranks: a block that two ranks have stored is found
by one, and by four. So tiers, sessions and digests know nothing of ranks. All records pass through rank 0's process.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pagemill.errors import EngineDeadError, KVStoreError
from pagemill.executor.rank_messages import FrameWrites, ReadFrames, WriteFrames
from pagemill.executor.ranks import Ranks
from pagemill.executor.record_parts import RecordParts
from pagemill.kvcache.frame_access import FrameAccess, Places, Reading

Bytes = NDArray[np.uint8]


class Mark(NamedTuple):
    """Marks what all ranks have been asked to do: rank 0's mark, and how many messages the others had been sent."""

    own: object | None
    told: int


class ShardedFrames:
    """Implements `FrameAccess` over rank 0's frames and the other ranks'.

    ahead: whether rank 0 asks for steps and copies that others may not have heard of yet when their frames are asked
        for.
    """

    def __init__(self, own: FrameAccess, ranks: Ranks, parts: RecordParts, ahead: bool) -> None:
        self._own = own
        self._ranks = ranks
        self._parts = parts
        self._ahead = ahead

    def read(self, frames: Sequence[int]) -> tuple[Bytes, list[bool]]:
        try:
            answers = self._ask([ReadFrames([*frames], self._told)] * len(self._ranks))
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

    def mark(self) -> Mark:
        return Mark(self._own.mark(), self._told)

    @property
    def _told(self) -> int:
        """How many messages frames that are asked for now come behind."""
        return self._ranks.told if self._ahead else 0

    def begin_writes(self) -> None:
        self._own.begin_writes()
        self._tell(FrameWrites(True))

    def end_writes(self) -> None:
        self._own.end_writes()
        self._tell(FrameWrites(False))

    @contextmanager
    def write(self, frames: Sequence[int], after: Mark | None) -> Iterator[Places]:
        own_mark, told = after or (None, 0)
        records = self._parts.empty(len(frames))
        yield records
        own, *others = self._parts.cut(records)
        with self._own.write(frames, own_mark) as places:
            for place, record in zip(places, own, strict=True):
                place[:] = record
        self._ask([WriteFrames([*frames], told, part.tobytes()) for part in others])

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
