"""The fingerprint of a model, by which caches tell what it has computed from what others have."""

from __future__ import annotations

import dataclasses
import hashlib
import json

import torch

from pagemill.models.loading.checkpoint import Checkpoint
from pagemill.models.loading.file_digest import file_digest
from pagemill.models.spec import DecoderSpec


def fingerprint(checkpoint: Checkpoint, spec: DecoderSpec, dtype: torch.dtype) -> bytes:
    """Returns the SHA-256 of all that decides a model's answers.

    In this order: the version of this recipe; the spec as JSON with sorted keys, overrides and resolved RoPE
    frequencies included; the dtype computed in; each tensor's name, shape and stored dtype, by name; the digest of
    each file, over all of its bytes. It guards a cache against mix-ups, not against forgery: files are told apart by
    xxh3_128. Raises CorruptWeightsError for a file that becomes shorter meanwhile.
    """
    digest = hashlib.sha256(b"pagemill model 4\n")
    digest.update(json.dumps(dataclasses.asdict(spec), sort_keys=True).encode())
    digest.update(str(dtype).encode())
    for name, info in sorted(checkpoint.tensors.items()):
        digest.update(json.dumps([name, info.shape, info.dtype]).encode())
    for file in checkpoint.files:
        digest.update(file_digest(file))
    return digest.digest()
