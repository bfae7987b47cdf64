"""Triton kernels of the operators between a decoder's matrix products; `TritonOps` starts them.

Arithmetic is fp32. Results are rounded where `TorchOps` rounds them, also where one kernel does the work of several
operators. Kernels are compiled without fused multiply-add, so that a product is rounded before it is added.

Strides are in elements, and a row's elements lie side by side. A pointer that may be None says so; what depends on it
is then left out. EARLY: see `triton_early.py`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from pagemill.ops.triton_early import let_next_begin, wait_for_previous


@triton.jit(do_not_specialize=["rows", "inner"])
def normalize(
    x, added, added_weight, weight, output, rows, inner, outer_stride, inner_stride, eps,
    SIZE: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Writes rms_norm(x, weight) of rows of SIZE elements to output [rows, SIZE], ROWS rows at a time.

    grid [rows / ROWS]. Row r of x begins at r // inner * outer_stride + r % inner * inner_stride. COLUMNS: SIZE,
    rounded up to a power of two. weight, added_weight: fp32; the second may be None.
    added: None, or [rows, SIZE], which is added to x first, in place; rms_norm(added, added_weight) in its stead, if
    that weight is there.
    """
    let_next_begin(EARLY)
    wait_for_previous(EARLY)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    there = (row < rows)[:, None] & (column < SIZE)[None, :]
    x_at = x + (row // inner * outer_stride + row % inner * inner_stride)[:, None] + column[None, :]
    dense = row[:, None] * SIZE + column[None, :]
    wide = tl.load(x_at, there, other=0).to(tl.float32)
    factors = tl.load(weight + column, column < SIZE, other=0)  # before what waits for the row's sum
    if added is not None:
        more = tl.load(added + dense, there, other=0).to(tl.float32)
        if added_weight is not None:
            more = _scaled(more, tl.load(added_weight + column, column < SIZE, other=0), eps, SIZE)
            more = more.to(added.dtype.element_ty).to(tl.float32)
        total = (wide + more).to(x.dtype.element_ty)
        tl.store(x_at, total, there)
        wide = total.to(tl.float32)
    tl.store(output + dense, _scaled(wide, factors, eps, SIZE).to(output.dtype.element_ty), there)


@triton.jit
def _scaled(x, weight, eps, SIZE: tl.constexpr):
    """Returns rms_norm of fp32 rows [n, columns], in which there are zeros behind SIZE. weight: fp32 [columns]."""
    factor = tl.rsqrt(tl.sum(x * x, 1) / SIZE + eps)
    return x * factor[:, None] * weight[None, :]


@triton.jit(do_not_specialize=["heads", "queries"])
def turn_heads(
    x, query_weight, key_weight, cos, sin, heads, queries, token_stride, head_stride, eps,
    HEAD_DIM: tl.constexpr, HALF: tl.constexpr, PAIRS: tl.constexpr, REST: tl.constexpr, HEADS: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Norms the heads of x [tokens, heads, HEAD_DIM] and rotates them, in place, HEADS heads at a time.

    grid [tokens, heads / HEADS]. cos, sin: fp32 [tokens, HALF]; dimension i and i + HALF are a pair. PAIRS: HALF,
    rounded up to a power of two. REST: 0, or what is behind the pairs, rounded up.
    query_weight, key_weight: fp32 [HEAD_DIM], of the first `queries` heads and of the others; None: there is no norm.
    """
    let_next_begin(EARLY)
    wait_for_previous(EARLY)
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    pair = tl.arange(0, PAIRS)
    there = (head < heads)[:, None] & (pair < HALF)[None, :]
    begin = x + token * token_stride + head.to(tl.int64)[:, None] * head_stride
    first_at = begin + pair[None, :]
    second_at = first_at + HALF
    first = tl.load(first_at, there, other=0).to(tl.float32)
    second = tl.load(second_at, there, other=0).to(tl.float32)
    if query_weight is not None:
        squares = tl.sum(first * first, 1) + tl.sum(second * second, 1)
        if REST:
            left = tl.arange(0, REST)
            rest_at = begin + 2 * HALF + left[None, :]
            rest_there = (head < heads)[:, None] & (left < HEAD_DIM - 2 * HALF)[None, :]
            rest = tl.load(rest_at, rest_there, other=0).to(tl.float32)
            squares += tl.sum(rest * rest, 1)
        factor = tl.rsqrt(squares / HEAD_DIM + eps)[:, None]
        is_query = (head < queries)[:, None]
        first *= factor
        second *= factor
        first *= _weight(query_weight, key_weight, pair, HALF, is_query)
        second *= _weight(query_weight + HALF, key_weight + HALF, pair, HALF, is_query)
        first = first.to(x.dtype.element_ty).to(tl.float32)
        second = second.to(x.dtype.element_ty).to(tl.float32)
        if REST:
            behind = 2 * HALF
            scale = _weight(query_weight + behind, key_weight + behind, left, HEAD_DIM - behind, is_query)
            tl.store(rest_at, (rest * factor * scale).to(x.dtype.element_ty), rest_there)
    angle = token * HALF + pair
    c = tl.load(cos + angle, pair < HALF, other=0)[None, :]
    s = tl.load(sin + angle, pair < HALF, other=0)[None, :]
    tl.store(first_at, (first * c - second * s).to(x.dtype.element_ty), there)
    tl.store(second_at, (second * c + first * s).to(x.dtype.element_ty), there)


@triton.jit
def _weight(query_weight, key_weight, dim, DIMS: tl.constexpr, is_query):
    """Returns the weight of each head [n, 1] at each dimension: [n, dims]."""
    of_query = tl.load(query_weight + dim, dim < DIMS, other=0)[None, :]
    of_key = tl.load(key_weight + dim, dim < DIMS, other=0)[None, :]
    return tl.where(is_query, of_query, of_key)


@triton.jit
def gate(
    x, output, size, row_stride, GELU: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr
):  # fmt: skip
    """Writes activation(gate) * up to output [tokens, size]; row r of x, at r * row_stride, holds gate, then up.

    grid [tokens, size / BLOCK].
    """
    let_next_begin(EARLY)
    wait_for_previous(EARLY)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = column < size
    x += row * row_stride
    of_gate = tl.load(x + column, there, other=0).to(tl.float32)
    up = tl.load(x + size + column, there, other=0).to(tl.float32)
    tl.store(output + row * size + column, (activate(of_gate, GELU) * up).to(output.dtype.element_ty), there)


@triton.jit
def activate(x, GELU: tl.constexpr):
    """Returns silu of fp32 x, or gelu in its form with tanh: x sigmoid(2 y) is x / 2 (1 + tanh y)."""
    if GELU:
        return x / (1 + tl.exp(-1.5957691216057308 * (x + 0.044715 * x * x * x)))
    else:
        return x / (1 + tl.exp(-x))
