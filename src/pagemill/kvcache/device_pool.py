"""DevicePool: a device's frames as one piece of memory, seen layer by layer as strided views."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from pagemill.attention.interface import LayerCache
from pagemill.errors import KVMemoryError
from pagemill.kvcache.device_streams import CudaStreams
from pagemill.kvcache.frames import FileBackedFrames, FrameStorage, HostFrames
from pagemill.kvcache.gpu_frames import GpuFrames
from pagemill.kvcache.kv_format import SCALE_BYTES, VectorFormat
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
            self.frames = GpuFrames(pieces, total, piece_bytes, CudaStreams(self.device))
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
        format, block_size, beside, frame_stride = shape.format, shape.block_size, at.beside, self.layout.frame_stride
        key_dim, value_dim = format.key.elements(shape.key_dim), format.value.elements(shape.value_dim)

        def view(element: str, dims: tuple[int, ...], strides: tuple[int, ...], offset: int) -> Tensor:
            storage = self.storage.view(getattr(torch, element))
            sizes, strides = (self.frames.bytes.shape[1], shape.kv_heads, *dims), (frame_stride, *strides)
            return torch.as_strided(storage, sizes, strides, begin + offset)

        key_sizes: tuple[int, ...] = (block_size, key_dim)
        value_sizes: tuple[int, ...] = (block_size, value_dim)
        key_strides: tuple[int, ...] = (at.key_head, at.key_token, at.key_dim)
        value_strides: tuple[int, ...] = (at.value_head, at.value_token, at.value_dim)
        if beside > 1:
            key_sizes, key_strides = (block_size, key_dim // beside, beside), (*key_strides, 1)
            value_sizes = (block_size // beside, beside, value_dim)
            value_strides = (at.value_head, at.value_token, 1, at.value_dim)
        key = view(format.key.element, key_sizes, key_strides, 0)
        value = view(format.value.element, value_sizes, value_strides, at.value_offset)
        if not format.key.scaled:
            return LayerCache(key, value)
        per_word = SCALE_BYTES // format.itemsize  # elements

        def words(vector: VectorFormat, dim: int, scales: int, head: int) -> Tensor:
            storage = self.storage.view(torch.int32 if vector.packed > 1 else torch.float32)
            sizes = (self.frames.bytes.shape[1], shape.kv_heads, vector.scales(dim) * block_size)
            strides = (frame_stride // per_word, head // SCALE_BYTES, 1)
            return torch.as_strided(storage, sizes, strides, begin // per_word + scales // SCALE_BYTES)

        return LayerCache(
            key,
            value,
            words(format.key, shape.key_dim, at.key_scales, at.key_scale_head),
            words(format.value, shape.value_dim, at.value_scales, at.value_scale_head),
        )
