"""Takes a model's fingerprint, equal for equal models, in milliseconds whatever the model's size."""

from __future__ import annotations

import dataclasses
import hashlib
import json

import torch

from pagemill.models.loading.checkpoint import Checkpoint
from pagemill.models.spec import DecoderSpec

_SAMPLES, _SAMPLE_BYTES = 64, 4096


def fingerprint(checkpoint: Checkpoint, spec: DecoderSpec, dtype: torch.dtype) -> bytes:
    """Returns the SHA-256 of all that decides a model's answers, with samples in the place of whole files.

    In this order: the version of this recipe; the spec as JSON with sorted keys, overrides and resolved RoPE
    frequencies included; the dtype computed in; each tensor's name, shape and stored dtype, by name; each file's size
    and 64 samples of 4096 bytes, spread evenly from its first byte to its last.

    Two fine-tunes of one model differ nearly everywhere, so samples tell them apart. They may miss a file that was
    altered in a few places on purpose: a fingerprint guards a cache against mix-ups, not against forgery.
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
