"""Products of few rows with weights in bfloat16 or float16 on GPUs, as Triton kernels; `triton_linear.py` launches
them.

The time of such a product is that of reading the weight, once. Products are exact in float32, and so are their sums but
for what additions lose. Columns may be cut into parts, which `add_parts` adds in ascending order. What is cut follows
from the weight's shape alone, so a row's bits do not depend on other rows.

weight [out_features, columns] is contiguous. With EARLY, a program of one row loads its first tile of weights before it
waits for the kernel that gives it x (`triton_early.py`).
"""

from __future__ import annotations

import triton
import triton.language as tl

from pagemill.ops.triton_early import let_next_begin, wait_for_previous


@triton.jit
def _part(columns, columns_of_part):
    """Returns the first column of this program's part, and the one behind its last."""
    first = tl.program_id(1) * columns_of_part
    return first, tl.minimum(first + columns_of_part, columns)


@triton.jit
def multiply_one(
    x, weight, bias, y, parts, out_features, columns, columns_of_part,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Writes y [out_features] = weight x for one x [columns], BLOCK_N outputs at a time, or one part of the sums.

    grid [outputs / BLOCK_N, parts]. parts: fp32 [parts, out_features], to which results go without bias; None for a
    single part. Each of BLOCK_K places takes every BLOCK_K-th column of a part; a tile is loaded while the one before
    is multiplied.
    """
    let_next_begin(EARLY)
    output = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = output < out_features
    row = tl.minimum(output, out_features - 1).to(tl.int64) * columns
    first, end = _part(columns, columns_of_part)
    column = first + tl.arange(0, BLOCK_K)
    at = weight + row[:, None] + column[None, :]
    tile = tl.load(at, (column < end)[None, :], other=0, eviction_policy="evict_first")
    wait_for_previous(EARLY)
    sums = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    for _ in range(first, end, BLOCK_K):
        part = tl.load(x + column, column < end, other=0).to(tl.float32)
        column += BLOCK_K
        at += BLOCK_K
        following = tl.load(at, (column < end)[None, :], other=0, eviction_policy="evict_first")
        sums += tile.to(tl.float32) * part[None, :]
        tile = following
    total = tl.sum(sums, 1)
    if parts is None:
        if bias is not None:
            total += tl.load(bias + output, inside, other=0).to(tl.float32)
        tl.store(y + output, total.to(y.dtype.element_ty), inside)
    else:
        tl.store(parts + tl.program_id(1) * out_features + output, total, inside)


@triton.jit(do_not_specialize=["tokens"])
def multiply_few(
    x, x_tiles, weight, weight_tiles, bias, y, parts, tokens, out_features, columns, columns_of_part, x_token,
    BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Writes y [tokens, out_features] = x weight^T for x [tokens, columns] of at most BLOCK_M tokens, or one part of
    the sums.

    grid [outputs / BLOCK_N, parts]. x_token: its stride. parts: fp32 [parts, tokens, out_features], as above.
    x_tiles, weight_tiles: x and weight as descriptors of tiles, which the memory unit copies (TMA, from compute
    capability 9.0 on); None: threads load them.
    """
    let_next_begin(EARLY)
    output = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    token = tl.arange(0, BLOCK_M)
    row = tl.minimum(output, out_features - 1).to(tl.int64) * columns
    first, end = _part(columns, columns_of_part)
    wait_for_previous(EARLY)
    x_at = x + tl.minimum(token, tokens - 1) * x_token
    sums = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for begin in range(first, end, BLOCK_K):
        if weight_tiles is not None:
            tile = weight_tiles.load([tl.program_id(0) * BLOCK_N, begin])
            part = x_tiles.load([0, begin]).T
        else:
            column = begin + tl.arange(0, BLOCK_K)
            at = weight + row[:, None] + column[None, :]
            tile = tl.load(at, (column < end)[None, :], other=0, eviction_policy="evict_first")
            part = tl.load(x_at[None, :] + column[:, None], (column < end)[:, None], other=0)
        sums = tl.dot(tile, part, sums)
    written = (output < out_features)[:, None] & (token < tokens)[None, :]
    if parts is None:
        if bias is not None:
            sums += tl.load(bias + output, output < out_features, other=0).to(tl.float32)[:, None]
        at = y + output[:, None] + (token * out_features)[None, :]
        tl.store(at, sums.to(y.dtype.element_ty), written)
    else:
        at = parts + output[:, None] + ((tl.program_id(1) * tokens + token) * out_features)[None, :]
        tl.store(at, sums, written)
