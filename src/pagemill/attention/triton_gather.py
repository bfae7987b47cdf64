"""Gathers a row's keys and values out of its blocks, and merges results over parts of its keys, as Triton kernels;
`sdpa_gather.py` launches them."""

from __future__ import annotations

import triton
import triton.language as tl

from pagemill.attention.triton_tiles import widened


@triton.jit(do_not_specialize=["begin", "there", "count"], do_not_specialize_on_alignment=["table"])
def gather_tokens(
    key, value, key_scale, value_scale, table, key_out, value_out, begin, there, count,
    key_frame, key_head, key_token, key_dim,
    value_frame, value_head, value_token, value_dim,
    key_scale_frame, key_scale_head, value_scale_frame, value_scale_head,
    KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, DIMS: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    TOKENS: tl.constexpr, KEY_AS: tl.constexpr, VALUE_AS: tl.constexpr, NATIVE: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Copies the keys and values of `there` tokens from position `begin` on to key_out and value_out
    [count, KV_HEADS, HEAD_DIM], and puts zeros behind them.

    grid [count / TOKENS, KV_HEADS]. key_scale, value_scale: may be None.
    """
    head = tl.program_id(1)
    index = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    dims = tl.arange(0, DIMS)
    real, inside = index < there, (dims < HEAD_DIM)[None, :]
    frame = tl.load(table + (begin + index) // BLOCK_SIZE, real, other=0).to(tl.int64)
    offset = (begin + index) % BLOCK_SIZE
    out_at = (index.to(tl.int64) * KV_HEADS + head)[:, None] * HEAD_DIM + dims[None, :]
    out_there = (index < count)[:, None] & inside

    at = (frame * key_frame + head * key_head + offset * key_token)[:, None] + dims[None, :] * key_dim
    elements = widened(tl.load(key + at, real[:, None] & inside, other=0), KEY_AS, False, NATIVE, DOT)
    if KEY_AS == "int8":
        scale = tl.load(key_scale + frame * key_scale_frame + head * key_scale_head + offset, real, other=0)
        elements = (elements.to(tl.float32) * scale[:, None]).to(DOT)
    tl.store(key_out + out_at, elements, out_there)

    at = (frame * value_frame + head * value_head + offset * value_token)[:, None] + dims[None, :] * value_dim
    elements = widened(tl.load(value + at, real[:, None] & inside, other=0), VALUE_AS, False, NATIVE, DOT)
    if VALUE_AS == "int8":
        scale = tl.load(value_scale + frame * value_scale_frame + head * value_scale_head + offset, real, other=0)
        elements = (elements.to(tl.float32) * scale[:, None]).to(DOT)
    tl.store(value_out + out_at, elements, out_there)


@triton.jit(
    do_not_specialize=["pairs", "a_lse_token", "a_lse_head", "b_lse_token", "b_lse_head"],
    do_not_specialize_on_alignment=["a", "b", "a_lse", "b_lse"],  # parts of results begin anywhere
)
def merge_parts(
    a, a_lse, b, b_lse, output, lse, pairs,
    a_token, a_head, a_lse_token, a_lse_head, b_token, b_head, b_lse_token, b_lse_head,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, DIMS: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """Merges two results; `pairs` are tokens times HEADS. grid [pairs / PAIRS]."""
    pair = tl.program_id(0) * PAIRS + tl.arange(0, PAIRS)
    real, dims = pair < pairs, tl.arange(0, DIMS)
    token, head = (pair // HEADS).to(tl.int64), pair % HEADS
    of_a = tl.load(a_lse + token * a_lse_token + head * a_lse_head, real, other=0)
    of_b = tl.load(b_lse + token * b_lse_token + head * b_lse_head, real, other=0)
    peak = tl.maximum(of_a, of_b)
    weight_a, weight_b = tl.exp(of_a - peak), tl.exp(of_b - peak)
    total = weight_a + weight_b
    there = real[:, None] & (dims < HEAD_DIM)[None, :]
    x = tl.load(a + (token * a_token + head * a_head)[:, None] + dims[None, :], there, other=0).to(tl.float32)
    y = tl.load(b + (token * b_token + head * b_head)[:, None] + dims[None, :], there, other=0).to(tl.float32)
    result = x * (weight_a / total)[:, None] + y * (weight_b / total)[:, None]
    at = pair.to(tl.int64)[:, None] * HEAD_DIM + dims[None, :]
    tl.store(output + at, result.to(output.dtype.element_ty), there)
    tl.store(lse + pair, peak + tl.log(total), real)
