"""PackedWeight: a narrow weight as the GPU kernels read it, packed by torch on any device, without loss.

Codes of 4 bits lie two in a byte, those of 6 bits with their upper two bits in a plane of their own, integers of 8 bits
and numbers of fp8 one in a byte; each row's lie one after the other. A unit is as many neighbouring columns as a kernel
multiplies at a time: its first half lies in the lower halves of its bytes, its second half in the upper ones, so that
either half unpacks to columns that are neighbours.

A weight is scale * (code - zero), or scale * code + low where no integer is the zero point. Scales and lows take the
fewest bits that hold them exactly: one for as many columns as share it, in 16 bits where they fit, and in 8 bits beside
one of 16 for each 256 columns, as K-quants store them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import pad

from pagemill.ops.quantized import GROUP, AffineWeight, Float8Weight, QuantizedWeight

Kind = Literal["int4", "int6", "int8", "float8"]

UNITS = (128, 64, 32, 16)
"""Columns of a unit."""
SAMPLE = 64
"""Rows that are looked at before all are."""
TOP_COLUMNS = 4
"""Columns whose upper bits lie in one byte."""


@dataclass(frozen=True, slots=True)
class Numbers:
    """Holds float32 numbers [rows, groups]: `fine`, times `coarse` [rows, groups / n] if it is given."""

    fine: Tensor
    coarse: Tensor | None = None

    @property
    def nbytes(self) -> int:
        return self.fine.nbytes + (0 if self.coarse is None else self.coarse.nbytes)

    def __getitem__(self, rows: Tensor) -> Numbers:
        return Numbers(self.fine[rows], None if self.coarse is None else self.coarse[rows])

    def wide(self) -> Tensor:
        """Returns the numbers, float32 [rows, groups]."""
        fine = self.fine.float()
        if self.coarse is None:
            return fine
        return fine * self.coarse.float().repeat_interleave(fine.shape[1] // self.coarse.shape[1], dim=1)


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """Holds a weight [rows, columns].

    codes:  uint8 [rows, bytes], whole units.
    top:    of 6 bits, uint8 [rows, bytes / 2]: for each 32 columns 8 bytes, byte j the upper bits of columns j, 8 + j,
            16 + j and 24 + j, the lowest bits first.
    group:  columns of a scale. unit: columns of a unit; in 4 and 6 bits each half has a scale of its own if it is
            wider than a group.
    zero:   uint8 [rows, groups]; None: `origin` for all.
    low:    None with a zero point.
    """

    kind: Kind
    columns: int
    codes: Tensor
    scale: Numbers
    group: int
    unit: int
    top: Tensor | None = None
    zero: Tensor | None = None
    low: Numbers | None = None
    origin: int = 0

    @property
    def nbytes(self) -> int:
        parts = (self.codes, self.scale, self.top, self.zero, self.low)
        return sum(part.nbytes for part in parts if part is not None)

    def dense(self, rows: Tensor | None = None) -> Tensor:
        """Returns the weight, or rows int64 [n] of it, in float32: each the very number that was packed."""
        if rows is not None:
            top, zero = (None if part is None else part[rows] for part in (self.top, self.zero))
            low = None if self.low is None else self.low[rows]
            return replace(self, codes=self.codes[rows], scale=self.scale[rows], top=top, zero=zero, low=low).dense()
        group = torch.arange(self.columns, dtype=torch.int64, device=self.codes.device) // self.group
        values = self._values()[:, : self.columns]
        zeros = self.origin if self.zero is None else self.zero[:, group].float()
        weight = (values - zeros) * self.scale.wide()[:, group]
        return weight if self.low is None else weight + self.low.wide()[:, group]

    def _values(self) -> Tensor:
        codes, rows = self.codes, len(self.codes)
        if self.kind == "float8":
            return codes.view(torch.float8_e4m3fn).float()
        if self.kind == "int8":
            return codes.float()
        halves = codes.view(rows, -1, self.unit // 2)
        values = torch.cat((halves & 15, halves >> 4), -1).view(rows, -1)
        if self.top is not None:
            shifts = torch.arange(0, 8, 2, dtype=torch.uint8, device=codes.device)
            values = values | ((self.top.view(rows, -1, 1, 8) >> shifts[:, None] & 3) << 4).view(rows, -1)
        return values.float()


def pack_affine(weight: AffineWeight) -> PackedWeight:
    """Returns the weight in as few bits as hold its largest value: 4, 6 or 8."""
    values, columns = weight.values, weight.values.shape[1]
    scale, low, group = _widest_groups(weight.scale, weight.low, columns)
    most = int(values.amax())
    kind: Kind = "int4" if most < 16 else "int6" if most < 64 else "int8"
    unit = next(unit for unit in UNITS if unit <= max(group, 16 if kind == "int8" else 32) and columns % unit == 0)
    unit = min(unit, 32) if kind == "int6" else unit
    codes, top = (values, None) if kind == "int8" else _nibbles(values, unit, kind == "int6")
    zero = _zeros(scale, low)
    if zero is None:
        scales, lows = _narrowest(scale, low)
        return PackedWeight(kind, columns, codes, scales, group, unit, top, low=lows)
    used = scale != 0
    origin = int(zero[used][0]) if used.any() else 0
    alike = bool((zero == origin).logical_or(~used).all())
    zeros = None if alike else zero.to(torch.uint8)
    (scales,) = _narrowest(scale)
    return PackedWeight(kind, columns, codes, scales, group, unit, top, zeros, origin=origin if alike else 0)


def pack_quantized(weight: QuantizedWeight) -> PackedWeight:
    """Returns the weight in 8 bits."""
    whole = weight.whole()
    codes = _whole_units((whole.to(torch.int16) + 128).to(torch.uint8))
    return PackedWeight("int8", whole.shape[1], codes, Numbers(weight.scales), GROUP, 64, origin=128)


def pack_float8(weight: Float8Weight) -> PackedWeight:
    """Returns the weight in fp8, with the scales that it has."""
    columns = weight.values.shape[1]
    codes = _whole_units(weight.values.view(torch.uint8))
    group = codes.shape[1] if weight.group >= columns else weight.group
    if group % 64:
        raise ValueError(
            f"scales are for {weight.group} of {columns} columns; they must be for all or a multiple of 64"
        )
    return PackedWeight("float8", columns, codes, _in_16_bits(weight.scale) or Numbers(weight.scale), group, 64)


def _widest_groups(scale: Tensor, low: Tensor, columns: int) -> tuple[Tensor, Tensor, int]:
    """Returns scales and lows for as many neighbours as share them everywhere, and how many columns these are."""
    group = columns // scale.shape[1]
    while group < UNITS[0] and columns % (2 * group) == 0:
        pairs = [part.view(len(part), -1, 2) for part in (scale, low)]
        if not all(torch.equal(pair[..., 0], pair[..., 1]) for pair in pairs):
            break
        scale, low = (pair[..., 0].contiguous() for pair in pairs)
        group *= 2
    return scale, low, group


def _zeros(scale: Tensor, low: Tensor) -> Tensor | None:
    """Returns -low / scale if all of these are integers of 8 bits, exactly: float32 of scale's shape."""
    used = scale != 0
    zero = torch.where(used, torch.round(-low / torch.where(used, scale, 1)), 0)
    sound = (zero >= 0) & (zero <= 255) & (zero.double() * scale.double() == -low.double())
    return zero if bool(sound.all()) else None


