"""Holds weights as narrow numbers before they are packed, and computes with them in torch.

`AffineWeight` and `Float8Weight` are exactly the float32 weight of a quantized file. `QuantizedWeight` is for products
of integers, where both sides are rounded in groups of 192 k (`GROUP`), each with a scale of its own: weights to 8 bits
at load, activations row by row when they arrive, to 127 steps up to 4 times the group's mean magnitude, or to its
largest if that is less, so that only outliers take more than 8 bits. 4-bit weights keep the file's integers in
memory; the file's scale and minimum of each 32 become slope and offset in 1/256 of the group's scale, and the product
is rounded to 8 bits when it is used.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

BLOCK = 32
FINE_BLOCK = 16
GROUP = 192
MOST_X = 127 * 256
MEANS = 4


def check_contiguous(name: str, tensor: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """Raises ValueError unless `tensor` is contiguous, of `dtype` and `shape`."""
    if tensor.dtype != dtype or tensor.shape != shape or not tensor.is_contiguous():
        raise ValueError(f"{name} must be contiguous {dtype} {shape}, not {tensor.dtype} {tuple(tensor.shape)}")


@dataclass(frozen=True, slots=True)
class AffineWeight:
    """A float32 weight as scale * value + low, where scale * value is exact.

    values: uint8 [rows, columns], below 2 ** bits, where bits is 4 or 8; scale, low: float32 [rows, columns / 32], or
    with 8 bits [rows, columns / 16]. Raises ValueError unless all are contiguous and of these shapes and dtypes.
    """

    values: Tensor
    scale: Tensor
    low: Tensor
    bits: int

    def __post_init__(self) -> None:
        rows, columns = self.values.shape
        if self.bits not in (4, 8) or columns % BLOCK:
            raise ValueError(f"{columns} columns of {self.bits} bits must be a multiple of {BLOCK}, of 4 or 8 bits")
        fine = self.bits == 8 and self.scale.shape == (rows, columns // FINE_BLOCK)
        blocks = columns // (FINE_BLOCK if fine else BLOCK)
        check_contiguous("values", self.values, torch.uint8, (rows, columns))
        check_contiguous("scale", self.scale, torch.float32, (rows, blocks))
        check_contiguous("low", self.low, torch.float32, (rows, blocks))

    def dense(self) -> Tensor:
        """Returns the weight, float32 [rows, columns]."""
        values = self.values.view(*self.scale.shape, -1).float()
        return (values * self.scale.unsqueeze(-1) + self.low.unsqueeze(-1)).view(self.values.shape)


@dataclass(frozen=True, slots=True)
class Float8Weight:
    """A float32 weight as scale * value, rounded once: values float8_e4m3fn [rows, columns], finite.

    scale: float32 [rows, ceil(columns / group)], for `group` columns each. Raises ValueError unless both are contiguous
    and of these shapes and dtypes.
    """

    values: Tensor
    scale: Tensor
    group: int

    def __post_init__(self) -> None:
        rows, columns = self.values.shape
        check_contiguous("values", self.values, torch.float8_e4m3fn, (rows, columns))
        check_contiguous("scale", self.scale, torch.float32, (rows, -(-columns // self.group)))

    def dense(self) -> Tensor:
        """Returns the weight, float32 [rows, columns]."""
        columns = self.values.shape[1]
        scales = self.scale if self.group >= columns else self.scale.repeat_interleave(self.group, dim=1)[:, :columns]
        return self.values.float() * scales


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """A weight in integers with a scale for each group: scales bfloat16 [rows, groups].

    8 bits: values int8 [rows, columns]. 4 bits: values uint8 [rows, columns], 0 to 15, with slopes and offsets int16
    [rows, columns / 32]; the 8-bit value is (slope * value + offset) >> 8, modulo 2^16.
    """

    values: Tensor
    scales: Tensor
    slopes: Tensor | None = None
    offsets: Tensor | None = None

    @classmethod
    def empty(cls, rows: int, columns: int, bits: int, values: Tensor | None = None) -> QuantizedWeight:
        """Returns memory for a weight of 4 or 8 bits. values: theirs, if it is there."""
        if values is None:
            values = torch.empty(rows, columns, dtype=torch.uint8 if bits == 4 else torch.int8, device="cpu")
        scales = torch.empty(rows, -(-columns // GROUP), dtype=torch.bfloat16, device="cpu")
        if bits == 8:
            return cls(values, scales)
        slopes, offsets = (torch.empty(rows, columns // BLOCK, dtype=torch.int16, device="cpu") for _ in range(2))
        return cls(values, scales, slopes, offsets)

    @property
    def parts(self) -> list[Tensor]:
        """Returns all that it consists of, each with a row for each of its rows."""
        whole = (self.values, self.scales, self.slopes, self.offsets)
        return [part for part in whole if part is not None]

    def rows(self, change: Callable[[Tensor], Tensor]) -> QuantizedWeight:
        """Returns the rows that `change` takes of each part."""
        return QuantizedWeight(*map(change, self.parts))

    def whole(self) -> Tensor:
        """Returns the 8-bit values, int8 [rows, columns]."""
        if self.slopes is None or self.offsets is None:
            return self.values
        slopes, offsets = (part.repeat_interleave(BLOCK, dim=1) for part in (self.slopes, self.offsets))
        return (((slopes * self.values.to(torch.int16)) + offsets) >> 8).to(torch.int8)

    def dense(self, dtype: torch.dtype) -> Tensor:
        """Returns the weight that the integers stand for, [rows, columns]."""
        columns = self.values.shape[1]
        scales = self.scales.float().repeat_interleave(GROUP, dim=1)[:, :columns]
        return (self.whole().float() * scales).to(dtype)


def quantize_int8(weight: Tensor) -> QuantizedWeight:
    """Returns float32 [rows, columns] rounded to multiples of each group's largest magnitude over 127."""
    rows, columns = weight.shape
    groups = pad(weight, (0, -columns % GROUP)).view(rows, -1, GROUP)
    scales = _scales(groups.abs().amax(-1))
    values = torch.round(groups * _inverse(scales).unsqueeze(-1)).to(torch.int8)
    return QuantizedWeight(values.view(rows, -1)[:, :columns].contiguous(), scales)


def keep_int4(values: Tensor, scale: Tensor, low: Tensor) -> QuantizedWeight:
    """Returns the weight scale * value + low in 4 bits.

    values: uint8 [rows, columns], 0 to 15; scale, low: float32 [rows, columns / 32].
    """
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
    """Returns the product, float32 [tokens, rows], of x [tokens, columns] and the weight.

    It differs from the kernels' only in how additions are rounded.
    """
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
    """Returns largest / 127 in bfloat16, rounded up, so that no value exceeds 127 scales."""
    bits = (largest.float() * (1 / 127)).view(torch.int32)
    return ((bits + 0xFFFF) >> 16).to(torch.int16).view(torch.bfloat16)


def _inverse(scales: Tensor) -> Tensor:
    wide = scales.float()
    return torch.where(wide > 0, 1 / wide, 0.0)
