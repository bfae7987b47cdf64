"""float32 weights as the integers that they were stored as, before they are packed."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pagemill.ops.checks import check_contiguous

BLOCK = 32


@dataclass(frozen=True, slots=True)
class AffineWeight:
    """The weight is scale * value + low in float32, where scale * value is exact. values uint8 [rows, columns], below
    2 ** bits; scale, low float32 [rows, columns / 32]; contiguous. Raises ValueError for other shapes, dtypes and
    bits."""

    values: Tensor
    scale: Tensor
    low: Tensor
    bits: int

    def __post_init__(self) -> None:
        rows, columns = self.values.shape
        if self.bits not in (4, 8) or columns % BLOCK:
            raise ValueError(f"{columns} columns of {self.bits} bits must be a multiple of {BLOCK}, of 4 or 8 bits")
        check_contiguous("values", self.values, torch.uint8, (rows, columns))
        check_contiguous("scale", self.scale, torch.float32, (rows, columns // BLOCK))
        check_contiguous("low", self.low, torch.float32, (rows, columns // BLOCK))

    def dense(self) -> Tensor:
        """float32 [rows, columns]."""
        values = self.values.view(len(self.values), -1, BLOCK).float()
        return (values * self.scale.unsqueeze(-1) + self.low.unsqueeze(-1)).view(self.values.shape)
