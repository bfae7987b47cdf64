"""Products with narrow weights on GPUs, as Triton kernels; `triton_quantized.py` launches them.

Weights are read as `PackedWeight` has them, each byte once, and become numbers in registers. A code less its zero point
is exact in bfloat16 and float16, so products are those of the codes, in float32, and a group's sum is multiplied with
its scale: the weight itself is never rounded.

Sums: columns of a unit, in the order of the instructions; units in ascending order. `multiply_row` gives each of
BLOCK_C places of a row its own sum, and adds these in the end. `multiply_rows` cuts the columns into parts, which
`add_parts` adds in ascending order. What is cut follows from the weight's shape alone, so a row's bits do not depend on
other rows.

Strides are in elements. A name of a pointer that may be None says so; what depends on it is then left out.
"""

from __future__ import annotations

import triton
import triton.language as tl

from pagemill.ops.triton_early import let_next_begin, wait_for_previous

MAGIC_VALUE = tl.constexpr(8388608.0)
"""2**23: the last bits of this float32 hold an integer below 2**23, which comes out by a subtraction, cheaper than a
conversion. Its bits, 0x4B000000, are an argument, `magic`: unknown to the compiler, they lie in a register, and one
instruction masks a code's bits and sets these; it takes one constant only."""
SIXTEENTH = tl.constexpr(0.0625)
FP8_BIAS = tl.constexpr(256.0)
"""fp8's bits, moved to the place of fp16's, are the number times 2**(7 - 15): exponents differ in their bias."""
FP8_MASK = tl.constexpr(-0x78100000)
FP8_HALF_BIAS = tl.constexpr(2.0**60)
"""At the place of float32's they are the number times 2**(7 - 127), too small to be multiplied with what is small too:
x takes half of that, and the scale the other."""


@triton.jit
def _of_bits(bits, zero, magic):
    """Returns the integers less `zero` (float32, integers too) in float32, exactly. bits: below 2**16."""
    return ((bits.to(tl.int32) | magic).to(tl.float32, bitcast=True)) - (MAGIC_VALUE + zero)


@triton.jit
def _of_float8(codes):
    """Returns numbers of fp8 (e4m3) over FP8_BIAS in float32, exactly, subnormal ones too."""
    wide = codes.to(tl.uint16)
    return (((wide & 127) << 7) | ((wide & 128) << 8)).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _of_float8_bits(codes):
    """Returns numbers of fp8 (e4m3) over FP8_HALF_BIAS**2 in float32, exactly; it takes few instructions."""
    return ((codes.to(tl.int8, bitcast=True).to(tl.int32) << 20) & FP8_MASK).to(tl.float32, bitcast=True)


