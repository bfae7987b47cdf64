"""The memory that steps take beside weights and KV pool, measured by the largest steps before there is a pool."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from pagemill.errors import KVMemoryError
from pagemill.executor.device import Device
from pagemill.executor.trial_steps import RunOver, Trial, prepare
from pagemill.kvcache.gpu_frames import COPY_BYTES, SNAPSHOTS, STAGE_BYTES, STAGED
from pagemill.kvcache.layout import FrameShape, LayoutMaker
from pagemill.kvcache.transfers import BATCH_BYTES

TRANSFER_BYTES = COPY_BYTES + SNAPSHOTS * BATCH_BYTES + STAGED * STAGE_BYTES
"""Memory through which frames are copied, and blocks leave the device and come to it."""
STREAMING_BYTES = 2 * COPY_BYTES
"""Streamed frames take so many bytes beside that: copies to them go through twice as much memory, and what is brought
through memory of its own."""


@torch.inference_mode()
def activation_peak(
    trial: Trial,
    device: Device,
    run: RunOver,
    frames: FrameShape,
    layout: LayoutMaker,
    max_model_len: int,
) -> int:
    """Runs a trial step, and returns the bytes that it takes at most, see `Device.peak`. Raises KVMemoryError if there
    is too little memory."""
    with named_if_too_large(trial, device.where):
        return device.peak(prepare(trial, device, run, frames, layout, max_model_len))


@contextmanager
def named_if_too_large(trial: Trial, where: torch.device) -> Iterator[None]:
    """Names the step, the setting, and the ways out, where memory is too short inside."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise KVMemoryError(
            f"steps of {trial.query_lens.sum()} tokens, with {trial.samples} samples, have too little memory left on "
            f"{where} ({error}); lower max_num_batched_tokens or max_num_seqs, or free memory",
            param="max_num_batched_tokens",
        ) from error
