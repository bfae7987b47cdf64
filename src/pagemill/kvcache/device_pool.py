"""DevicePool: a device's frames as one piece of memory, seen layer by layer as strided views."""

from __future__ import annotations

import logging
import math
from pathlib import Path

import torch
from torch import Tensor

from pagemill.attention.interface import AttentionBatch, LayerCache
from pagemill.errors import KVMemoryError
from pagemill.kvcache.device_streams import CudaStreams, DeviceStreams
from pagemill.kvcache.frames import FileBackedFrames, FrameStorage, HostFrames
from pagemill.kvcache.gpu_frames import GpuFrames
from pagemill.kvcache.kv_format import SCALE_BYTES, VectorFormat
from pagemill.kvcache.layout import FrameShape, KVLayout, LayoutMaker, layer_major
from pagemill.kvcache.streamed_file import StreamedFile
from pagemill.kvcache.streamed_view import Numbering, StreamedView
from pagemill.kvcache.streaming_gpu_frames import Parts, StreamingGpuFrames

logger = logging.getLogger(__name__)

PAGES_APART = 64
"""Frames of whole cache lines that are whole pages, which streamed frames begin and end at."""


class DevicePool:
    """`num_frames` frames of a shape, and beside them frames whose blocks are streamed.

    room: bytes that it can grow to: addresses that are set aside, without memory. Where the system does not give them,
        or a device has no driver that maps memory to them, it cannot grow.
    streamed_frames: frames numbered from `first_streamed` on, in host memory, or in a file in `streamed_folder`; from
        there on CPU only.
    streams: of a device whose work is asynchronous, and has streamed blocks brought to it, or maps its memory; None:
        CUDA's own, if it is a GPU.
    Raises KVMemoryError if the memory, and KVStoreError if the file cannot be had. Contents are undefined at first.
    """

    frames: FrameStorage
    """The bytes, and who copies, reads and writes them."""
    streamed_file: StreamedFile | None = None
    """The file that streamed frames lie in, if they do."""
    streamed_view: StreamedView | None = None
    """Finds what is brought of streamed frames to a device that does not read the host's memory."""

    def __init__(
        self,
        num_frames: int,
        shape: FrameShape,
        device: torch.device | str = "cpu",
        layout: LayoutMaker = layer_major,
        room: int = 0,
        streamed_frames: int = 0,
        streamed_folder: Path | None = None,
        streams: DeviceStreams | None = None,
    ) -> None:
        self.num_frames = num_frames
        self.shape = shape
        self.device = torch.device(device)
        self.dtype: torch.dtype = getattr(torch, shape.format.element)
        if self.device.type != "cpu":
            streams = streams or CudaStreams(self.device)
        elif streams is not None and streams.driver is None and not streamed_frames:
            streams = None
        self.streams = streams
        grows = room > 0 and (streams is None or streams.driver is not None)
        most = room // layout(shape, 1).frame_bytes if grows else 0
        for self.capacity in (max(most, num_frames), num_frames):
            try:
                self._open(layout, streamed_frames, streamed_folder)
                break
            except KVMemoryError as error:
                if self.capacity == num_frames or error.param == "kv_host_memory":
                    raise
                if streams is not None:
                    what = "the KV pool on %s keeps its memory, and cannot grow: %s"
                    logger.warning(what, self.device, error)
        self.storage = self.frames.bytes.view(-1).view(self.dtype)
        self._layout_of = layout
        self._layers = self._views(self.frames.bytes.shape[1], self.layout.frame_stride)
        if isinstance(self.frames, StreamingGpuFrames):
            numbering, count = self._numbering(streamed_frames)
            self.streamed_view = StreamedView(self._views(count, numbering.stride), numbering, shape.block_size)

    def _open(self, layout: LayoutMaker, streamed_frames: int, folder: Path | None) -> None:
        apart = PAGES_APART if streamed_frames and self.streams is None else 1
        self.first_streamed = -(-self.capacity // apart) * apart
        total = self.first_streamed + -(-streamed_frames // apart) * apart
        self.layout = layout(self.shape, total)
        pieces, piece_bytes = self.layout.frame_bytes // self.layout.piece_bytes, self.layout.piece_bytes
        filled = self.num_frames if self.num_frames < self.capacity else None
        if self.streams is not None and streamed_frames:
            self._numbering(streamed_frames)  # raises where tables cannot name so many frames
            parts = Parts(self.shape.places, self.layout.place_bytes)
            self.frames = StreamingGpuFrames(self.capacity, piece_bytes, self.streams, streamed_frames, parts, filled)
        elif self.streams is not None:
            self.frames = GpuFrames(pieces, total, piece_bytes, self.streams, filled=filled)
        elif streamed_frames and folder is not None:
            frames = FileBackedFrames(pieces, total, piece_bytes, first=self.first_streamed, folder=folder)
            self.frames, self.streamed_file = frames, frames.file
        elif self.capacity > self.num_frames:
            HostFrames(pieces, self.num_frames, piece_bytes)  # raises where the system has not even these
            # Room that was reserved would count as used by a child, and the system would refuse to fork.
            self.frames = HostFrames(pieces, total, piece_bytes, reserve=False)
        else:
            self.frames = HostFrames(pieces, total, piece_bytes, reserve=not streamed_frames)

    def _numbering(self, streamed_frames: int) -> tuple[Numbering, int]:
        """Returns how `streamed_view` numbers frames, and how many numbers there are."""
        frame, slot = self.layout.frame_stride, 2 * self.layout.place_stride
        stride = math.gcd(frame, slot)
        numbering = Numbering(self.first_streamed, stride, frame // stride, slot // stride)
        count = self.first_streamed * numbering.frame + (streamed_frames - 1) * numbering.slot + 1
        if count > torch.iinfo(torch.int32).max:
            raise KVMemoryError(
                f"beside streamed blocks, block tables can name {torch.iinfo(torch.int32).max} places of "
                f"{stride * self.dtype.itemsize} bytes, and the pool has {count}; lower kv_memory",
                param="kv_memory",
            )
        return numbering, count

    def layer(self, layer: int) -> LayerCache:
        """Returns the keys and values of a model layer, as views."""
        return self._layers[layer]

    def attended(self, batch: AttentionBatch, *, streams: bool) -> tuple[AttentionBatch, DevicePool | StreamedView]:
        """Returns a batch, and the layers that it is attended in.

        streams: whether its tables name streamed frames.
        """
        view = self.streamed_view if streams else None
        return (batch, self) if view is None else (view.batch(batch), view)

    def packed_layer(self, shape: FrameShape, place: int, index: int) -> LayerCache:
        """Returns the keys and values of a layer of another shape, of the same format, as views: the one with this
        index among those of that shape that lie in one place of each frame."""
        layout = self._layout_of(shape, 1)
        begin = place * self.layout.place_stride + index * layout.place_bytes // self.dtype.itemsize
        return self._view(shape, layout, begin, self.frames.bytes.shape[1], self.layout.frame_stride)

    @property
    def nbytes(self) -> int:
        """Bytes of all frames, without streamed ones."""
        return self.num_frames * self.layout.frame_bytes

    def missing(self, num_frames: int) -> int:
        """Returns how many bytes of a device with memory of its own the pool would take to have so many frames."""
        return self.frames.missing(num_frames) if isinstance(self.frames, GpuFrames) else 0

    def resize(self, num_frames: int) -> None:
        """Gives the memory of the frames behind the first `num_frames` back to the system or the device, or lets the
        pool have more.

        Raises KVMemoryError, and changes nothing, for more than `capacity`, and for more than a device gives; and
        DriverError if a device does not take memory back.
        """
        if num_frames > self.capacity:
            raise KVMemoryError(
                f"the KV pool cannot have {num_frames} blocks ({num_frames * self.layout.frame_bytes} bytes): it was "
                f"made to grow to {self.capacity}; ask for less, or start with more kv_memory",
                param="kv_memory",
            )
        self.frames.resize(self.num_frames, num_frames)
        self.num_frames = num_frames

    def _views(self, count: int, stride: int) -> dict[int, LayerCache]:
        """Returns all layers, in so many frames that lie so many elements apart."""
        shape, layout = self.shape, self.layout
        each = [self._view(shape, layout, at * layout.place_stride, count, stride) for at in range(shape.places)]
        return {layer: each[shape.groups.place(layer)[1]] for layer in range(shape.groups.num_layers)}

    def _view(self, shape: FrameShape, at: KVLayout, begin: int, count: int, frame_stride: int) -> LayerCache:
        """Returns a layer of this shape, laid out like this from element `begin` of each frame on, in so many frames
        that lie so many elements apart."""
        format, block_size, beside = shape.format, shape.block_size, at.beside
        key_dim, value_dim = format.key.elements(shape.key_dim), format.value.elements(shape.value_dim)

        def view(element: str, dims: tuple[int, ...], strides: tuple[int, ...], offset: int) -> Tensor:
            storage = self.storage.view(getattr(torch, element))
            sizes, strides = (count, shape.kv_heads, *dims), (frame_stride, *strides)
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
            sizes = (count, shape.kv_heads, vector.scales(dim) * block_size)
            strides = (frame_stride // per_word, head // SCALE_BYTES, 1)
            return torch.as_strided(storage, sizes, strides, begin // per_word + scales // SCALE_BYTES)

        return LayerCache(
            key,
            value,
            words(format.key, shape.key_dim, at.key_scales, at.key_scale_head),
            words(format.value, shape.value_dim, at.value_scales, at.value_scale_head),
        )
