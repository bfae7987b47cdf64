"""DevicePool: a device's frames as one piece of memory, seen layer by layer as strided views."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from pagemill.attention.interface import LayerCache
from pagemill.errors import KVMemoryError
from pagemill.kvcache.frames import FileBackedFrames, FrameStorage, HostFrames
from pagemill.kvcache.gpu_frames import GpuFrames
from pagemill.kvcache.kv_format import SCALE_BYTES
from pagemill.kvcache.layout import FrameShape, KVLayout, LayoutMaker, layer_major
from pagemill.kvcache.streamed_file import StreamedFile

PAGES_APART = 64
"""Frames of whole cache lines that are whole pages, which streamed frames begin and end at."""


class DevicePool:
    """`num_frames` frames of a shape, and beside them frames whose blocks are streamed.

    room: bytes that it can grow to, on CPU: addresses that are set aside, without memory. Where the system does not
        give them, and elsewhere, it cannot grow.
    streamed_frames: frames numbered from `first_streamed` on, in host memory, or in a file in `streamed_folder`; on
        CPU only.
    Raises KVMemoryError if the memory, and KVStoreError if the file cannot be had. Contents are undefined at first.
    """

    frames: FrameStorage
    """The bytes, and who copies, reads and writes them."""
    streamed_file: StreamedFile | None = None
    """The file that streamed frames lie in, if they do."""

    def __init__(
        self,
        num_frames: int,
        shape: FrameShape,
        device: torch.device | str = "cpu",
        layout: LayoutMaker = layer_major,
        room: int = 0,
        streamed_frames: int = 0,
        streamed_folder: Path | None = None,
    ) -> None:
        self.num_frames = num_frames
        self.shape = shape
        self.device = torch.device(device)
        self.dtype: torch.dtype = getattr(torch, shape.format.element)
        if streamed_frames and self.device.type != "cpu":
            raise KVMemoryError("contexts longer than the pool are streamed on CPU only; lower max_model_len")
        most = room // layout(shape, 1).frame_bytes if self.device.type == "cpu" else 0
        for self.capacity in (max(most, num_frames), num_frames):
            try:
                self._open(layout, streamed_frames, streamed_folder)
                break
            except KVMemoryError:
                if self.capacity == num_frames:
                    raise
        self.storage = self.frames.bytes.view(-1).view(self.dtype)
        self._layout_of = layout
        places = [self._view(shape, self.layout, place * self.layout.place_stride) for place in range(shape.places)]
        self._layers = {layer: places[shape.groups.place(layer)[1]] for layer in range(shape.groups.num_layers)}

    def _open(self, layout: LayoutMaker, streamed_frames: int, folder: Path | None) -> None:
        apart = PAGES_APART if streamed_frames else 1
        self.first_streamed = -(-self.capacity // apart) * apart
        total = self.first_streamed + -(-streamed_frames // apart) * apart
        self.layout = layout(self.shape, total)
        pieces, piece_bytes = self.layout.frame_bytes // self.layout.piece_bytes, self.layout.piece_bytes
        if self.device.type != "cpu":
            self.frames = GpuFrames(pieces, total, piece_bytes, self.device)
        elif streamed_frames and folder is not None:
            frames = FileBackedFrames(pieces, total, piece_bytes, first=self.first_streamed, folder=folder)
            self.frames, self.streamed_file = frames, frames.file
        elif self.capacity > self.num_frames:
            HostFrames(pieces, self.num_frames, piece_bytes)  # raises where the system has not even these
            # Room that was reserved would count as used by a child, and the system would refuse to fork.
            self.frames = HostFrames(pieces, total, piece_bytes, reserve=False)
        else:
            self.frames = HostFrames(pieces, total, piece_bytes, reserve=not streamed_frames)

    def layer(self, layer: int) -> LayerCache:
        """Returns the keys and values of a model layer, as views."""
        return self._layers[layer]

    def packed_layer(self, shape: FrameShape, place: int, index: int) -> LayerCache:
        """Returns the keys and values of a layer of another shape, of the same format, as views: the one with this
        index among those of that shape that lie in one place of each frame."""
        layout = self._layout_of(shape, 1)
        begin = place * self.layout.place_stride + index * layout.place_bytes // self.dtype.itemsize
        return self._view(shape, layout, begin)

    @property
    def nbytes(self) -> int:
        """Bytes of all frames, without streamed ones."""
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
        self.frames.release(num_frames, self.num_frames)
        self.num_frames = num_frames

    def _view(self, shape: FrameShape, at: KVLayout, begin: int) -> LayerCache:
        """Returns a layer of this shape, laid out like this from element `begin` of each frame on."""
        block_size, pairs, frame_stride = shape.block_size, at.pairs, self.layout.frame_stride

        def view(dims: tuple[int, ...], strides: tuple[int, ...], offset: int) -> Tensor:
            sizes, strides = (self.frames.bytes.shape[1], shape.kv_heads, *dims), (frame_stride, *strides)
            return torch.as_strided(self.storage, sizes, strides, begin + offset)

        if pairs:
            key = view((block_size, shape.key_dim // 2, 2), (at.key_head, at.key_token, at.key_dim, 1), 0)
            strides = (at.value_head, at.value_token, 1, at.value_dim)
            value = view((block_size // 2, 2, shape.value_dim), strides, at.value_offset)
        else:
            key = view((block_size, shape.key_dim), (at.key_head, at.key_token, at.key_dim), 0)
            value_strides = (at.value_head, at.value_token, at.value_dim)
            value = view((block_size, shape.value_dim), value_strides, at.value_offset)
        if not shape.format.scaled:
            return LayerCache(key, value)
        words = self.storage.view(torch.float32)
        per_scale = SCALE_BYTES // self.dtype.itemsize  # elements
        sizes = (self.frames.bytes.shape[1], shape.kv_heads, block_size)
        scale_strides = (frame_stride // per_scale, at.scale_head // SCALE_BYTES, 1)
        key_scale, value_scale = (
            torch.as_strided(words, sizes, scale_strides, begin // per_scale + scales // SCALE_BYTES)
            for scales in (at.key_scales, at.value_scales)
        )
        return LayerCache(key, value, key_scale, value_scale)
