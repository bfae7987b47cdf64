"""Records: contents of blocks as bytes, the same in every tier.

A record is an array [record_bytes], or, in a pool whose frames lie in pieces, [pieces, record_bytes / pieces], of which
each row is contiguous.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Records = Sequence[NDArray[np.uint8]] | NDArray[np.uint8]
