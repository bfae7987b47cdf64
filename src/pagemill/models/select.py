"""Selects how a decoder's layers are run."""

from __future__ import annotations

import torch

from pagemill.attention.interface import AttentionBackend
from pagemill.models.decoder import Decoder, DecoderWeights
from pagemill.models.spec import DecoderSpec
from pagemill.ops.interface import Ops


def select_decoder(
    spec: DecoderSpec, weights: DecoderWeights, ops: Ops, attention: AttentionBackend, dtype: torch.dtype
) -> Decoder:
    """Returns a decoder that runs as one C++ call if it is dense and on the CPU kernels, else operator by operator.

    With the same operators both give the same bits.
    """
    if weights.final_norm.is_cpu and not any(layer.moe for layer in spec.layers):
        from pagemill.attention.cpu_backend import CpuAttention
        from pagemill.models.cpu_decoder import CpuDecoder
        from pagemill.ops.cpu_ops import CpuOps

        if isinstance(ops, CpuOps) and isinstance(attention, CpuAttention):
            return CpuDecoder(spec, weights, ops, attention, dtype)
    return Decoder(spec, weights, ops, attention, dtype)
