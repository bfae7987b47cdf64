"""Triton kernels of low-rank additions (LoRA); `triton_low_rank.py` packs what they read, and starts them."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["count"])
def shrink(
    x, tokens, a, scales, low, count, x_row, low_row,
    INNER: tl.constexpr, RANKS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Writes scale * a x of some tokens for one block of ranks: low, fp32 [count, all ranks].

    grid [count / BLOCK_M, blocks]. x [.., INNER]; tokens int64 [count]; a [blocks * RANKS, INNER]; scales fp32
    [blocks]. DOT: what products are computed in; sums are fp32.
    """
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    real = row < count
    token = tl.load(tokens + row, real, other=0)
    rank = tl.program_id(1) * RANKS + tl.arange(0, RANKS)
    inner = tl.arange(0, BLOCK_K)
    x_at = x + token[:, None] * x_row + inner[None, :]
    a_at = a + rank.to(tl.int64)[None, :] * INNER + inner[:, None]
    total = tl.zeros([BLOCK_M, RANKS], tl.float32)
    for at in tl.range(0, INNER, BLOCK_K):
        left = inner < INNER - at
        rows = tl.load(x_at + at, real[:, None] & left[None, :], other=0).to(DOT)
        columns = tl.load(a_at + at, left[:, None], other=0).to(DOT)
        total = tl.dot(rows, columns, total, input_precision="ieee")
    total *= tl.load(scales + tl.program_id(1))
    tl.store(low + row.to(tl.int64)[:, None] * low_row + rank[None, :], total, real[:, None])


@triton.jit(do_not_specialize=["count"])
def expand(
    low, tokens, b, blocks, y, count, low_row, y_row,
    RANKS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Adds b low to y, for some tokens and one block of outputs of one part; sums are fp32 and rounded once.

    grid [count / BLOCK_M, output blocks]. blocks: int64 [output blocks, 5]: the first output in y, how many there are,
    where their rows of b begin, the part's first rank in `low`, and how many ranks it has, a multiple of RANKS, which
    is a row of b too.
    """
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    real = row < count
    token = tl.load(tokens + row, real, other=0)
    blocks += tl.program_id(1) * 5
    first, outputs, begin = tl.load(blocks), tl.load(blocks + 1), tl.load(blocks + 2)
    first_rank, ranks = tl.load(blocks + 3), tl.load(blocks + 4)
    column, rank = tl.arange(0, BLOCK_N), tl.arange(0, RANKS)
    there = real[:, None] & (column < outputs)[None, :]
    low_at = low + row.to(tl.int64)[:, None] * low_row + first_rank + rank[None, :]
    b_at = b + begin + column[None, :] * ranks + rank[:, None]
    y_at = y + token[:, None] * y_row + first + column[None, :]
    total = tl.load(y_at, there, other=0).to(tl.float32)
    for at in range(0, ranks, RANKS):
        rows = tl.load(low_at + at, real[:, None], other=0)
        columns = tl.load(b_at + at, (column < outputs)[None, :], other=0).to(tl.float32)
        total = tl.dot(rows, columns, total, input_precision="ieee")
    tl.store(y_at, total.to(y.dtype.element_ty), there)
