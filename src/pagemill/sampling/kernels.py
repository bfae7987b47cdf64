"""SamplingKernels: what sampling computes over logits, a token for a row and a row's log probabilities.

A token is drawn by inverse CDF from the probabilities that are kept: one is, if it is not less than the k-th largest
(top_k), has at least min_p of the largest, and if those larger than it are together less than top_p of what the first
two rules left. Equal ones are kept or dropped together. Every result of a row is, bitwise, a function of that row's own
numbers.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

from pagemill.sampling.params import TokenLogprobs

Floats = npt.NDArray[np.float32]
Ids = npt.NDArray[np.int64]

NOT_FINITE = -1
"""Instead of a token: one of the row's logits is NaN or infinite (-inf is neither)."""
ALL_FORBIDDEN = -2
"""Instead of a token: all of the row's logits are -inf."""


class Choices(NamedTuple):
    """How each of some rows chooses: arrays [rows]."""

    temperature: Floats
    """0: the likeliest token, the first of equals."""
    top_k: Ids
    """0 is off."""
    top_p: Floats
    min_p: Floats
    uniforms: npt.NDArray[np.float64]
    """In [0, 1): where the inverse CDF is read."""

    @classmethod
    def argmax(cls, rows: int) -> Choices:
        zeros = np.zeros(rows, np.float32)
        return cls(zeros, np.zeros(rows, np.int64), np.ones(rows, np.float32), zeros, np.zeros(rows))


class SamplingKernels(Protocol):
    """Logits are float32 [m, vocab], contiguous; `places` are rows of them."""

    def choose(self, logits: torch.Tensor, places: Ids, choices: Choices) -> Ids:
        """A token for each place; NOT_FINITE or ALL_FORBIDDEN where there is none."""
        ...

    def log_probabilities(self, logits: torch.Tensor, places: Ids, tokens: Ids, counts: Ids) -> list[TokenLogprobs]:
        """Of `tokens` at each place, whose logits are finite, and how many others to give."""
        ...
