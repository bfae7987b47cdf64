"""The memory that steps take beside weights and KV pool, measured by the largest step before there is a pool."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from pagemill.attention.interface import HostLengths
from pagemill.errors import KVMemoryError
from pagemill.executor.device import Device
from pagemill.executor.device_rows import DeviceRows
from pagemill.executor.graphs import Shape
from pagemill.executor.rows import Rows
from pagemill.executor.staging import Place, lay, places_of
from pagemill.kvcache.device_pool import DevicePool
from pagemill.kvcache.gpu_frames import COPY_BYTES, SNAPSHOTS, STAGED
from pagemill.kvcache.layout import FrameShape, LayoutMaker
from pagemill.kvcache.transfers import BATCH_BYTES, PIECE_BYTES
from pagemill.sampling.kernels import Choices

TRANSFER_BYTES = COPY_BYTES + SNAPSHOTS * BATCH_BYTES + STAGED * PIECE_BYTES
"""Memory through which frames are copied, and blocks leave the device and come to it."""

RunOver = Callable[[DeviceRows, DevicePool, Tensor, Sequence[Place], Shape, HostLengths], Tensor]
"""Runs a step of these rows, whose lengths are the last argument, over a pool; the rest is what `RunStep` takes."""


class LargestStep(NamedTuple):
    """States how many query tokens, and how many samples, a step has at most."""

    tokens: int
    samples: int


@torch.inference_mode()
def activation_peak(
    device: Device,
    run: RunOver,
    frames: FrameShape,
    layout: LayoutMaker,
    max_model_len: int,
    largest: LargestStep,
    truncates: bool,
) -> int:
    """Runs the largest step over rows and a pool of its own, and returns the bytes that it takes at most, see
    `Device.peak`.

    Its rows end where the longest sequences do: some memory grows with contexts. All of a layer group's blocks lie in
    one frame. truncates: whether samples may leave tokens out. Raises KVMemoryError if there is too little memory.
    """
    longest = max(1, max_model_len - 1)
    query_lens = np.full(-(-largest.tokens // longest), longest, np.int32)
    query_lens[-1] -= query_lens.sum() - largest.tokens
    count, groups = len(query_lens), len(frames.groups.groups)
    alike = Choices.argmax(largest.samples)
    choices = alike._replace(temperature=alike.temperature + 1, top_p=alike.top_p * np.float32(0.9 if truncates else 1))
    with _named_if_too_large(largest, device.where):
        rows = Rows(frames.groups, count, max_model_len, frames.block_size, device.where, frames.format.precise)
        there = DeviceRows(rows, device.where)
        for group, table in enumerate(there.tables):
            table.fill_(group)
        pool = DevicePool(groups, frames, device.where, layout)
        pool.frames.bytes.zero_()
        arrays = [
            np.arange(count, dtype=np.int32),
            longest - query_lens,
            np.concatenate(([0], query_lens.cumsum())).astype(np.int32),
            np.full(largest.samples, largest.tokens - 1),
            np.full(largest.samples, there.nowhere),
            *choices,
        ]
        places, nbytes = places_of(arrays)
        host = np.zeros(nbytes, np.uint8)
        lay(arrays, places, host)
        memory = torch.from_numpy(host).to(device.where)
        shape = Shape(
            largest.tokens, int(query_lens.max()), longest, largest.samples, picks=True, draws=True, truncates=truncates
        )
        lengths = HostLengths(torch.from_numpy(query_lens), torch.full((count,), longest, dtype=torch.int32))
        return device.peak(lambda: run(there, pool, memory, places, shape, lengths))


@contextmanager
def _named_if_too_large(largest: LargestStep, where: torch.device) -> Iterator[None]:
    """Names the setting, and the ways out, where memory is too short inside."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise KVMemoryError(
            f"max_num_batched_tokens allows steps of {largest.tokens} tokens, and one of these, with {largest.samples} "
            f"samples, has too little memory on {where} beside the weights ({error}); lower "
            "max_num_batched_tokens or max_num_seqs, or free memory",
            param="max_num_batched_tokens",
        ) from error
