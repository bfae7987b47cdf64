"""Reads tiles of keys and values in any format out of a cache, as parts of Triton kernels: what is narrow is widened in
registers.

KEY_AS and VALUE_AS name the format of elements: "float" (fp32, fp16, bf16), "int8" (with an fp32 scale per vector),
"e4m3" and "e5m2" (8-bit floating point, as bytes), "int4" (bytes of two numbers, with words of a scale and a low in
bf16). A tile in 4 bits is read as two halves: byte 16 g + i has dimensions 32 g + i and 32 g + i + 16. So nothing moves
between threads: a product with the tile is the sum of products with its halves.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

READ_AS = {
    torch.float32: "float", torch.float16: "float", torch.bfloat16: "float", torch.int8: "int8", torch.uint8: "int4",
    torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2",
}  # fmt: skip
MOST_FP16 = tl.constexpr(65504.0)
MOST_SCALE, MOST_LOW = tl.constexpr(2180.0), tl.constexpr(32700.0)
"""The largest number of a 4-bit key in fp16: a low and 15 scales stay below 65,504."""


@triton.jit
def load(pointers, there, MASKED: tl.constexpr):
    """Loads what is there, and 0 elsewhere; all, if not MASKED."""
    return tl.load(pointers, there, other=0) if MASKED else tl.load(pointers)


@triton.jit
def load_tile(pointers, there, inside, MASKED: tl.constexpr, PADDED: tl.constexpr):
    """Loads a tile of keys or values: `there` by token, `inside` by dimension, where it is MASKED and PADDED."""
    if PADDED:
        return load(pointers, there & inside if MASKED else inside, True)
    else:
        return load(pointers, there, MASKED)


INT8_TO_BF16 = tl.constexpr("""{
    .reg .b32 x, y, less;
    mov.b32 less, 0xBF80BF80;
    prmt.b32 x, $2, 0, 0x4140;
    lop3.b32 y, x, 0x00800080, 0x43004300, 0xEA;
    lop3.b32 x, x, 0x007F007F, 0x43004300, 0xEA;
    fma.rn.bf16x2 $0, y, less, x;
    prmt.b32 x, $2, 0, 0x4342;
    lop3.b32 y, x, 0x00800080, 0x43004300, 0xEA;
    lop3.b32 x, x, 0x007F007F, 0x43004300, 0xEA;
    fma.rn.bf16x2 $1, y, less, x;
}""")
"""The lower 7 bits in the place of bf16's fraction make 128 more than their value; the sign's bit there makes 128 or
256, which is taken off."""
E4M3_TO_FP16 = tl.constexpr("""{
    .reg .b16 lower, upper;
    mov.b32 {lower, upper}, $2;
    cvt.rn.f16x2.e4m3x2 $0, lower;
    cvt.rn.f16x2.e4m3x2 $1, upper;
}""")
E5M2_TO_FP16 = tl.constexpr("""{
    prmt.b32 $0, $2, 0, 0x1404;
    prmt.b32 $1, $2, 0, 0x3424;
}""")
"""A byte is the upper one of fp16."""


@triton.jit
def widened(elements, AS: tl.constexpr, PACKED: tl.constexpr, NATIVE: tl.constexpr, DOT: tl.constexpr):
    """Returns elements that do not share bytes as DOT. PACKED: by assembler for NVIDIA's GPUs of capability 8 and 9,
    four at a time, where there is some for DOT. NATIVE: the GPU converts e4m3."""
    # Were assembler pure, the compiler would move it behind the way through shared memory, which narrow values go byte
    # by byte.
    if PACKED and AS == "int8" and tl.bfloat16 == DOT:
        return tl.inline_asm_elementwise(INT8_TO_BF16, "=r,=r,r", [elements], dtype=tl.bfloat16, is_pure=False, pack=4)
    elif PACKED and AS == "e5m2" and tl.float16 == DOT:
        return tl.inline_asm_elementwise(E5M2_TO_FP16, "=r,=r,r", [elements], dtype=tl.float16, is_pure=False, pack=4)
    elif PACKED and NATIVE and AS == "e4m3" and tl.float16 == DOT:
        return tl.inline_asm_elementwise(E4M3_TO_FP16, "=r,=r,r", [elements], dtype=tl.float16, is_pure=False, pack=4)
    elif AS == "e5m2":
        return (elements.to(tl.uint16) << 8).to(tl.float16, bitcast=True).to(DOT)
    elif AS == "e4m3" and NATIVE:
        return elements.to(tl.float8e4nv, bitcast=True).to(tl.float16).to(DOT)
    elif AS == "e4m3":  # exponents in fp32 count from 127, here from 7
        bits = elements.to(tl.uint32)
        wide = (((bits & 0x80) << 24) | ((bits & 0x7F) << 20)).to(tl.float32, bitcast=True) * 2.0**120
        return tl.where((bits & 0x7F) == 0x7F, float("nan"), wide).to(DOT)
    else:
        return elements.to(DOT)


@triton.jit
def in_fp16(numbers):
    """Returns numbers in fp16; what is too large becomes what it holds."""
    wide = numbers.to(tl.float32)
    return tl.where(wide > MOST_FP16, MOST_FP16, tl.where(wide < -MOST_FP16, -MOST_FP16, wide)).to(tl.float16)


@triton.jit
def load_key_halves(
    key, words, key_at, words_at, key_dim, there,
    HEAD_DIM: tl.constexpr, DIMS: tl.constexpr, BLOCK_SIZE: tl.constexpr, TOGETHER: tl.constexpr,
    MASKED: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Loads 4-bit keys, `there` by token [n], divided by TOGETHER: their lower and upper halves [DIMS / 2, n] as DOT.
    In fp16 what is too large becomes what it holds.

    key_at, words_at: offsets of tokens [n]. HEAD_DIM: a multiple of 32, DIMS the power of 2 from it on.
    """
    GROUPS: tl.constexpr = DIMS // 32
    group, byte = tl.arange(0, GROUPS), tl.arange(0, 16)
    inside = group * 32 < HEAD_DIM
    at = key + key_at[None, None, :] + (group[:, None, None] * 16 + byte[None, :, None]) * key_dim
    packed = load_tile(at, there[None, None, :], inside[:, None, None], MASKED, HEAD_DIM != DIMS)
    at = words + words_at[None, :] + group[:, None] * BLOCK_SIZE
    scale, low = _scale_and_low(load_tile(at, there[None, :], inside[:, None], MASKED, HEAD_DIM != DIMS))
    scale *= 1.0 / TOGETHER
    low *= 1.0 / TOGETHER
    if tl.float16 == DOT:
        scale = tl.where(scale > MOST_SCALE, MOST_SCALE, scale)
        low = tl.where(low > MOST_LOW, MOST_LOW, tl.where(low < -MOST_LOW, -MOST_LOW, low))
    lower, upper = _numbers(packed, scale[:, None, :], low[:, None, :])
    SHAPE: tl.constexpr = (DIMS // 2, key_at.shape[0])
    return tl.reshape(lower.to(DOT), SHAPE), tl.reshape(upper.to(DOT), SHAPE)


@triton.jit
def load_value_halves(
    value, words, value_at, words_at, value_dim, there,
    HEAD_DIM: tl.constexpr, DIMS: tl.constexpr, MASKED: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Loads 4-bit values, `there` by token [n]: their lower and upper halves [n, DIMS / 2] as DOT."""
    byte = tl.arange(0, DIMS // 2)
    at = value + value_at[:, None] + byte[None, :] * value_dim
    packed = load_tile(at, there[:, None], (byte < HEAD_DIM // 2)[None, :], MASKED, HEAD_DIM != DIMS)
    scale, low = _scale_and_low(load(words + words_at, there, MASKED))
    lower, upper = _numbers(packed, scale[:, None], low[:, None])
    return lower.to(DOT), upper.to(DOT)


@triton.jit
def _scale_and_low(words):
    return (words & -65536).to(tl.float32, bitcast=True), (words << 16).to(tl.float32, bitcast=True)


@triton.jit
def _numbers(packed, scale, low):
    """Returns low + scale * n for n in the lower and in the upper half of each byte. Put into a float, n is 16 + n."""
    bits = packed.to(tl.uint32)
    from_16 = low - 16.0 * scale
    lower = (((bits & 15) << 19) | 0x41800000).to(tl.float32, bitcast=True)
    upper = (((bits >> 4) << 19) | 0x41800000).to(tl.float32, bitcast=True)
    return lower * scale + from_16, upper * scale + from_16
