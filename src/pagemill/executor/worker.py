"""Worker: what a device, or one rank of several, holds of a model: a decoder, the KV pool under its layers, block
tables. It carries out the parts of a step plan that concern these."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pagemill.executor.backend import Backend
from pagemill.executor.common_keys import CommonKeys
from pagemill.executor.interface import ExecutorMemory
from pagemill.executor.rows import Inputs, Rows
from pagemill.kvcache.device_pool import DevicePool
from pagemill.kvcache.device_streams import DeviceStreams
from pagemill.kvcache.frame_access import FrameAccess
from pagemill.kvcache.layers_ahead import LayersAhead
from pagemill.kvcache.layout import FrameShape
from pagemill.kvcache.pages_ahead import PagesAhead, PooledFrames
from pagemill.kvcache.read_ahead import ReadAhead
from pagemill.kvcache.sizing import host_memory
from pagemill.kvcache.streaming_gpu_frames import StreamingGpuFrames
from pagemill.memory.work import MemoryWork
from pagemill.models.adapter import AdapterTokens
from pagemill.models.decoder import Decoder, OnLayer


class Worker:
    """Holds one device's part of a model. shape: of the frames of its pool. mapped_bytes: of weights in mapped files,
    which take memory that the system counts as free. streams: the device's, where its work is asynchronous."""

    frames: FrameAccess
    """Gives access to the pool's frames; there after `allocate`."""

    def __init__(
        self,
        decoder: Decoder,
        backend: Backend,
        shape: FrameShape,
        max_num_seqs: int,
        max_model_len: int,
        mapped_bytes: int = 0,
        streams: DeviceStreams | None = None,
    ) -> None:
        self.decoder = decoder
        self._streams = streams
        self._mapped_bytes = mapped_bytes
        self._shape = shape
        self._layout = backend.layout
        self._device = backend.device
        self.rows = Rows(
            shape.groups, max_num_seqs, max_model_len, shape.block_size, backend.device, shape.format.precise
        )
        spec, attention = decoder.spec, backend.attention
        joined = None if spec.latent is not None else attention.joined_rows(spec.num_heads, spec.num_kv_heads)
        self.common_keys = CommonKeys(self.rows, shape.groups, joined)
        self._read_ahead: ReadAhead | LayersAhead | None = None

    def make_pool(self, num_frames: int, streamed_frames: int, streamed_folder: Path | None, room: int) -> int:
        """Does what `Executor.allocate` says. room: bytes that the pool can grow to."""
        self.pool = DevicePool(
            num_frames,
            self._shape,
            self._device,
            self._layout,
            room=room,
            streamed_frames=streamed_frames,
            streamed_folder=streamed_folder,
            streams=self._streams,
        )
        self.pages = PagesAhead(self.pool)
        self.frames = PooledFrames(self.pool, self.pages)
        if (file := self.pool.streamed_file) is not None:
            self._read_ahead = ReadAhead(file, self.decoder.groups)
        elif isinstance(self.pool.frames, StreamingGpuFrames):
            assert self.pool.streams is not None
            self._read_ahead = LayersAhead(self.pool.frames, self.decoder.groups, self.pool.streams)
        return self.pool.first_streamed

    def memory(self) -> ExecutorMemory:
        if self._device.type == "cuda":
            return ExecutorMemory(*torch.cuda.mem_get_info(self._device))
        free, total = host_memory()
        return ExecutorMemory(max(0, free - self._mapped_bytes), total)

    def edit(self, work: MemoryWork) -> list[int]:
        """Edits tables and copies frames. Returns the frames that do not hold what was to be copied into them."""
        self.rows.edit_tables(work)
        written = np.concatenate((work.copy_target, work.edit_frame))
        self.pages.reach(int(written[written < self.pool.first_streamed].max(initial=-1)))
        return self.pool.frames.copy(work.copy_source, work.copy_target)

    def resize(self, num_frames: int) -> None:
        """Does what `Executor.resize` says."""
        self.pages.shrink(num_frames)
        self.pool.resize(num_frames)

    def take_loss(self) -> bool:
        """Does what `Executor.take_loss` says."""
        file = self.pool.streamed_file
        return file is not None and file.take_loss()

    def forward(
        self,
        inputs: Inputs,
        token_ids: Tensor,
        on_layer: OnLayer | None = None,
        adapters: Sequence[AdapterTokens] = (),
    ) -> Tensor:
        """Returns the hidden states of query tokens, whose keys and values are in the pool then."""
        batch = inputs.batch()
        if self.common_keys:
            rows, starts, query_lens = inputs.of_rows, inputs.starts, inputs.query_lens
            _, common = self.common_keys.find(rows, starts, query_lens, len(rows), moves=False)
            batch = replace(batch, common=self.rows.to_device(common))
        batch, caches = self.pool.attended(batch, streams=on_layer is not None)
        return self.decoder.forward(token_ids, batch, caches, on_layer, adapters)

    def reading_ahead(self, rows: NDArray[np.int32], ends: NDArray[np.int32]) -> OnLayer | None:
        """Returns what reads ahead the blocks, on disk or outside a GPU, that a step attends, of these rows up to their
        `ends`; None if there are none."""
        if self._read_ahead is None:
            return None
        first = self.pool.first_streamed
        streamed = [frames - first for frames in self.rows.frames_from(first, rows, ends)]
        return self._read_ahead.step(streamed) if any(map(len, streamed)) else None

    def close(self) -> None:
        if self._read_ahead is not None:
            self._read_ahead.close()
