"""StreamedFile: streamed frames on disk. An unlinked file, mapped behind the pool's frames, whose bytes attention reads
where they lie; it is written by calls, which say what goes wrong.

What has been written lies in the system's memory, until it is on the disk. If the disk does not take it, the system
notes that before it lets go of the memory, so whoever asks after a read knows whether the read was right.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import mmap
import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pagemill.errors import KVStoreError

logger = logging.getLogger(__name__)

_MAP_FIXED = 0x10
_WAIT_BEFORE = 1
"""A flag of sync_file_range(2), on Linux: waits for what is being written of a range, and tells of all that failed."""

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_int64]
_libc.sync_file_range.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]


class Region(NamedTuple):
    """Names the addresses [begin, begin + bytes): the streamed frames of one contiguous piece of the pool. Whole
    pages."""

    begin: int
    bytes: int


class StreamedFile:
    """Maps frames 0, 1, ... of as many pieces as there are regions, for as long as that memory lives.

    piece_bytes: bytes of a frame in a piece. Raises KVStoreError if the disk has no room for all of it.
    """

    def __init__(self, folder: Path, regions: Sequence[Region], piece_bytes: int) -> None:
        self.folder = folder
        self.regions = regions
        self.piece_bytes = piece_bytes
        self._size = sum(region.bytes for region in regions)
        self._intact = True
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._file = tempfile.TemporaryFile(dir=folder, prefix="streamed-", buffering=0)  # noqa: SIM115
            os.posix_fallocate(self.fileno(), 0, self._size)
            for piece, region in enumerate(regions):
                flags, offset = mmap.MAP_SHARED | _MAP_FIXED, self._offset(piece, 0)
                address = _libc.mmap(region.begin, region.bytes, mmap.PROT_READ, flags, self.fileno(), offset)
                if address != region.begin:
                    raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        except OSError as error:
            raise KVStoreError(
                f"{self._size} bytes for contexts longer than the pool cannot be had in {folder}: {error}; free some, "
                f"name another kv_disk_path, or lower max_model_len"
            ) from error

    def write(self, frame: int, record: NDArray[np.uint8]) -> None:
        """Writes a record [pieces, piece bytes], each piece contiguous, into a frame. Raises KVStoreError if the disk
        does not take it; the frame then holds nothing of use."""
        try:
            for piece, part in enumerate(record):
                _whole(os.pwritev, self.fileno(), part, self._offset(piece, frame))
        except OSError as error:
            raise KVStoreError(f"streamed blocks cannot be written to {self.folder}: {error}") from error

    def read(self, frame: int) -> NDArray[np.uint8]:
        """Returns a frame's record. Raises KVStoreError if the disk cannot read it, or has lost what was written."""
        record = np.empty((len(self.regions), self.piece_bytes), dtype=np.uint8)
        try:
            for piece, part in enumerate(record):
                _whole(os.preadv, self.fileno(), part, self._offset(piece, frame))
        except OSError as error:
            raise KVStoreError(f"streamed blocks cannot be read from {self.folder}: {error}") from error
        if not self._check_intact():
            raise KVStoreError(f"{self.folder} has lost streamed blocks")
        return record

    def take_loss(self) -> bool:
        """Returns whether the disk has lost what was written. If so, nothing that was read since the last call may be
        used; what is written from now on may be."""
        lost = not self._check_intact()
        self._intact = True
        return lost

    def fileno(self) -> int:
        """Returns the file's descriptor."""
        return self._file.fileno()

    def _check_intact(self) -> bool:
        """Returns whether all that was read until now is what had been written. A loss is remembered."""
        if self._intact and not written_back(self.fileno(), self._size):
            reason = os.strerror(ctypes.get_errno())
            logger.error("the disk has lost streamed blocks that were written to %s: %s", self.folder, reason)
            self._intact = False
        return self._intact

    def _offset(self, piece: int, frame: int) -> int:
        return piece * self.regions[0].bytes + frame * self.piece_bytes


def written_back(file: int, size: int) -> bool:
    """Returns whether the disk took all that the system has written to a file of `size` bytes since the last call. If
    not, `ctypes.get_errno` says why."""
    # Behind the file's end is nothing to wait for.
    taken: bool = _libc.sync_file_range(file, size, 1, _WAIT_BEFORE) == 0
    return taken


def _whole(call: Callable[[int, list[memoryview], int], int], file: int, part: NDArray[np.uint8], offset: int) -> None:
    """Reads or writes all of a part."""
    left = part.data
    while left:
        done = call(file, [left], offset)
        if done == 0:
            raise OSError(errno.EIO, "the file has ended")
        left, offset = left[done:], offset + done
