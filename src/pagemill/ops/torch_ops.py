"""Implements the operators in plain torch, for any device without kernels; the kernels are tested against them.

On CPU the rows of `torch.nn.functional.linear` may depend, in the last bits, on how many rows there are; `CpuOps` keeps
the promise of equal bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from pagemill.ops.interface import Linear, LowRank, LowRankRun
from pagemill.ops.low_rank import LowRankPart, check_parts
from pagemill.ops.quantized import AffineWeight, Float8Weight, QuantizedWeight, quantized_linear


class TorchLinear:
    """Keeps the weight as it is; `torch.nn.functional.linear` accumulates in fp32."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.out_features, self.in_features = weight.shape
        self.weight = weight
        self.bias = None if bias is None else bias.to(weight.dtype)

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x.to(self.weight.dtype), self.weight, self.bias).to(x.dtype)

    def rows(self, ids: Tensor) -> Tensor:
        return self.weight[ids]


class TorchQuantizedLinear:
    """Keeps the 8-bit values. Products of integers are exact in fp32, so a row does not depend on others."""

    def __init__(self, weight: QuantizedWeight, bias: Tensor | None, dtype: torch.dtype) -> None:
        self.whole, self.scales = weight.whole(), weight.scales
        self.out_features, self.in_features = self.whole.shape
        self.bias = bias
        self.dtype = dtype

    def __call__(self, x: Tensor) -> Tensor:
        y = quantized_linear(x, self.whole, self.scales)
        return (y if self.bias is None else y + self.bias).to(x.dtype)

    def rows(self, ids: Tensor) -> Tensor:
        return QuantizedWeight(self.whole[ids], self.scales[ids]).dense(self.dtype)


class TorchLowRank:
    """Keeps the parts as they are."""

    def __init__(self, parts: Sequence[LowRankPart], in_features: int, out_features: int) -> None:
        check_parts(parts, in_features, out_features)
        self.parts = [*parts]
        self.nbytes = sum(part.a.nbytes + part.b.nbytes for part in parts)


class TorchOps:
    name = f"torch-{torch.__version__}"
    copies_weights = False
    multiplies_integers = False
    keeps_narrow = False
    widens_weights = False

    def pack_linear(self, weight: Tensor, bias: Tensor | None = None, dtype: torch.dtype | None = None) -> TorchLinear:
        return TorchLinear(weight, bias)

    def pack_affine(self, weight: AffineWeight, bias: Tensor | None = None) -> Linear:
        return TorchLinear(weight.dense(), bias)

    def pack_float8(self, weight: Float8Weight, bias: Tensor | None = None) -> Linear:
        return TorchLinear(weight.dense(), bias)

    def pack_quantized(self, weight: QuantizedWeight, bias: Tensor | None, dtype: torch.dtype) -> Linear:
        return TorchQuantizedLinear(weight, bias, dtype)

    def pack_low_rank(self, parts: Sequence[LowRankPart], in_features: int, out_features: int) -> LowRank:
        return TorchLowRank(parts, in_features, out_features)

    def add_low_rank(self, x: Tensor, y: Tensor, runs: Sequence[LowRankRun]) -> None:
        for addition, tokens in runs:
            assert isinstance(addition, TorchLowRank)
            rows, sums = x[tokens].float(), y[tokens].float()
            for part in addition.parts:
                low = F.linear(rows, part.a.float()) * part.scale
                sums[:, part.begin : part.begin + len(part.b)] += F.linear(low, part.b.float())
            y[tokens] = sums.to(y.dtype)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        return (wide * weight).to(x.dtype)

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> None:
        half = cos.shape[-1]
        first, second = x[..., :half], x[..., half : 2 * half]
        a, b = first.float(), second.float()
        c, s = cos.unsqueeze(1), sin.unsqueeze(1)
        rotated = a * c - b * s, b * c + a * s
        first.copy_(rotated[0])
        second.copy_(rotated[1])

    def widen(self, x: Tensor, soft_cap: float | None = None, out: Tensor | None = None) -> Tensor:
        wide = x.float() if out is None or x.dtype == torch.float32 else out.copy_(x)
        return wide if soft_cap is None else wide.div_(soft_cap).tanh_().mul_(soft_cap)

    def gated(self, x: Tensor, activation: Literal["silu", "gelu_tanh"]) -> Tensor:
        gate, up = x.float().chunk(2, dim=-1)
        active = F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")
        return (active * up).to(x.dtype)