@triton.jit
def _numbers(fine, coarse, row, group, groups, mask, PER_COARSE: tl.constexpr):
    """Loads numbers of `row` and `group`, two tensors that broadcast. coarse: may be None."""
    number = tl.load(fine + row * groups + group, mask, other=0).to(tl.float32)
    if coarse is not None:
        number *= tl.load(coarse + row * (groups // PER_COARSE) + group // PER_COARSE, mask, other=0).to(tl.float32)
    return number


@triton.jit
def _zeros(zero, row, group, groups, mask, ORIGIN: tl.constexpr):
    if zero is None:
        return ORIGIN
    else:
        return tl.load(zero + row * groups + group, mask, other=0).to(tl.float32)


@triton.jit
def _sum_of(sums, product, x, factors, group, there, PER_COARSE: tl.constexpr, BIAS: tl.constexpr = 1.0):
    """Returns sums [rows, places] and what the codes' product [rows, places, n] with x [places, n] adds to them.

    factors: pointers to scales and lows, which rows they are of, and how many a row has.
    """
    scale, coarse_scale, low, coarse_low, row, groups = factors
    factor = _numbers(scale, coarse_scale, row, group, groups, there, PER_COARSE)
    if BIAS != 1.0:
        factor *= BIAS
    sums += tl.sum(product, 2) * factor
    if low is not None:
        sums += _numbers(low, coarse_low, row, group, groups, there, PER_COARSE) * tl.sum(x, 1)[None, :]
    return sums


@triton.jit
def _add_six_bits(
    sums, x, codes, top, zero, factors, place, row, chunk, there, columns, groups, magic,
    GROUP: tl.constexpr, PER_COARSE: tl.constexpr, ORIGIN: tl.constexpr,
):  # fmt: skip
    """Returns sums [rows, chunks] and what the units of 32 columns at `place` add, 8 columns of a shift at a time."""
    byte = tl.arange(0, 8)
    at = (place * 16)[:, :, None] + byte[None, None, :]
    first = tl.load(codes + at, there[:, :, None], other=0).to(tl.uint32)
    last = tl.load(codes + at + 8, there[:, :, None], other=0).to(tl.uint32)
    at = (place * 8)[:, :, None] + byte[None, None, :]
    above = tl.load(top + at, there[:, :, None], other=0).to(tl.uint32) << 4
    for half in tl.static_range(2):
        column = (chunk * 32 + 16 * half)[:, None] + byte[None, :]
        group = ((chunk * 32 + 16 * half) // GROUP)[None, :]
        offset = _zeros(zero, row, group, groups, there, ORIGIN)
        offset = offset if zero is None else offset[:, :, None]
        x_first = tl.load(x + column, column < columns, other=0).to(tl.float32)
        x_last = tl.load(x + column + 8, column + 8 < columns, other=0).to(tl.float32)
        code = ((first >> (4 * half)) & 15) | ((above >> (4 * half)) & 48)
        product = _of_bits(code, offset, magic) * x_first[None, :, :]
        code = ((last >> (4 * half)) & 15) | ((above >> (4 * half + 2)) & 48)
        product += _of_bits(code, offset, magic) * x_last[None, :, :]
        sums = _sum_of(sums, product, x_first + x_last, factors, group, there, PER_COARSE)
    return sums


@triton.jit
def multiply_row(
    x, codes, top, scale, coarse_scale, zero, low, coarse_low, bias, y,
    out_features, columns, chunks, groups, magic,
    KIND: tl.constexpr, UNIT: tl.constexpr, GROUP: tl.constexpr, PER_COARSE: tl.constexpr, ORIGIN: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Writes y [out_features] = weight x for one x [columns], BLOCK_N outputs at a time; grid [outputs / BLOCK_N].

    chunks: of 16 bytes, of a row's codes. Each of BLOCK_C places takes every BLOCK_C-th chunk.
    """
    output = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = output < out_features
    row = output.to(tl.int64)[:, None]
    byte = tl.arange(0, 16)
    factors = (scale, coarse_scale, low, coarse_low, row, groups)
    sums = tl.zeros((BLOCK_N, BLOCK_C), tl.float32)
    for first in range(0, chunks, BLOCK_C):
        chunk = first + tl.arange(0, BLOCK_C)
        there = inside[:, None] & (chunk < chunks)[None, :]
        place = row * chunks + chunk[None, :]
        if KIND == "int6":
            sums = _add_six_bits(
                sums, x, codes, top, zero, factors, place, row, chunk, there, columns, groups, magic,
                GROUP, PER_COARSE, ORIGIN,
            )  # fmt: skip
        else:
            at = (place * 16)[:, :, None] + byte[None, None, :]
            packed = tl.load(codes + at, there[:, :, None], other=0)
            IN_UNIT: tl.constexpr = UNIT // 32 if KIND == "int4" else 1
            begin = (chunk // IN_UNIT) * UNIT + (chunk % IN_UNIT) * 16 if KIND == "int4" else chunk * 16
            column = begin[:, None] + byte[None, :]
            group = (begin // GROUP)[None, :]
            offset = _zeros(zero, row, group, groups, there, ORIGIN)
            part = tl.load(x + column, column < columns, other=0).to(tl.float32)
            if KIND == "float8":
                product = _of_float8_bits(packed) * (part * FP8_HALF_BIAS)[None, :, :]
            else:
                lower = packed & 15 if KIND == "int4" else packed
                product = _of_bits(lower, offset if zero is None else offset[:, :, None], magic) * part[None, :, :]
            BIAS: tl.constexpr = FP8_HALF_BIAS if KIND == "float8" else 1.0
            sums = _sum_of(sums, product, part, factors, group, there, PER_COARSE, BIAS)
            if KIND == "int4":
                column += UNIT // 2
                part = tl.load(x + column, column < columns, other=0).to(tl.float32)
                if UNIT // 2 >= GROUP:
                    group = ((begin + UNIT // 2) // GROUP)[None, :]
                    offset = _zeros(zero, row, group, groups, there, ORIGIN)
                offset = offset * 16  # the upper halves stay where they are, 16 times as much
                upper = _of_bits(packed & 240, offset if zero is None else offset[:, :, None], magic)
                product = upper * (part * SIXTEENTH)[None, :, :]
                sums = _sum_of(sums, product, part, factors, group, there, PER_COARSE)
    total = tl.sum(sums, 1)
    if bias is not None:
        total += tl.load(bias + output, inside, other=0)
    tl.store(y + output, total.to(y.dtype.element_ty), inside)


@triton.jit
def _scaled(sums, product, x, factors, group, inside, PER_COARSE: tl.constexpr):
    """Returns sums [outputs, tokens] and a group's product of codes, scaled, and what its lows add. factors: see
    `_sum_of`."""
    scale, coarse_scale, low, coarse_low, row, groups = factors
    sums += product * _numbers(scale, coarse_scale, row, group, groups, inside, PER_COARSE)[:, None]
    if low is not None:
        lows = _numbers(low, coarse_low, row, group, groups, inside, PER_COARSE)
        sums += lows[:, None] * tl.sum(x.to(tl.float32), 0)[None, :]
    return sums


@triton.jit
def _tile_of_x(x, token, x_token, begin, columns, inside, COUNT: tl.constexpr, DOT: tl.constexpr):
    """Returns x [COUNT columns from `begin` on, tokens]."""
    column = begin + tl.arange(0, COUNT)
    at = x + column[:, None] + (token * x_token)[None, :]
    return tl.load(at, (column < columns)[:, None] & inside[None, :], other=0).to(DOT)


@triton.jit(do_not_specialize=["tokens"])
def multiply_rows(
    x, codes, top, scale, coarse_scale, zero, low, coarse_low, bias, y, parts,
    tokens, out_features, columns, chunks, groups, units, units_of_part, x_token, magic,
    KIND: tl.constexpr, UNIT: tl.constexpr, GROUP: tl.constexpr, PER_COARSE: tl.constexpr, ORIGIN: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Writes y [tokens, out_features] = x weight^T for x [tokens, columns], or one part of the columns' sums.

    grid [outputs / BLOCK_N, tokens / BLOCK_M, parts]. parts: fp32 [parts, tokens, out_features], to which results go
    without bias; None for a single part. DOT: what products are computed in.
    """
    output = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    token = tl.program_id(1).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    inside, here = output < out_features, token < tokens
    row = output.to(tl.int64)
    factors = (scale, coarse_scale, low, coarse_low, row, groups)
    sums = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    first = tl.program_id(2) * units_of_part
    for unit in range(first, tl.minimum(first + units_of_part, units)):
        begin = unit * UNIT
        group = begin // GROUP
        offset = _zeros(zero, row, group, groups, inside, ORIGIN)
        if (KIND == "int8") | (KIND == "float8"):
            at = (row * chunks * 16 + begin)[:, None] + tl.arange(0, UNIT)[None, :]
            packed = tl.load(codes + at, inside[:, None], other=0)
            if KIND == "float8":
                weight = _of_float8(packed).to(DOT)
            else:
                weight = _of_bits(packed, offset if zero is None else offset[:, None], magic).to(DOT)
            part = _tile_of_x(x, token, x_token, begin, columns, here, UNIT, DOT)
            product = tl.dot(weight, part, input_precision="ieee")
            if KIND == "float8":
                product *= FP8_BIAS
            sums = _scaled(sums, product, part, factors, group, inside, PER_COARSE)
        else:
            HALF: tl.constexpr = UNIT // 2
            byte = tl.arange(0, HALF)
            at = (row * chunks * 16 + unit * HALF)[:, None] + byte[None, :]
            packed = tl.load(codes + at, inside[:, None], other=0)
            lower, upper = packed & 15, packed >> 4
            if top is not None:
                at = (row * chunks * 8 + unit * 8)[:, None] + (byte % 8)[None, :]
                above = tl.load(top + at, inside[:, None], other=0) >> (byte // 8 * 2).to(tl.uint8)[None, :]
                lower |= (above & 3) << 4
                upper |= above & 48
            weight = _of_bits(lower, offset if zero is None else offset[:, None], magic).to(DOT)
            part = _tile_of_x(x, token, x_token, begin, columns, here, HALF, DOT)
            product = tl.dot(weight, part, input_precision="ieee")
            if HALF >= GROUP:
                sums = _scaled(sums, product, part, factors, group, inside, PER_COARSE)
                group = (begin + HALF) // GROUP
                offset = _zeros(zero, row, group, groups, inside, ORIGIN)
                product = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
            weight = _of_bits(upper, offset if zero is None else offset[:, None], magic).to(DOT)
            other = _tile_of_x(x, token, x_token, begin + HALF, columns, here, HALF, DOT)
            product = tl.dot(weight, other, product, input_precision="ieee")
            if HALF < GROUP:
                other = part.to(tl.float32) + other.to(tl.float32)
            sums = _scaled(sums, product, other, factors, group, inside, PER_COARSE)
    written = inside[:, None] & here[None, :]
    if parts is None:
        if bias is not None:
            sums += tl.load(bias + output, inside, other=0)[:, None]
        at = row[:, None] + (token * out_features)[None, :]
        tl.store(y + at, sums.to(y.dtype.element_ty), written)
    else:
        at = row[:, None] + ((tl.program_id(2) * tokens + token) * out_features)[None, :]
        tl.store(parts + at, sums, written)


@triton.jit(do_not_specialize=["size", "count"])
def add_parts(
    parts, bias, y, size, out_features, count, BLOCK: tl.constexpr, EARLY: tl.constexpr
):  # fmt: skip
    """Writes y [size] = the sum of parts fp32 [count, size], and bias [out_features]; grid [size / BLOCK].

    EARLY: see `triton_early.py`.
    """
    let_next_begin(EARLY)
    wait_for_previous(EARLY)
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    total = tl.zeros((BLOCK,), tl.float32)
    part = parts + at
    for _ in range(count):
        total += tl.load(part, inside, other=0)
        part += size
    if bias is not None:
        total += tl.load(bias + at % out_features, inside, other=0).to(tl.float32)
    tl.store(y + at, total.to(y.dtype.element_ty), inside)
