"""The memory that steps take beside weights and KV pool, measured by the largest steps before there is a pool."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from pagemill.errors import KVMemoryError
from pagemill.executor.device import Device
from pagemill.executor.trial_steps import LargestStep, RunOver, Trial, prepare
from pagemill.kvcache.gpu_frames import COPY_BYTES, SNAPSHOTS, STAGED
from pagemill.kvcache.layout import FrameShape, LayoutMaker
from pagemill.kvcache.transfers import BATCH_BYTES, PIECE_BYTES

TRANSFER_BYTES = COPY_BYTES + SNAPSHOTS * BATCH_BYTES + STAGED * PIECE_BYTES
"""Memory through which frames are copied, and blocks leave the device and come to it."""


@torch.inference_mode()
def activation_peak(
    trial: Trial,
    device: Device,
    run: RunOver,
    frames: FrameShape,
    layout: LayoutMaker,
    max_model_len: int,
    largest: LargestStep,
) -> int:
    """Runs a trial step, and returns the bytes that it takes at most, see `Device.peak`. largest: names the settings in
    the KVMemoryError that is raised if there is too little memory."""
    with named_if_too_large(largest, device.where):
        return device.peak(prepare(trial, device, run, frames, layout, max_model_len))


@contextmanager
def named_if_too_large(largest: LargestStep, where: torch.device) -> Iterator[None]:
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
