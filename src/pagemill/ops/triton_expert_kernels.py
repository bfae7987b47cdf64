"""Triton kernels of a mixture of experts; `triton_experts.py` starts them.

A token and one of its experts are an assignment; number token * CHOSEN + i is the one of the i-th expert of a token, in
ascending order. Sorted by expert, assignments are the rows of matrix products: a tile is up to BLOCK_M rows of one
expert. Which expert a tile belongs to is found from where each expert's rows begin, on the device, so the grid needs
nothing but sizes: it holds as many tiles as there can be, and those that there are not end at once.
"""

from __future__ import annotations

import triton
import triton.language as tl

from pagemill.ops.triton_kernels import activate


@triton.jit
def route(
    logits, chosen, shares,
    EXPERTS: tl.constexpr, PLACES: tl.constexpr, CHOSEN: tl.constexpr, NORMALIZE: tl.constexpr,
):  # fmt: skip
    """Writes each token's CHOSEN most likely experts in ascending order, int32, and their probabilities, fp32.

    grid [tokens]. logits: fp32 [tokens, EXPERTS]. PLACES: EXPERTS, rounded up to a power of two. NORMALIZE: shares are
    made to sum to 1. Of equal probabilities the first counts. Logits that are NaN give shares that are.
    """
    token = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, PLACES)
    there = expert < EXPERTS
    logit = tl.load(logits + token * EXPERTS + expert, there, other=float("-inf"))
    weight = tl.exp(logit - tl.max(logit, 0))
    probability = weight / tl.sum(weight, 0)
    left = tl.where(there, tl.where(probability == probability, probability, 0.0), -1.0)
    taken = tl.zeros([PLACES], tl.int32)
    for _ in tl.static_range(CHOSEN):
        best = expert == tl.argmax(left, 0)
        taken = tl.where(best, 1, taken)
        left = tl.where(best, -1.0, left)
    share = tl.where(taken != 0, probability, 0.0)
    if NORMALIZE:
        share = share / tl.sum(share, 0)
    place = token * CHOSEN + tl.cumsum(taken, 0) - 1
    tl.store(chosen + place, expert, taken != 0)
    tl.store(shares + place, share, taken != 0)


@triton.jit(do_not_specialize=["rows"])
def arrange(assigned, order, begins, rows, EXPERTS: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr):
    """Sorts assignments by expert, those of one expert by number: writes order [rows] and begins [EXPERTS + 1], as
    `multiply_experts` takes them.

    grid [(rows + EXPERTS + 1) / BLOCK]. assigned: int32 [rows]. An assignment's place is the number of those before it,
    and an expert's begin that of assignments of lower experts. Every program counts over all rows, CHUNK at a time:
    work grows with their square, but a few thousand take one launch of microseconds.
    """
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_row = at < rows
    expert = tl.where(is_row, tl.load(assigned + at, is_row, other=0), at - rows)[:, None]
    number = tl.where(is_row, at, -1)[:, None]
    before = tl.zeros([BLOCK], tl.int32)
    for chunk in tl.range(0, rows, CHUNK):
        others = chunk + tl.arange(0, CHUNK)
        theirs = tl.load(assigned + others, others < rows, other=EXPERTS + 1)[None, :]
        earlier = (theirs < expert) | ((theirs == expert) & (others[None, :] < number))
        before += tl.sum(earlier.to(tl.int32), 1)
    tl.store(order + before, at.to(tl.int64), is_row)
    tl.store(begins + (at - rows), before, (at >= rows) & (at <= rows + EXPERTS))


@triton.jit
def multiply_experts(
    x, weight, output, order, begins, x_row,
    INNER: tl.constexpr, OUTER: tl.constexpr, EXPERTS: tl.constexpr, PLACES: tl.constexpr, CHOSEN: tl.constexpr,
    GATED: tl.constexpr, GELU: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Multiplies the rows of one tile by their expert's weight, for BLOCK_N outputs; sums are fp32.

    grid [tiles, OUTER / BLOCK_N]. order: int64, the assignments sorted by expert; begins: int32 [EXPERTS + 1], where
    each expert's begin in it.
    GATED: weight [EXPERTS, 2 * OUTER, INNER] has rows of gates, then of ups. Row r of the product is that of token
        order[r] // CHOSEN of x, and activation(gate) * up goes to row r of the output; gate and up are rounded first.
    Not GATED: weight [EXPERTS, OUTER, INNER]. The product of row r of x goes to row order[r] of the output.
    """
    tile = tl.program_id(0)
    expert = tl.arange(0, PLACES)
    begin = tl.load(begins + expert, expert < EXPERTS, other=0)
    end = tl.load(begins + expert + 1, expert < EXPERTS, other=0)
    tiles = (end - begin + BLOCK_M - 1) // BLOCK_M
    behind = tl.cumsum(tiles, 0)
    if tile >= tl.sum(tiles, 0):
        return
    own = tl.sum((behind <= tile).to(tl.int32), 0)
    before = tl.sum(tl.where(expert == own, behind - tiles, 0), 0)
    first = tl.sum(tl.where(expert == own, begin, 0), 0) + (tile - before) * BLOCK_M
    row = first + tl.arange(0, BLOCK_M)
    real = row < tl.sum(tl.where(expert == own, end, 0), 0)
    assignment = tl.load(order + row, real, other=0)
    source = assignment // CHOSEN if GATED else row.to(tl.int64)

    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    inner = tl.arange(0, BLOCK_K)
    MATRIX: tl.constexpr = OUTER * INNER
    weight += own.to(tl.int64) * (2 * MATRIX if GATED else MATRIX)
    x_at = x + source[:, None] * x_row + inner[None, :]
    weight_at = weight + column.to(tl.int64)[None, :] * INNER + inner[:, None]
    inside = (column < OUTER)[None, :]
    product = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    up = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for at in tl.range(0, INNER, BLOCK_K):
        left = inner < INNER - at
        rows = tl.load(x_at + at, real[:, None] & left[None, :], other=0)
        columns = tl.load(weight_at + at, inside & left[:, None], other=0)
        product = tl.dot(rows, columns, product, input_precision="ieee")
        if GATED:
            columns = tl.load(weight_at + (MATRIX + at), inside & left[:, None], other=0)
            up = tl.dot(rows, columns, up, input_precision="ieee")
    kind: tl.constexpr = output.dtype.element_ty
    target = assignment
    if GATED:
        product = activate(product.to(kind).to(tl.float32), GELU) * up.to(kind).to(tl.float32)
        target = row.to(tl.int64)
    out_at = output + target[:, None] * OUTER + column[None, :]
    tl.store(out_at, product.to(kind), real[:, None] & inside)


@triton.jit
def combine(parts, shares, output, SIZE: tl.constexpr, CHOSEN: tl.constexpr, BLOCK: tl.constexpr):
    """Adds each token's parts [tokens, CHOSEN, SIZE], times their shares, in order: output [tokens, SIZE].

    grid [tokens, SIZE / BLOCK].
    """
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = column < SIZE
    total = tl.zeros([BLOCK], tl.float32)
    for i in tl.static_range(CHOSEN):
        assignment = token * CHOSEN + i
        part = tl.load(parts + assignment * SIZE + column, there, other=0).to(tl.float32)
        total += part * tl.load(shares + assignment)
    tl.store(output + token * SIZE + column, total.to(output.dtype.element_ty), there)
