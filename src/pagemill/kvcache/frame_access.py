"""FrameAccess: how offload stores read and write frames of the pool, whatever device that lies on.

A block's content travels as a record, the same bytes in every store: an array [record_bytes], or, in a pool whose
frames lie in pieces, [pieces, record_bytes / pieces], of which each row is contiguous.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray


class Place(Protocol):
    """Takes a record, `place[:] = record`, as an array of its shape does."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    def __setitem__(self, whole: slice, record: NDArray[np.uint8], /) -> None: ...


Records = Sequence[NDArray[np.uint8]] | NDArray[np.uint8]
Places = Sequence[Place] | NDArray[np.uint8]


def _there() -> None:
    """Waits for nothing: the records are there."""


class Reading(NamedTuple):
    """Is what `begin_read` has begun: records [n, record bytes], undefined until `wait` has returned, and which of the
    frames could be read. Any thread may wait, and several may."""

    records: NDArray[np.uint8]
    whole: list[bool]
    wait: Callable[[], None] = _there


class FrameAccess(Protocol):
    """Copies records, uint8 [record bytes], out of frames and into them."""

    def read(self, frames: Sequence[int]) -> tuple[NDArray[np.uint8], list[bool]]:
        """Returns the records [n, record bytes] of these frames, and which of them could be read."""

    def begin_read(self, frames: Sequence[int]) -> Reading:
        """Begins to read as `read` does. The frames may be written by whatever is asked for from now on."""

    def mark(self) -> object | None:
        """Returns a mark of what the device has been asked to do so far; None on a device that does it at once."""

    def begin_writes(self) -> None:
        """Prepares for `write`; each call is followed by one of `end_writes`."""

    def end_writes(self) -> None: ...

    def write(self, frames: Sequence[int], after: Any) -> AbstractContextManager[Places]:
        """Gives a place for each frame's record, to be filled by any thread. When the context has ended, the frames
        hold them; what was not filled is undefined. What `after` marks comes first. Nobody may use the frames before,
        and nobody but the caller waits. Raises KVStoreError, on leaving, if a disk does not take them."""