def _narrowest(*parts: Tensor) -> list[Numbers]:
    """Returns parts [rows, groups] in the fewest bits that hold them. Those of two levels have blocks of one size, as
    the kernels take them: 16 groups, as in Q6_K, or 8, as in Q4_K and Q5_K."""
    ways: list[list[Numbers]] = []
    for count in (16, 8):
        ways.append([_in_16_bits(part) or _in_blocks(part, count) or Numbers(part) for part in parts])
        if all(numbers.fine.dtype != torch.float32 for numbers in ways[-1]):
            break
    return min(ways, key=lambda way: sum(numbers.nbytes for numbers in way))


def _in_16_bits(numbers: Tensor) -> Numbers | None:
    for dtype in (torch.float16, torch.bfloat16):
        if torch.equal(numbers.to(dtype).float(), numbers):
            return Numbers(numbers.to(dtype))
    return None


def _in_blocks(numbers: Tensor, count: int) -> Numbers | None:
    """Returns numbers as integers of 8 bits times a number in fp16 for each `count`; None unless all are such. The
    largest of a block is `most` times its fp16: every one is tried."""
    if numbers.shape[1] % count:
        return None
    if len(numbers) > SAMPLE and _in_blocks(numbers[:SAMPLE], count) is None:
        return None
    blocks = numbers.view(len(numbers), -1, count)
    largest = blocks.gather(-1, blocks.abs().argmax(-1, keepdim=True))
    found, fine, coarse = largest == 0, torch.zeros_like(blocks), torch.zeros_like(largest)
    for most in (sign * size for size in range(1, 129) for sign in (1, -1)):
        unit = (largest / most).half().float()
        steps = torch.round(blocks / torch.where(unit == 0, 1, unit))
        exact = ((steps >= -128) & (steps <= 127) & (steps * unit == blocks)).all(-1, keepdim=True)
        new = exact & ~found
        fine, coarse, found = torch.where(new, steps, fine), torch.where(new, unit, coarse), found | new
        if bool(found.all()):
            return Numbers(fine.view_as(numbers).to(torch.int8), coarse.squeeze(-1).half())
    return None


def _nibbles(values: Tensor, unit: int, with_top: bool) -> tuple[Tensor, Tensor | None]:
    rows = len(values)
    halves = (values & 15).view(rows, -1, 2, unit // 2)
    codes = (halves[:, :, 0] | halves[:, :, 1] << 4).view(rows, -1)
    if not with_top:
        return codes, None
    quarters = (values >> 4).view(rows, -1, TOP_COLUMNS, 8)
    top = quarters[:, :, 0]
    for quarter in range(1, TOP_COLUMNS):
        top = top | quarters[:, :, quarter] << 2 * quarter
    return codes, top.view(rows, -1)


def _whole_units(codes: Tensor) -> Tensor:
    return pad(codes, (0, -codes.shape[1] % 64)).contiguous()
