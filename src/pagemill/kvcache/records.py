"""Records: contents of blocks as bytes, the same in every tier.

A record is an array [record_bytes], or, in a pool whose frames lie in pieces, [pieces, record_bytes / pieces], of which
each row is contiguous.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray


class Place(Protocol):
    """Where a record is to be written, `place[:] = record`: an array of its shape, or a frame of a device."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    def __setitem__(self, whole: slice, record: NDArray[np.uint8], /) -> None: ...


Records = Sequence[NDArray[np.uint8]] | NDArray[np.uint8]
Places = Sequence[Place] | NDArray[np.uint8]
