"""Writes keys and values into a cache of any format, as Triton kernels: the bits of `attention/quantize.py`.

All of it is to be compiled without fused multiply-add: a product is rounded before it is added to. Strides are in
elements. A name of a pointer that may be None says so; what depends on it is then left out.
"""

from __future__ import annotations

import triton
import triton.language as tl

from pagemill.ops.triton_early import let_next_begin, wait_for_previous

LEAST = tl.constexpr(2.0**-100)
MOST = tl.constexpr(2.0**126)
"""As in quantize.py: shorter vectors are stored as zeros or as one number, longer ones count as not finite."""
ROUNDER = tl.constexpr(1.5 * 2**23)
"""Added and taken away, it rounds a float32 below 2**22 to an integer, halves to even."""
NAN_WORD = tl.constexpr(0x7FC00000)
"""The word of a group in 4 bits that is not finite: the scale NaN, the low 0."""


@triton.jit(
    do_not_specialize=["tokens"],
    do_not_specialize_on_alignment=["slots", "rest_slots"],  # those of a layer group begin anywhere
)
def write_tokens(
    key, value, slots, rest_slots, key_cache, value_cache, key_scale, value_scale, tokens,
    key_token, key_head, value_token, value_head,
    key_cache_frame, key_cache_head, key_cache_token, key_cache_dim,
    value_cache_frame, value_cache_head, value_cache_token, value_cache_dim,
    key_scale_frame, key_scale_head, value_scale_frame, value_scale_head,
    KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, DIMS: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    VECTORS: tl.constexpr, STAGES: tl.constexpr, KEY_AS: tl.constexpr, VALUE_AS: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Writes keys and values [tokens, KV_HEADS, HEAD_DIM] to their slots, VECTORS at a time; slot -1 is skipped.

    grid [tokens * KV_HEADS / VECTORS]. value and value_cache: None where values lie in keys. key_scale and value_scale:
    None unless elements are integers. rest_slots: where remainders go; may be None. STAGES: 4-bit keys are rotated
    2**STAGES dimensions at a time. KEY_AS, VALUE_AS: see `triton_tiles.py`. EARLY: see `ops/triton_early.py`.
    """
    let_next_begin(EARLY)
    wait_for_previous(EARLY)
    vector = tl.program_id(0).to(tl.int64) * VECTORS + tl.arange(0, VECTORS)
    token, head = vector // KV_HEADS, vector % KV_HEADS
    slot = tl.load(slots + token, token < tokens, other=-1)
    dims = tl.arange(0, DIMS)
    there = (slot >= 0)[:, None] & (dims < HEAD_DIM)[None, :]
    new_key = tl.load(key + (token * key_token + head * key_head)[:, None] + dims[None, :], there, other=0)
    new_key = new_key.to(tl.float32)
    key_cache += head * key_cache_head
    if value is not None:
        new_value = tl.load(value + (token * value_token + head * value_head)[:, None] + dims[None, :], there, other=0)
        new_value = new_value.to(tl.float32)
        value_cache += head * value_cache_head
    if key_scale is not None:
        key_scale += head * key_scale_head
        value_scale += head * value_scale_head
    if KEY_AS == "int4":
        new_key = rotated(new_key, VECTORS, DIMS, STAGES)
        left_key = _store_int4(
            new_key, slot, key_cache, key_cache_frame, key_cache_token, key_cache_dim, key_scale, key_scale_frame,
            HEAD_DIM, DIMS, BLOCK_SIZE, VECTORS, 32,
        )  # fmt: skip
    else:
        _store_bytes(
            new_key, slot, key_cache, key_cache_frame, key_cache_token, key_cache_dim, key_scale, key_scale_frame,
            HEAD_DIM, DIMS, BLOCK_SIZE, KEY_AS,
        )  # fmt: skip
    if value is not None:
        if VALUE_AS == "int4":
            left_value = _store_int4(
                new_value, slot, value_cache, value_cache_frame, value_cache_token, value_cache_dim,
                value_scale, value_scale_frame, HEAD_DIM, DIMS, BLOCK_SIZE, VECTORS, DIMS,
            )  # fmt: skip
        else:
            _store_bytes(
                new_value, slot, value_cache, value_cache_frame, value_cache_token, value_cache_dim,
                value_scale, value_scale_frame, HEAD_DIM, DIMS, BLOCK_SIZE, VALUE_AS,
            )  # fmt: skip
    if rest_slots is not None:
        slot = tl.load(rest_slots + token, slot >= 0, other=-1)
        _store_int4(
            left_key, slot, key_cache, key_cache_frame, key_cache_token, key_cache_dim, key_scale, key_scale_frame,
            HEAD_DIM, DIMS, BLOCK_SIZE, VECTORS, 32,
        )  # fmt: skip
        _store_int4(
            left_value, slot, value_cache, value_cache_frame, value_cache_token, value_cache_dim,
            value_scale, value_scale_frame, HEAD_DIM, DIMS, BLOCK_SIZE, VECTORS, DIMS,
        )  # fmt: skip


@triton.jit(do_not_specialize=["vectors"])
def rotate_queries(
    query, output, vectors, query_token, query_head,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, DIMS: tl.constexpr, VECTORS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Rotates queries [tokens, HEADS, HEAD_DIM], `vectors` in all, 2**STAGES dimensions at a time, and divides them by
    as much: they are no larger than they were. output: contiguous, fp32, or fp16, where what is too large becomes the
    largest number. grid [vectors / VECTORS].
    """
    vector = tl.program_id(0).to(tl.int64) * VECTORS + tl.arange(0, VECTORS)
    dims = tl.arange(0, DIMS)
    there = (vector < vectors)[:, None] & (dims < HEAD_DIM)[None, :]
    at = query + (vector // HEADS * query_token + vector % HEADS * query_head)[:, None] + dims[None, :]
    turned = rotated(tl.load(at, there, other=0).to(tl.float32), VECTORS, DIMS, STAGES) * 2.0**-STAGES
    if output.dtype.element_ty == tl.float16:
        turned = tl.where(tl.abs(turned) > 65504.0, tl.where(turned > 0, 65504.0, -65504.0), turned)
    tl.store(output + vector[:, None] * HEAD_DIM + dims[None, :], turned.to(output.dtype.element_ty), there)


@triton.jit
def rotated(x, VECTORS: tl.constexpr, DIMS: tl.constexpr, STAGES: tl.constexpr):
    """Multiplies vectors fp32 [VECTORS, DIMS] by Hadamard's matrix, 2**STAGES dimensions at a time: `rotate` in
    quantize.py."""
    for stage in tl.static_range(STAGES):
        pairs = tl.reshape(x, (VECTORS, DIMS >> (stage + 1), 2, 1 << stage))
        a, b = tl.split(tl.permute(pairs, (0, 1, 3, 2)))
        x = tl.reshape(tl.permute(tl.join(a + b, a - b), (0, 1, 3, 2)), (VECTORS, DIMS))
    return x


@triton.jit
def _store_bytes(
    x, slot, cache, cache_frame, cache_token, cache_dim, scale, scale_frame,
    HEAD_DIM: tl.constexpr, DIMS: tl.constexpr, BLOCK_SIZE: tl.constexpr, AS: tl.constexpr,
):  # fmt: skip
    """Stores vectors fp32 [n, DIMS] as floating point of any size, or as int8 with a scale each. Pointers are those of
    the vectors' heads [n]."""
    written = slot >= 0
    frame, offset = slot // BLOCK_SIZE, slot % BLOCK_SIZE
    dims = tl.arange(0, DIMS)
    at = (cache + frame * cache_frame + offset * cache_token)[:, None] + dims[None, :] * cache_dim
    there = written[:, None] & (dims < HEAD_DIM)[None, :]
    if AS == "int8":
        elements, scales = _quantize(x)
        tl.store(at, elements, there)
        tl.store(scale + frame * scale_frame + offset, scales, written)
    elif AS == "e4m3":
        tl.store(at, _narrow(x, 3, 7, 448.0), there)
    elif AS == "e5m2":
        tl.store(at, _narrow(x, 2, 15, 57344.0), there)
    else:
        tl.store(at, x.to(cache.dtype.element_ty), there)


@triton.jit
def _quantize(x):
    """Returns int8 elements and fp32 scales [n] of vectors [n, dims]: the bits of `quantize` in quantize.py."""
    largest = tl.max(tl.abs(x), 1)
    finite = tl.max(((x != x) | (tl.abs(x) == float("inf"))).to(tl.int32), 1) == 0
    usable = finite & (largest >= LEAST)
    most = tl.full(largest.shape, 127.0, tl.float32)
    factor = tl.where(usable, tl.div_rn(most, tl.where(usable, largest, 1.0)), 0.0)
    scale = tl.where(usable, tl.div_rn(largest, most), tl.where(finite, 0.0, float("nan")))
    scaled = tl.where(usable[:, None], x, 0.0) * factor[:, None]
    return ((scaled + ROUNDER) - ROUNDER).to(tl.int8), scale


@triton.jit
def _narrow(x, MANTISSA: tl.constexpr, BIAS: tl.constexpr, LARGEST: tl.constexpr):
    """Rounds fp32 to the bytes of 8-bit floating point, as `narrow` in quantize.py: halves to even, what is too large
    to the largest number, what is not finite to NaN."""
    SHIFT: tl.constexpr = 23 - MANTISSA
    bits = x.to(tl.uint32, bitcast=True)
    size = tl.minimum(tl.abs(x), LARGEST)
    usual = size.to(tl.uint32, bitcast=True)
    usual = ((usual + ((1 << (SHIFT - 1)) - 1) + ((usual >> SHIFT) & 1)) >> SHIFT) - ((127 - BIAS) << MANTISSA)
    # Added to this, small numbers are rounded to multiples of the least one, which are then the last bits.
    ADDED: tl.constexpr = 2.0 ** (SHIFT + 1 - BIAS)
    ADDED_BITS: tl.constexpr = (127 + SHIFT + 1 - BIAS) << 23
    small = (size + ADDED).to(tl.uint32, bitcast=True) - ADDED_BITS
    number = tl.where(size < 2.0 ** (1 - BIAS), small, usual) | ((bits >> 24) & 0x80)
    return tl.where((bits & 0x7F800000) == 0x7F800000, 0x7F, number).to(tl.uint8)


@triton.jit
def _store_int4(
    x, slot, cache, cache_frame, cache_token, cache_dim, words, words_frame,
    HEAD_DIM: tl.constexpr, DIMS: tl.constexpr, BLOCK_SIZE: tl.constexpr, VECTORS: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Stores vectors fp32 [VECTORS, DIMS] in 4 bits, GROUP dimensions (a divisor of DIMS) at a time: the bits of
    `quantize_int4` in quantize.py. Returns what that leaves out. Pointers are those of the vectors' heads [VECTORS]."""
    GROUPS: tl.constexpr = DIMS // GROUP
    dims = tl.reshape(tl.arange(0, DIMS), (1, GROUPS, GROUP))
    x = tl.reshape(x, (VECTORS, GROUPS, GROUP))
    finite = tl.max((tl.abs(x) <= MOST).to(tl.int32) ^ 1, 2) == 0
    usual = tl.where(finite[:, :, None], x, 0.0)
    low = tl.min(tl.where(dims < HEAD_DIM, usual, float("inf")), 2) + 0.0
    high = tl.max(tl.where(dims < HEAD_DIM, usual, float("-inf")), 2)
    low, high = tl.where(low <= high, low, 0.0), tl.where(low <= high, high, 0.0)  # of a group that is not there
    spread = high - low
    usable = spread >= LEAST
    scale = tl.where(usable, tl.div_rn(spread, tl.full(spread.shape, 15.0, tl.float32)), 0.0).to(tl.bfloat16)
    low = low.to(tl.bfloat16)
    wide_scale, wide_low = scale.to(tl.float32), low.to(tl.float32)
    one = tl.full(spread.shape, 1.0, tl.float32)
    factor = tl.where(usable, tl.div_rn(one, tl.where(usable, wide_scale, 1.0)), 0.0)
    numbers = (usual - wide_low[:, :, None]) * factor[:, :, None]
    numbers = (tl.minimum(tl.maximum(numbers, 0.0), 15.0) + ROUNDER) - ROUNDER

    frame, offset = slot // BLOCK_SIZE, slot % BLOCK_SIZE
    group = tl.arange(0, GROUPS)
    word = (scale.to(tl.int16, bitcast=True).to(tl.int32) << 16) | (
        low.to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
    )
    word_at = (words + frame * words_frame + offset)[:, None] + group[None, :] * BLOCK_SIZE
    word_there = (slot >= 0)[:, None] & (group * GROUP < HEAD_DIM)[None, :]
    tl.store(word_at, tl.where(finite, word, NAN_WORD), word_there)
    # Byte 16 g + i has number 32 g + i in its lower half, and number 32 g + i + 16 in its upper one.
    halves = tl.reshape(numbers.to(tl.int32), (VECTORS, DIMS // 32, 2, 16))
    packed = tl.sum(halves << tl.reshape(tl.arange(0, 2) * 4, (1, 1, 2, 1)), 2)
    bytes = tl.arange(0, DIMS // 2)
    at = (cache + frame * cache_frame + offset * cache_token)[:, None] + bytes[None, :] * cache_dim
    there = (slot >= 0)[:, None] & (bytes < HEAD_DIM // 2)[None, :]
    tl.store(at, tl.reshape(packed, (VECTORS, DIMS // 2)).to(tl.uint8), there)
    stored = wide_low[:, :, None] + numbers * tl.where(finite, wide_scale, float("nan"))[:, :, None]
    return tl.reshape(x - stored, (VECTORS, DIMS))
