"""Defines what sampling computes over logits: a token for a row, and a row's log probabilities.

A token is drawn by inverse CDF from the probabilities that are kept. A probability is kept if it is not below the k-th
largest (top_k), if it is at least min_p times the largest, and if the larger ones among those that pass both rules add
up to less than top_p of their sum. Equal ones are kept or dropped together. In which order the CDF goes through the
kept tokens is the kernels' own matter, as the last bits of its sums are: the same uniform number may give another token
on another device. Every result of a row is, bitwise, a function of that row's own numbers.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

from pagemill.sampling.params import TokenLogprobs

Floats = npt.NDArray[np.float32]
Ids = npt.NDArray[np.int64]
Bits = npt.NDArray[np.uint32]

NOT_FINITE = -1
"""Stands in the place of a token if one of the row's logits is NaN or +inf."""
ALL_FORBIDDEN = -2
"""Stands in the place of a token if all of the row's logits are -inf."""


def take_rows(x: torch.Tensor, index: npt.NDArray[np.integer[Any]]) -> torch.Tensor:
    """Returns the rows x[index]. On CPU NumPy copies them: torch would wake threads of its own for rows of logits."""
    if not x.is_cpu:
        return x[torch.from_numpy(index).to(x.device)]
    return torch.from_numpy(x.view(torch.uint8).numpy()[index]).view(x.dtype)


def leave_out(top_k: Ids, top_p: Floats, min_p: Floats) -> npt.NDArray[np.bool_]:
    """Returns, by row, whether these may drop tokens, of the rows that draw."""
    return (top_k > 0) | (top_p < 1) | (min_p > 0)


class Choices(NamedTuple):
    """Holds how each row chooses its token: arrays [rows]."""

    temperature: Floats
    """0 takes the argmax, the first of equals."""
    top_k: Ids
    """0 is off."""
    top_p: Floats
    min_p: Floats
    uniforms: npt.NDArray[np.float64]
    """Numbers in [0, 1) at which the inverse CDF is read."""

    @classmethod
    def argmax(cls, rows: int) -> Choices:
        """Returns the choices of `rows` rows that all take the argmax."""
        zeros = np.zeros(rows, np.float32)
        return cls(zeros, np.zeros(rows, np.int64), np.ones(rows, np.float32), zeros, np.zeros(rows))

    def at(self, rows: Ids) -> Choices:
        """Returns the choices of these rows, in this order."""
        return Choices(
            self.temperature[rows], self.top_k[rows], self.top_p[rows], self.min_p[rows], self.uniforms[rows]
        )

    @property
    def truncate(self) -> bool:
        """True if the rows that draw do not all draw from the whole vocabulary."""
        return bool((leave_out(self.top_k, self.top_p, self.min_p) & (self.temperature > 0)).any())


class DeviceChoices(NamedTuple):
    """Holds what `Choices` does on the device: tensors [rows], of the same dtypes."""

    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    uniforms: torch.Tensor


class SamplingKernels(Protocol):
    """Samples from logits, float32 [m, vocab], contiguous. `places` are rows of them."""

    def mask(self, logits: torch.Tensor, places: Ids, bits: Bits, rows: Ids) -> None:
        """Makes -inf, in place, of the logits at each place whose bits are not set.

        bits: [.., ceil(vocab / 32)], token t's being bit t % 32 of word t // 32. rows: each place's row of them.
        """

    def choose(self, logits: torch.Tensor, places: Ids, choices: Choices) -> Ids:
        """Returns a token for each place; NOT_FINITE or ALL_FORBIDDEN where there is none."""

    def log_probabilities(self, logits: torch.Tensor, places: Ids, tokens: Ids, counts: Ids) -> list[TokenLogprobs]:
        """Returns the log probabilities of one token at each place, and of the most likely ones there.

        tokens: one for each place, with finite logits.
        counts: how many of the most likely tokens to give, for each place.
        """
