"""A model's fingerprint: equal for equal models, and taken in milliseconds, whatever the model's size."""

from __future__ import annotations

import dataclasses
import hashlib
import json

import torch

from pagemill.models.loading.checkpoint import Checkpoint
from pagemill.models.spec import DecoderSpec

_SAMPLES, _SAMPLE_BYTES = 64, 4096


def fingerprint(checkpoint: Checkpoint, spec: DecoderSpec, dtype: torch.dtype) -> bytes:
    """SHA-256 over, in this order: the version of this recipe; the spec as JSON with sorted keys (which counts in
    overrides and resolved RoPE frequencies); the dtype computed in; for each tensor, by name: name, shape and stored
    dtype; for each file, in order: its size, and 64 samples of 4096 bytes spread evenly from first byte to last.

    Two fine-tunes of one model differ nearly everywhere, so samples tell them apart; a file that was altered in a few
    places on purpose they may miss. It guards a cache against mix-ups, not against forgery.
    """
    digest = hashlib.sha256(b"pagemill model 1\n")
    digest.update(json.dumps(dataclasses.asdict(spec), sort_keys=True).encode())
    digest.update(str(dtype).encode())
    for name, info in sorted(checkpoint.tensors.items()):
        digest.update(json.dumps([name, info.shape, info.dtype]).encode())
    for file in checkpoint.files:
        digest.update(file.size.to_bytes(8, "little"))
        last = max(0, file.size - _SAMPLE_BYTES)
        for begin in sorted({last * sample // (_SAMPLES - 1) for sample in range(_SAMPLES)}):
            end = min(begin + _SAMPLE_BYTES, file.size)
            digest.update(file.view(begin, end).tobytes())
            file.forget(0, file.size)  # the system maps much more around each sample
    return digest.digest()
