"""Defines a model's operators. Each device implements `Ops`; models call nothing else for arithmetic.

An operator's result for a row (token) depends, bit for bit on CPU, neither on the other rows nor on how many threads
there are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pagemill.ops.low_rank import LowRankPart
from pagemill.ops.quantized import AffineWeight, Float8Weight, QuantizedWeight


class Linear(Protocol):
    """A linear layer whose weight was packed at load for this device."""

    in_features: int
    out_features: int

    def __call__(self, x: Tensor) -> Tensor:
        """Returns [tokens, out_features] for x [tokens, in_features], in the dtype of x, accumulated in fp32."""

    def rows(self, ids: Tensor) -> Tensor:
        """Returns rows [n, in_features] of the weight as it was before packing, for ids int64 [n].

        They have the weight's dtype, or the one that a quantized weight was packed for.
        """


class AllowedOutputs(NamedTuple):
    """Says which outputs of a layer count, row by row.

    bits: uint32 [.., ceil(out_features / 32)], output o's being bit o % 32 of word o // 32. rows: int64 [tokens], each
    token's row of `bits`; negative where all outputs count.
    """

    bits: npt.NDArray[np.uint32]
    rows: npt.NDArray[np.int64]


class LowRank(Protocol):
    """What an adapter adds to a linear layer's outputs, packed for this device."""

    nbytes: int


LowRankRun: TypeAlias = tuple[LowRank, Tensor]
"""An addition, and the tokens that have it: int64, on the device."""


class Ops(Protocol):
    name: str
    """Part of the numerics id."""
    copies_weights: bool
    """True if the weight's memory may be written again once `pack_linear` returns."""
    multiplies_integers: bool
    """True if products of 8-bit integers are faster here than those of wider numbers."""
    keeps_narrow: bool
    """True if `pack_affine` and `pack_float8` keep weights as narrow as they are stored, for x of any dtype."""
    widens_weights: bool
    """True if a layer packed in bfloat16 or float16 gives float32 x the same bits as its weight in float32 would."""

    def pack_linear(self, weight: Tensor, bias: Tensor | None = None, dtype: torch.dtype | None = None) -> Linear:
        """Returns a linear layer of weight [out_features, in_features]; the caller may free the weight afterwards.

        weight: in the model's dtype, or in a narrower one with `widens_weights`.
        dtype:  the dtype of most x (default: the weight's); the layer takes any.
        """

    def pack_affine(self, weight: AffineWeight, bias: Tensor | None = None) -> Linear:
        """Returns a layer of the float32 weight that the integers stand for, bit for bit. bias: fp32.

        The CPU's outputs are, bit for bit, those of `pack_linear` for that weight. Where `keeps_narrow`, products are
        exact, and sums in fp32, in another order.
        """

    def pack_float8(self, weight: Float8Weight, bias: Tensor | None = None) -> Linear:
        """Returns what `pack_affine` does, for the weight that numbers of fp8 stand for."""

    def pack_quantized(self, weight: QuantizedWeight, bias: Tensor | None, dtype: torch.dtype) -> Linear:
        """Returns a layer of a weight rounded to integers, for speed. bias: fp32; dtype: of `rows`.

        It multiplies integers, to which it rounds each row of x, unless `keeps_narrow`: then x stays as it is.
        """

    def pack_low_rank(self, parts: Sequence[LowRankPart], in_features: int, out_features: int) -> LowRank:
        """Returns an addition to a layer of these sizes. Raises ValueError for parts that do not fit it."""

    def add_low_rank(self, x: Tensor, y: Tensor, runs: Sequence[LowRankRun]) -> None:
        """Adds to y [tokens, out_features], in place, what x [tokens, in_features] gives for each run's tokens.

        Sums are in fp32 and rounded once. No token may be in two runs.
        """

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Returns x / sqrt(mean(x²) + eps) * weight over the last dimension, in the dtype of x.

        The weight is fp32, and so is the arithmetic.
        """

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> None:
        """Rotates x [tokens, heads, head_dim] in place, with the two halves of rotary_dim as pairs (as NeoX does).

        cos, sin: fp32 [tokens, rotary_dim / 2]. Dimensions from rotary_dim on stay as they are. x may be a strided
        view.
        """

    def widen(self, x: Tensor, soft_cap: float | None = None, out: Tensor | None = None) -> Tensor:
        """Returns x [rows, n] in fp32, or soft_cap * tanh(x / soft_cap) of it: in x itself if it is fp32, else in
        `out`, fp32 and contiguous, if that is given."""

    def gated(self, x: Tensor, activation: Literal["silu", "gelu_tanh"]) -> Tensor:
        """Returns activation(gate) * up [tokens, n] for x [tokens, 2 * n], which holds gate, then up."""
