"""Rounds keys and values to int8: symmetrically, each token's vector of each KV head with a scale of its own, so that
what a slot holds depends on nothing but its token. Other bits need another name in `kvcache/kv_format.py`."""

from __future__ import annotations

import torch
from torch import Tensor

LEAST = 2.0**-100
"""Vectors without an element of this magnitude are stored as zeros: their reciprocal would leave fp32's range."""


def quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [..., head_dim] -> int8 of the same shape, and fp32 scales [...]: x is about int8 * scale, within scale / 2.

    A vector that is not finite becomes zeros with the scale NaN. The kernels' bits (`write_scaled` in csrc).
    """
    x = x.float()
    largest = x.abs().amax(-1)
    usable = (largest >= LEAST) & (largest < torch.inf)
    most = torch.full_like(largest, 127.0)
    factor = torch.where(usable, most / largest, 0.0)
    scale = torch.where(usable, largest / most, torch.where(largest < LEAST, 0.0, torch.nan))
    return torch.round(torch.where(usable.unsqueeze(-1), x, 0.0) * factor.unsqueeze(-1)).to(torch.int8), scale
