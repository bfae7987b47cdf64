"""ReadAhead: brings into memory what lies in streamed frames on disk, before attention reads it there.

The system keeps what it has memory for; what the process maps is bounded: a layer's blocks are read ahead while the
layers before it are computed, and let go of when it has been. What a disk cannot read is found then, and fails the
step.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
from numpy.typing import NDArray

from pagemill.errors import KVStoreError
from pagemill.kvcache.layer_groups import LayerGroups
from pagemill.kvcache.pages import POPULATE_READ, advise
from pagemill.kvcache.streamed_file import Region, StreamedFile

LAYERS_AHEAD = 2
READ_BYTES = 4 << 20
"""The most that is read with one call."""

Runs = list[tuple[int, int]]
"""(first byte, bytes) within a region, whole pages."""


class ReadAhead:
    """Reads the streamed frames of a step's rows, layer by layer. Its methods belong to one thread."""

    def __init__(self, file: StreamedFile, groups: LayerGroups) -> None:
        at = [groups.place(layer) for layer in range(groups.num_layers)]
        self._groups = [group for group, _ in at]
        self._regions = [file.regions[min(place, len(file.regions) - 1)] for _, place in at]
        self._piece_bytes = file.piece_bytes
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="kv-stream")
        self._under_way: dict[int, tuple[Runs, Future[bool]]] = {}

    def step(self, frames: Sequence[NDArray[np.int32]]) -> Callable[[int], None]:
        """Returns a function that is called with each layer's number when that begins.

        frames: by layer group, those that the step reads, counted from the first streamed one. The function raises
        KVStoreError if the disk cannot read them.
        """
        runs = [_runs(each, self._piece_bytes) for each in frames]
        layers = len(self._regions)
        for layer, (_, reading) in [*self._under_way.items()]:  # of an earlier step, maybe long ago: it is tried anew
            if reading.done() and not reading.result():
                del self._under_way[layer]

        def read(layer: int) -> None:
            wanted = runs[self._groups[layer]]
            if layer not in self._under_way or self._under_way[layer][0] != wanted:  # by the end of the step before
                self._under_way[layer] = wanted, self._reader.submit(read_runs, self._regions[layer], wanted)

        def begin(layer: int) -> None:
            for ahead in range(layer, layer + 1 + LAYERS_AHEAD):
                read(ahead % layers)
            if not self._under_way.pop(layer)[1].result():
                self._under_way.clear()  # the step ends here: whoever needs these blocks later reads them anew
                raise KVStoreError(
                    f"the disk cannot read blocks of this context, of layer {layer}; see the system's log, and name "
                    f"another kv_disk_path"
                )
            before = self._regions[layer - 1]
            if before != self._regions[layer]:
                advise(*before, mmap.MADV_DONTNEED)

        return begin

    def close(self) -> None:
        self._reader.shutdown(cancel_futures=True)


def _runs(frames: NDArray[np.int32], frame_bytes: int) -> Runs:
    """Returns the bytes of these frames in a piece, one run for neighbours."""
    frames = np.unique(frames)
    found = []
    for run in np.split(frames, np.flatnonzero(np.diff(frames) != 1) + 1) if len(frames) else ():
        begin = int(run[0]) * frame_bytes // mmap.PAGESIZE * mmap.PAGESIZE
        found.append((begin, (int(run[-1]) + 1) * frame_bytes - begin))
    return found


def read_runs(region: Region, runs: Runs) -> bool:
    """Asks for all first, so that the medium is never idle, then waits and maps. Returns whether all could be read."""
    for begin, size in runs:
        advise(region.begin + begin, size, mmap.MADV_WILLNEED)
    for begin, size in runs:
        for at in range(begin, begin + size, READ_BYTES):
            taken = advise(region.begin + at, min(READ_BYTES, begin + size - at), POPULATE_READ)
            if not taken and ctypes.get_errno() in (errno.EFAULT, errno.EIO):
                return False
    return True
