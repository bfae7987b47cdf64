"""The model's operators. Each device implements `Ops`; models call nothing else for arithmetic.

Every operator's result for a row (token) is independent, bit for bit on CPU, of which and how many other rows are
there, and of the number of threads.
"""

from __future__ import annotations

from typing import Literal, Protocol

import torch
from torch import Tensor

from pagemill.ops.affine import AffineWeight
from pagemill.ops.quantized import QuantizedWeight


class Linear(Protocol):
    """A linear layer whose weight was packed at load for this device."""

    in_features: int
    out_features: int

    def __call__(self, x: Tensor) -> Tensor:
        """x [tokens, in_features] -> [tokens, out_features], dtype of x, accumulated in fp32."""
        ...

    def rows(self, ids: Tensor) -> Tensor:
        """Rows of the weight as it was before packing: ids int64 [n] -> [n, in_features], dtype of the weight, or the
        dtype that a quantized one was packed for."""
        ...


class Ops(Protocol):
    name: str
    """Part of the numerics id."""
    copies_weights: bool
    """Whether `pack_linear` needs the weight's memory no more once it returns: it may be written again."""
    widens_weights: bool
    """Whether a linear layer in bfloat16 or float16 gives float32 x the bits that its weight in float32 would."""

    def pack_linear(self, weight: Tensor, bias: Tensor | None = None, dtype: torch.dtype | None = None) -> Linear:
        """weight [out_features, in_features] in the model's dtype, or narrower with `widens_weights`; may be freed by
        the caller afterwards. dtype: of most x, the weight's unless given; it takes any."""
        ...

    def pack_affine(self, weight: AffineWeight, bias: Tensor | None = None) -> Linear:
        """As `pack_linear` of the float32 weight that the integers stand for, with the same bits. bias fp32."""
        ...

    def pack_quantized(self, weight: QuantizedWeight, bias: Tensor | None, dtype: torch.dtype) -> Linear:
        """A linear layer on integers: x is rounded to integers, per row. bias fp32; dtype: of `rows`."""
        ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x / sqrt(mean(x²) + eps) * weight over the last dimension, computed in fp32; weight is fp32; dtype of x."""
        ...

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> None:
        """Rotary embedding in place, halves convention (NeoX): x [tokens, heads, head_dim], cos and sin fp32
        [tokens, rotary_dim / 2]; dimensions from rotary_dim on stay as they are. x may be a strided view."""
        ...

    def gated(self, x: Tensor, activation: Literal["silu", "gelu_tanh"]) -> Tensor:
        """x [tokens, 2 * n], gate then up -> activation(gate) * up [tokens, n]."""
        ...
