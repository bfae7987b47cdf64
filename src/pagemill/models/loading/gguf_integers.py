"""Takes quantized GGUF formats apart into integers, scales and lowest values, which give the very weights.

A weight is scale * value + low. Scales are numbers of at most 18 significant bits, and products of a scale with a value
of at most 24: float32 holds both exactly.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]


def integers_of(stored: Bytes, form: str) -> tuple[Bytes, Floats, Floats]:
    """Returns values uint8 [rows, blocks, ...], and scale and low, float32 [rows, blocks, ...], in the weights' order.

    stored: uint8 [rows, blocks, bytes]. form: Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K or Q6_K. There is a scale for
    each 32 values, in Q6_K for each 16.
    """
    with np.errstate(invalid="ignore"):  # who loads them refuses scales that are not finite
        if form == "Q6_K":
            return _q6_k(stored)
        return _k(stored, form == "Q5_K") if form.endswith("_K") else _of_32(stored, form)


def _of_32(stored: Bytes, form: str) -> tuple[Bytes, Floats, Floats]:
    """Reads blocks of 32 values: a scale in fp16, of Q4_1 and Q5_1 a minimum, fifth bits, the values' lower bits."""
    header = 4 if form.endswith("_1") else 2
    head, rest = _halves(stored[..., :header]), stored[..., header:]
    scale, bits = head[..., :1], int(form[1])
    values: Bytes = rest ^ np.uint8(128) if bits == 8 else _nibbles(rest[..., -16:])  # 8 bits have a sign: plus 128
    if bits == 5:
        values |= np.unpackbits(rest[..., :4], axis=-1, bitorder="little") << 4
    return values, scale, head[..., 1:] if header == 4 else -(1 << bits - 1) * scale


def _k(stored: Bytes, fifth: bool) -> tuple[Bytes, Floats, Floats]:
    """Reads blocks of 256: a scale and a minimum in fp16, 8 of each in 6 bits, which multiply them, and the values."""
    first, second, mixed = (stored[..., at : at + 4] for at in (4, 8, 12))
    scales = np.concatenate((first & 63, mixed & 15 | first >> 6 << 4), axis=-1).astype(np.float32)
    minima = np.concatenate((second & 63, mixed >> 4 | second >> 6 << 4), axis=-1).astype(np.float32)
    head, shape = _halves(stored[..., :4]), stored.shape[:2]
    values = _nibbles(stored[..., -128:].reshape(*shape, 4, 32)).reshape(*shape, 8, 32)
    if fifth:
        values |= (stored[..., None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None] & 1) << 4
    return values, head[..., :1] * scales, -head[..., 1:] * minima


def _q6_k(stored: Bytes) -> tuple[Bytes, Floats, Floats]:
    """Reads blocks of 256: 4 bits of each value, 2 bits of each, 16 scales of 8 bits, and one in fp16 for all."""
    shape = stored.shape[:2]
    values = _nibbles(stored[..., :128].reshape(*shape, 2, 64)).reshape(*shape, 2, 4, 32)
    values |= (stored[..., 128:192].reshape(*shape, 2, 1, 32) >> np.arange(0, 8, 2, dtype=np.uint8)[:, None] & 3) << 4
    scale = _halves(stored[..., 208:]) * stored[..., 192:208].view(np.int8).astype(np.float32)
    return values, scale, -32 * scale


def _nibbles(packed: Bytes) -> Bytes:
    """Returns the lower halves of the bytes, and behind them the upper ones, along the last axis."""
    return np.concatenate((packed & 15, packed >> 4), axis=-1)


def _halves(stored: Bytes) -> Floats:
    return np.ascontiguousarray(stored).view(np.float16).astype(np.float32)
