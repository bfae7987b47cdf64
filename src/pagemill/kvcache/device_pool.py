"""DevicePool: the device tier's frames as one piece of memory, seen layer by layer as strided views.

On CPU the memory comes from mmap: page-aligned, in huge pages where the system has them, and pages that were never
written cost nothing.
"""

from __future__ import annotations

import logging
import mmap
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pagemill import _kernels
from pagemill.attention.interface import LayerCache
from pagemill.errors import KVMemoryError, KVStoreError
from pagemill.kvcache.advice import HUGE, private_memory
from pagemill.kvcache.device_frames import DeviceFrames
from pagemill.kvcache.kv_format import KVFormat
from pagemill.kvcache.layer_groups import LayerGroups
from pagemill.kvcache.layout import SCALE_BYTES, KVLayout, block_major, layer_major
from pagemill.kvcache.lower_file import LowerFile, Region
from pagemill.kvcache.read_ahead import ReadAhead
from pagemill.kvcache.records import Places

logger = logging.getLogger(__name__)

_NORESERVE = 0x4000 if sys.platform == "linux" else 0
"""What a file takes the place of is no memory."""
PAGES_APART = 64
"""Frames of whole cache lines that are whole pages, which lower frames begin and end at."""


class DevicePool:
    """`num_frames` frames; each holds K and V of `block_size` tokens for every place (layer) of one layer group.

    room: bytes that it can grow to, on CPU: addresses that are set aside, without memory. Where the system does not
        give them, and elsewhere, it cannot grow.
    lower_frames: frames beside these, numbered from `first_lower` on, for blocks that are streamed: in host memory, or
        in a file in `lower_folder`; on CPU only.
    value_dim: width of values; None: that of keys.
    layout: constructor of the layout, by default layer-major on CPU and block-major elsewhere.
    Raises KVMemoryError if the memory cannot be had. Contents are undefined at first.
    """

    def __init__(
        self,
        num_frames: int,
        groups: LayerGroups,
        num_kv_heads: int,
        head_dim: int,
        block_size: int,
        format: KVFormat,
        device: torch.device | str = "cpu",
        layout: Callable[..., KVLayout] | None = None,
        room: int = 0,
        lower_frames: int = 0,
        lower_folder: Path | None = None,
        value_dim: int | None = None,
    ) -> None:
        self.num_frames = num_frames
        self.groups = groups
        self.block_size = block_size
        self.dtype = dtype = getattr(torch, format.element)
        self.device = torch.device(device)
        make = layout or default_layout(self.device)
        of_frames = partial(
            make,
            places=groups.layers_per_frame,
            kv_heads=num_kv_heads,
            block_size=block_size,
            key_dim=head_dim,
            value_dim=value_dim or head_dim,
            itemsize=format.itemsize,
            scaled=format.scaled,
            pairs=format.pairs,
        )
        most = room // of_frames(frames=1).frame_bytes if self.device.type == "cpu" else 0
        if lower_frames and self.device.type != "cpu":
            raise KVMemoryError("contexts longer than the pool are streamed on CPU only; lower max_model_len")
        for self.capacity in (max(most, num_frames), num_frames):
            self.first_lower = -(-self.capacity // PAGES_APART) * PAGES_APART if lower_frames else self.capacity
            self.total_frames = self.first_lower + -(-lower_frames // PAGES_APART) * PAGES_APART
            self.layout = of_frames(frames=self.total_frames)
            try:
                self.storage, self._memory = _allocate(
                    self.layout.pool_elements, dtype, self.device, _NORESERVE if lower_frames else 0
                )
                break
            except KVMemoryError:
                if self.capacity == num_frames:
                    raise
        shape = (num_kv_heads, block_size, head_dim, value_dim or head_dim)
        self._places = [self._place(place, *shape) for place in range(groups.layers_per_frame)]
        pieces, per_frame, stride = (
            (groups.layers_per_frame, self.layout.chunk_bytes // dtype.itemsize, self.layout.place_stride)
            if self.layout.place_stride > self.layout.frame_stride
            else (1, self.layout.frame_bytes // dtype.itemsize, 0)
        )
        self._frames = torch.as_strided(
            self.storage, (pieces, self.total_frames, per_frame), (stride, self.layout.frame_stride, 1)
        )
        """[pieces, frames, elements]: the contiguous pieces of every frame."""
        self._on_device = None if self.device.type == "cpu" else DeviceFrames(self._frames)
        members = [layer for group in groups.groups for layer in group.layers]
        self._where = {layer: groups.place(layer) for layer in members}
        self._file: LowerFile | None = None
        if lower_folder is not None and lower_frames:
            regions = [self.streamed_region(piece) for piece in range(pieces)]
            self._file = LowerFile(lower_folder, regions, self.pieces[2], self._frames[0, 0].nbytes)

    def layer(self, layer: int) -> LayerCache:
        """Keys and values of a model layer, as views."""
        return self._places[self._where[layer][1]]

    def group_of(self, layer: int) -> int:
        """Index of the layer group that a model layer belongs to."""
        return self._where[layer][0]

    def copy_frames(self, source: Tensor, target: Tensor) -> list[int]:
        """Copies frames source[i] -> target[i] (integers [n]), all places, in order: a frame may come twice. Returns
        the targets that do not hold what they should, since the disk did not read or write it."""
        if not len(source):
            return []
        source, target = (ids.to(self.device, torch.int64).contiguous() for ids in (source, target))
        if self._on_device is not None:
            self._on_device.copy(source, target)
            return []
        for ids in (source, target):
            if int(ids.min()) < 0 or int(ids.max()) >= self.total_frames:
                raise IndexError(f"frames {ids.tolist()} are not all in 0 .. {self.total_frames - 1}")
        if self._file is not None and max(int(source.max()), int(target.max())) >= self.first_lower:
            return self._copy_checked(source.tolist(), target.tolist())
        pieces, piece_stride, frame_stride = self.pieces
        _kernels.copy_frames(
            self.storage.data_ptr(), pieces, piece_stride, frame_stride, self._frames[0, 0].nbytes,
            source.numpy(), target.numpy(),
        )  # fmt: skip
        return []

    def _copy_checked(self, source: Sequence[int], target: Sequence[int]) -> list[int]:
        lost = set[int]()
        for here, there in zip(source, target, strict=True):
            lost.discard(there)
            if here in lost:
                lost.add(there)
                continue
            try:
                self._put(there, self._record(here))
            except KVStoreError as error:
                logger.error("%s", error)
                lost.add(there)
        return sorted(lost)

    @property
    def streams_from_disk(self) -> bool:
        return self._file is not None

    def take_loss(self) -> bool:
        """Whether the disk has lost what was written to lower frames. If so, nothing that they hold, or that was read
        from them since this was asked last, may be used."""
        if self._file is None or self._file.intact():
            return False
        self._file.renew()
        return True

    @property
    def nbytes(self) -> int:
        """Of all frames."""
        return self.num_frames * self.layout.frame_bytes

    def resize(self, num_frames: int) -> None:
        """Gives the memory of the frames behind the first `num_frames` back to the system, or lets the pool have more.

        Raises KVMemoryError, and changes nothing, for more than `capacity`.
        """
        if num_frames > self.capacity:
            raise KVMemoryError(
                f"the KV pool cannot have {num_frames} blocks ({num_frames * self.layout.frame_bytes} bytes): it was "
                f"made to grow to {self.capacity}; ask for less, or start with more kv_memory",
                param="kv_memory",
            )
        if num_frames < self.num_frames and self._memory is not None:
            pieces, piece_stride, frame_stride = self.pieces
            for piece in range(pieces):
                first, last = (piece * piece_stride + frame * frame_stride for frame in (num_frames, self.num_frames))
                first, last = -(-first // mmap.PAGESIZE) * mmap.PAGESIZE, last // mmap.PAGESIZE * mmap.PAGESIZE
                if first < last:
                    self._memory.madvise(mmap.MADV_DONTNEED, first, last - first)
        self.num_frames = num_frames

    def read_ahead(self) -> ReadAhead:
        """For lower frames in a file."""
        where = [self._where[layer] for layer in sorted(self._where)]
        regions = [self.streamed_region(place if len(self._frames) > 1 else 0) for _, place in where]
        return ReadAhead(regions, [group for group, _ in where], self._frames.stride(1) * self.dtype.itemsize)

    def streamed_region(self, piece: int) -> Region:
        """Returns the addresses at which a piece's streamed frames lie."""
        size, (per_piece, per_frame, _) = self.dtype.itemsize, self._frames.stride()
        begin = self.storage.data_ptr() + (piece * per_piece + self.first_lower * per_frame) * size
        return Region(begin, (self.total_frames - self.first_lower) * per_frame * size)

    @property
    def pieces(self) -> tuple[int, int, int]:
        """How many contiguous pieces a frame has; bytes between a frame's pieces, and between a piece's frames."""
        size = self.dtype.itemsize
        return self._frames.shape[0], self._frames.stride(0) * size, self._frames.stride(1) * size

    @property
    def record_bytes(self) -> int:
        """Of one frame, as `read_frames` gives it."""
        pieces, _, elements = self._frames.shape
        return int(pieces * elements * self.dtype.itemsize)

    def read_frames(self, frames: Sequence[int]) -> tuple[NDArray[np.uint8], list[bool]]:
        """Contents of frames as records [n, frame bytes], on the host: the frame's pieces one after the other. And
        which of them could be read."""
        if self._on_device is not None:
            return self._on_device.read(frames), [True] * len(frames)
        records = np.empty((len(frames), *self._bytes.shape[::2]), dtype=np.uint8)
        whole = [self._read_into(record, frame) for record, frame in zip(records, frames, strict=True)]
        return records.reshape(len(frames), -1), whole

    def mark(self) -> torch.cuda.Event | None:
        """What the device has been asked to do so far, on a device that does it later."""
        return None if self._on_device is None else self._on_device.mark()

    @contextmanager
    def records(self, frames: Sequence[int], after: torch.cuda.Event | None = None) -> Iterator[Places]:
        """A place for each frame's record, to be written when what `after` marks is done: the frames themselves; for
        frames in a file, memory that is copied into them at the end. What is not written is undefined. Raises
        KVStoreError if the disk does not take it."""
        if self._on_device is not None:
            yield self._on_device.records(frames, after)
            return
        raw = self._bytes
        staged = {frame: np.empty_like(raw[:, 0]) for frame in frames if self._in_file(frame)}
        yield [staged[frame] if frame in staged else raw[:, frame] for frame in frames]
        for frame, record in staged.items():
            self._put(frame, record)

    @property
    def _bytes(self) -> NDArray[np.uint8]:
        """[pieces, frames, bytes], on CPU."""
        raw: NDArray[np.uint8] = self._frames.view(torch.uint8).numpy()
        return raw

    def _in_file(self, frame: int) -> bool:
        return self._file is not None and frame >= self.first_lower

    def _record(self, frame: int) -> NDArray[np.uint8]:
        """Raises KVStoreError."""
        if self._file is not None and self._in_file(frame):
            return self._file.read(frame - self.first_lower)
        return self._bytes[:, frame]

    def _read_into(self, record: NDArray[np.uint8], frame: int) -> bool:
        try:
            record[:] = self._record(frame)
        except KVStoreError as error:
            logger.warning("%s", error)
            return False
        return True

    def _put(self, frame: int, record: NDArray[np.uint8]) -> None:
        """Raises KVStoreError."""
        if self._file is not None and self._in_file(frame):
            self._file.write(frame - self.first_lower, record)
        else:
            self._bytes[:, frame] = record

    def _place(self, place: int, kv_heads: int, block_size: int, key_dim: int, value_dim: int) -> LayerCache:
        at = self.layout
        base = place * at.place_stride

        def view(shape: tuple[int, ...], strides: tuple[int, ...], begin: int) -> Tensor:
            shape, strides = (self.total_frames, kv_heads, *shape), (at.frame_stride, *strides)
            return torch.as_strided(self.storage, shape, strides, begin)

        if at.pairs:
            key = view((block_size, key_dim // 2, 2), (at.key_head, at.key_token, at.key_dim, 1), base)
            strides = (at.value_head, at.value_token, 1, at.value_dim)
            value = view((block_size // 2, 2, value_dim), strides, base + at.value_offset)
        else:
            key = view((block_size, key_dim), (at.key_head, at.key_token, at.key_dim), base)
            value_strides = (at.value_head, at.value_token, at.value_dim)
            value = view((block_size, value_dim), value_strides, base + at.value_offset)
        if not at.scale_head:
            return LayerCache(key, value)
        per_scale = SCALE_BYTES // self.dtype.itemsize  # elements
        scale_strides = (at.frame_stride // per_scale, at.scale_head // SCALE_BYTES, 1)
        key_scale, value_scale = (
            torch.as_strided(
                self.storage.view(torch.float32),
                (self.total_frames, kv_heads, block_size),
                scale_strides,
                base // per_scale + scales // SCALE_BYTES,
            )
            for scales in (at.key_scales, at.value_scales)
        )
        return LayerCache(key, value, key_scale, value_scale)


def default_layout(device: torch.device) -> Callable[..., KVLayout]:
    """The constructor of the layout that a device reads fastest."""
    return layer_major if device.type == "cpu" else block_major


def _allocate(elements: int, dtype: torch.dtype, device: torch.device, flags: int) -> tuple[Tensor, mmap.mmap | None]:
    """The memory as a tensor, and as what can be given back in part, on CPU."""
    nbytes = elements * dtype.itemsize
    try:
        if device.type != "cpu":
            return torch.empty(elements, dtype=dtype, device=device), None
        memory = private_memory(nbytes, HUGE, flags)
        return torch.frombuffer(memory, dtype=dtype), memory
    except (OSError, OverflowError, ValueError, RuntimeError) as error:  # torch's out-of-memory is a RuntimeError
        raise KVMemoryError(
            f"the KV pool of {nbytes} bytes could not be allocated on {device}: {error}; lower kv_memory",
            param="kv_memory",
        ) from error
