"""The passes over logits on CPU: the C++ kernels (csrc/isa/sampling.h) behind `Passes`."""

from __future__ import annotations

import numpy as np
import torch

from pagemill import _kernels
from pagemill.sampling.logprobs import TokenLogprobs
from pagemill.sampling.passes import Choices, Ids


class CpuPasses:
    def choose(self, logits: torch.Tensor, places: Ids, choices: Choices) -> Ids:
        temperature, top_k, top_p, min_p, uniforms = (np.ascontiguousarray(column) for column in choices)
        tokens = np.empty(len(places), np.int64)
        _check(logits, places)
        _kernels.choose_tokens(
            logits.data_ptr(), logits.shape[1], places.ctypes.data, len(places), temperature.ctypes.data,
            top_k.ctypes.data, top_p.ctypes.data, min_p.ctypes.data, uniforms.ctypes.data, tokens.ctypes.data,
        )  # fmt: skip
        return tokens

    def log_probabilities(self, logits: torch.Tensor, places: Ids, tokens: Ids, counts: Ids) -> list[TokenLogprobs]:
        _check(logits, places)
        rows, most = len(places), min(int(counts.max(initial=0)), logits.shape[1])
        own, ranks = np.empty(rows, np.float32), np.empty(rows, np.int64)
        likely, likely_logprobs = np.empty((rows, most), np.int64), np.empty((rows, most), np.float32)
        _kernels.log_probabilities(
            logits.data_ptr(), logits.shape[1], places.ctypes.data, rows, most, tokens.ctypes.data, own.ctypes.data,
            ranks.ctypes.data, likely.ctypes.data, likely_logprobs.ctypes.data,
        )  # fmt: skip
        columns = zip(tokens.tolist(), own.tolist(), ranks.tolist(), counts.tolist(), likely.tolist(),
                      likely_logprobs.tolist(), strict=True)  # fmt: skip
        return [
            TokenLogprobs([token, *others[:count]], [value, *values[:count]], rank)
            for token, value, rank, count, others, values in columns
        ]


def _check(logits: torch.Tensor, places: Ids) -> None:
    if logits.dtype != torch.float32 or not logits.is_cpu or not logits.is_contiguous():
        raise ValueError(f"logits must be contiguous float32 on CPU, not {logits.dtype} on {logits.device}")
    if places.dtype != np.int64 or not places.flags.c_contiguous:
        raise ValueError(f"places must be contiguous int64, not {places.dtype}")
    if len(places) and not 0 <= int(places.min()) <= int(places.max()) < len(logits):
        raise IndexError(f"places {places.tolist()} are not all in 0 .. {len(logits) - 1}")
