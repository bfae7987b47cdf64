"""Keys and values as integers of 8 and 4 bits. What is stored depends on nothing but the vector itself: so a slot does
not depend on what else is written, and writing in other chunks or finding a prefix again changes no bit.

The kernels write the same bits (`csrc/isa/narrow_kv.h`). Other bits need other names in `kvcache/kv_format.py`.
Divisors are tensors: on CUDA, torch multiplies by a number's rounded reciprocal where it is to divide by the number.
"""

from __future__ import annotations

import torch
from torch import Tensor

LEAST = 2.0**-100
"""Below this magnitude, or range, vectors are stored as one number: the reciprocal would leave fp32's range."""
MOST = 2.0**126
"""Beyond this magnitude, vectors in 4 bits count as not finite."""
_NAN = 0x7FC0
_HALF = 16
"""Byte 16 g + i has number 32 g + i in its lower half, and number 32 g + i + 16 in its upper one."""


def quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    """Rounds keys or values to int8, symmetrically. Each token's vector of each KV head has a scale of its own.

    x: [..., head_dim]. Returns int8 of the same shape, and fp32 scales [...]: x is about int8 * scale, within
    scale / 2. A vector that is not finite becomes zeros with the scale NaN.
    """
    x = x.float()
    largest = x.abs().amax(-1)
    usable = (largest >= LEAST) & (largest < torch.inf)
    most = torch.full_like(largest, 127.0)
    factor = torch.where(usable, most / largest, 0.0)
    scale = torch.where(usable, largest / most, torch.where(largest < LEAST, 0.0, torch.nan))
    return torch.round(torch.where(usable.unsqueeze(-1), x, 0.0) * factor.unsqueeze(-1)).to(torch.int8), scale


def narrow(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Rounds numbers to a cache's floating point. To 8 bits, what is too large becomes the largest number, and what is
    not finite NaN."""
    if dtype.itemsize > 1:
        return x.to(dtype)
    most = torch.finfo(dtype).max
    return torch.where(x.isfinite(), x.float().clamp(-most, most), torch.nan).to(dtype)


def quantize_int4(x: Tensor, group: int | None = None) -> tuple[Tensor, Tensor]:
    """Rounds vectors to 4 bits, each group of `group` numbers (None: all of a vector) from its least to its greatest.

    x: [..., head_dim], of multiples of 32. Returns uint8 [..., head_dim / 2], and int32 words [..., groups] of two
    bf16 numbers, a scale in the upper half and a low in the lower one: x is about low + scale * n, n in 0 .. 15. A
    group that is not finite becomes zeros with the scale NaN.
    """
    dims = x.shape[-1]
    x = x.float().reshape(*x.shape[:-1], dims // (group or dims), group or dims)
    low, high = x.amin(-1) + 0.0, x.amax(-1)
    finite = torch.maximum(high, -low) <= MOST
    spread = torch.where(finite, high - low, 0.0)
    usable = spread >= LEAST
    scale = torch.where(usable, spread / torch.full_like(spread, 15.0), 0.0).bfloat16()
    low = torch.where(finite, low, 0.0).bfloat16()
    factor = torch.where(usable, 1.0 / scale.float(), 0.0).unsqueeze(-1)
    numbers = (torch.where(finite.unsqueeze(-1), x, 0.0) - low.float().unsqueeze(-1)) * factor
    numbers = torch.round(numbers.clamp(0.0, 15.0)).to(torch.uint8)
    upper = torch.where(finite, scale.view(torch.int16).int(), _NAN)
    words = upper << 16 | low.view(torch.int16).int() & 0xFFFF
    halves = numbers.reshape(*x.shape[:-2], dims // (2 * _HALF), 2, _HALF)
    return (halves[..., 0, :] | halves[..., 1, :] << 4).flatten(-2), words


def dequantize_int4(stored: Tensor, words: Tensor) -> Tensor:
    """Widens uint8 [..., head_dim / 2] with their words [..., groups] to fp32 [..., head_dim]."""
    dims = 2 * stored.shape[-1]
    halves = stored.reshape(*stored.shape[:-1], dims // (2 * _HALF), _HALF)
    numbers = torch.stack((halves & 15, halves >> 4), -2).reshape(*words.shape, dims // words.shape[-1]).float()
    scale, low = ((half & -65536).view(torch.float32).unsqueeze(-1) for half in (words, words << 16))
    return (low + numbers * scale).flatten(-2)


def rotate(x: Tensor) -> Tensor:
    """Multiplies vectors [..., head_dim] by Hadamard's matrix (entries 1 and -1), as many dimensions at a time as the
    greatest power of 2 that divides head_dim. It spreads a few large dimensions over all, so that a scale fits all
    (QuaRot, Ashkboos et al., 2024). Two rotated vectors' product is `rotated_together` times theirs."""
    x = x.float()
    shape, half = x.shape, 1
    while half < rotated_together(shape[-1]):
        a, b = x.reshape(*shape[:-1], shape[-1] // (2 * half), 2, half).unbind(-2)
        x = torch.stack((a + b, a - b), -2).view(shape)
        half *= 2
    return x


def rotated_together(head_dim: int) -> int:
    """Returns how many dimensions `rotate` rotates at a time."""
    return head_dim & -head_dim


def remainder_of(x: Tensor, stored: Tensor, words: Tensor, *, is_key: bool) -> Tensor:
    """Returns what `quantize_as` has left out of keys or values x [tokens, kv_heads, head_dim] in 4 bits: fp32, of keys
    rotated. In 4 bits again (`quantize_int4`), it is what a slot of remainders holds."""
    return (rotate(x) if is_key else x.float()) - dequantize_int4(stored, words)


def quantize_as(dtype: torch.dtype, x: Tensor, groups: int, *, is_key: bool) -> tuple[Tensor, Tensor]:
    """Returns keys or values [tokens, kv_heads, head_dim] as the cache's integers, and their scales
    [tokens, kv_heads, groups]."""
    if dtype == torch.uint8:
        return quantize_int4(rotate(x) if is_key else x, x.shape[-1] // groups)
    elements, scale = quantize(x)
    return elements, scale.unsqueeze(-1)


def dequantize(stored: Tensor, scales: Tensor) -> Tensor:
    """Widens what `quantize_as` returns, to fp32 [..., head_dim]; 4-bit keys stay rotated."""
    return dequantize_int4(stored, scales) if stored.dtype == torch.uint8 else stored.float() * scales
