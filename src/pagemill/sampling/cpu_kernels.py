"""Samples on CPU with the C++ kernels (csrc/isa/sampling.h)."""

from __future__ import annotations

import numpy as np
import torch

from pagemill import _kernels
from pagemill.sampling.kernels import Bits, Choices, Ids
from pagemill.sampling.params import TokenLogprobs


class CpuSamplingKernels:
    def mask(self, logits: torch.Tensor, places: Ids, bits: Bits, rows: Ids) -> None:
        _check(logits, places)
        _kernels.mask_logits(logits.numpy(), places, bits, rows)

    def choose(self, logits: torch.Tensor, places: Ids, choices: Choices) -> Ids:
        tokens = np.empty(len(places), np.int64)
        _check(logits, places)
        whole = np.ascontiguousarray
        _kernels.choose_tokens(
            logits.numpy(), places, whole(choices.temperature), whole(choices.top_k), whole(choices.top_p),
            whole(choices.min_p), whole(choices.uniforms), tokens,
        )  # fmt: skip
        return tokens

    def log_probabilities(self, logits: torch.Tensor, places: Ids, tokens: Ids, counts: Ids) -> list[TokenLogprobs]:
        _check(logits, places)
        rows, most = len(places), min(int(counts.max(initial=0)), logits.shape[1])
        own, ranks = np.empty(rows, np.float32), np.empty(rows, np.int64)
        top, top_logprobs = np.empty((rows, most), np.int64), np.empty((rows, most), np.float32)
        _kernels.log_probabilities(logits.numpy(), places, tokens, own, ranks, top, top_logprobs)
        columns = zip(tokens.tolist(), own.tolist(), ranks.tolist(), counts.tolist(), top.tolist(),
                      top_logprobs.tolist(), strict=True)  # fmt: skip
        return [
            TokenLogprobs([token, *others[:count]], [value, *values[:count]], rank)
            for token, value, rank, count, others, values in columns
        ]


def _check(logits: torch.Tensor, places: Ids) -> None:
    if len(places) and not 0 <= int(places.min()) <= int(places.max()) < len(logits):
        raise IndexError(f"places {places.tolist()} are not all in 0 .. {len(logits) - 1}")
