"""Weights as integers of 4 or 8 bits with scales, before they are packed; and the arithmetic on them, in torch.

Both sides of a product are rounded in groups of 192 k (`GROUP`), each with a scale of its own: weights to 8 bits at
load, activations row by row when they arrive, to 127 steps up to 4 times the group's mean magnitude, or to its
largest if that is less, so that only outliers take more than 8 bits. 4-bit weights keep the file's integers in
memory; the file's scale and minimum of each 32 become slope and offset in 1/256 of the group's scale, and the product
is rounded to 8 bits when it is used.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from pagemill.ops.affine import BLOCK

GROUP = 192
MOST_X = 127 * 256
MEANS = 4


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """scales: bfloat16 [rows, groups]. 8 bits: values int8 [rows, columns]. 4 bits: values uint8 [rows, columns],
    0 .. 15, and the 8-bit value is (slope * value + offset) >> 8, modulo 2^16; slopes, offsets int16
    [rows, columns / 32]."""

    values: Tensor
    scales: Tensor
    slopes: Tensor | None = None
    offsets: Tensor | None = None

    def whole(self) -> Tensor:
        """The 8-bit values, int8 [rows, columns]."""
        if self.slopes is None or self.offsets is None:
            return self.values
        slopes, offsets = (part.repeat_interleave(BLOCK, dim=1) for part in (self.slopes, self.offsets))
        return (((slopes * self.values.to(torch.int16)) + offsets) >> 8).to(torch.int8)

    def dense(self, dtype: torch.dtype) -> Tensor:
        """The weight that the integers stand for."""
        columns = self.values.shape[1]
        scales = self.scales.float().repeat_interleave(GROUP, dim=1)[:, :columns]
        return (self.whole().float() * scales).to(dtype)


def quantize_int8(weight: Tensor) -> QuantizedWeight:
    """float32 [rows, columns], rounded to the nearest multiples of each group's largest over 127."""
    rows, columns = weight.shape
    groups = pad(weight, (0, -columns % GROUP)).view(rows, -1, GROUP)
    scales = _scales(groups.abs().amax(-1))
    values = torch.round(groups * _inverse(scales).unsqueeze(-1)).to(torch.int8)
    return QuantizedWeight(values.view(rows, -1)[:, :columns].contiguous(), scales)


def keep_int4(values: Tensor, scale: Tensor, low: Tensor) -> QuantizedWeight:
    """values uint8 [rows, columns], 0 .. 15; the weight is scale * value + low, float32 [rows, columns / 32] each."""
    blocks = values.view(*scale.shape, BLOCK)
    ends = [(scale * end(-1) + low).abs() for end in (blocks.amin, blocks.amax)]
    largest = torch.maximum(*ends)
    in_group = GROUP // BLOCK
    largest = pad(largest, (0, -largest.shape[1] % in_group)).view(len(values), -1, in_group).amax(-1)
    scales = _scales(largest)
    units = 256 * _inverse(scales).repeat_interleave(in_group, dim=1)[:, : scale.shape[1]]
    slopes, offsets = (torch.round(part * units).to(torch.int64) for part in (scale, low))
    return QuantizedWeight(values, scales, slopes.to(torch.int16), (offsets + 128).to(torch.int16))


def quantized_linear(x: Tensor, whole: Tensor, scales: Tensor) -> Tensor:
    """x [tokens, columns] -> float32 [tokens, rows], as the kernels compute it but for the rounding of additions."""
    columns = x.shape[1]
    groups = pad(x.float(), (0, -columns % GROUP)).view(len(x), -1, GROUP)
    largest = groups.abs().amax(-1)
    means = groups.abs().mean(-1)
    steps = torch.maximum(largest / MOST_X, torch.minimum(largest, MEANS * means) / 127)
    steps = torch.where(largest < 2.0**-100, 0.0, steps)
    inverse = torch.where(largest < 2.0**-100, 0.0, 1 / steps)
    rounded = torch.round(groups * inverse.unsqueeze(-1))
    weight = pad(whole.float(), (0, -columns % GROUP)).view(len(whole), -1, GROUP)
    y = torch.zeros(len(x), len(whole), dtype=torch.float32, device=x.device)
    for group in range(groups.shape[1]):  # the products of each half of x, and their sums, are exact in float32
        high = torch.floor((rounded[:, group] + 128) / 256)
        low = rounded[:, group] - 256 * high
        columns_of = weight[:, group].T
        total = ((high @ columns_of).double() * 256 + low @ columns_of).float()
        y += total * (steps[:, group, None] * scales[:, group].float())
    return y


def _scales(largest: Tensor) -> Tensor:
    """largest / 127 in bfloat16, rounded up, so that nothing exceeds 127 of them."""
    bits = (largest.float() * (1 / 127)).view(torch.int32)
    return ((bits + 0xFFFF) >> 16).to(torch.int16).view(torch.bfloat16)


def _inverse(scales: Tensor) -> Tensor:
    wide = scales.float()
    return torch.where(wide > 0, 1 / wide, 0.0)
