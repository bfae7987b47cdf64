"""Attention to latents for GPUs, as a Triton kernel; `triton_backend.py` launches it.

A key is a latent of RANK numbers and a rotated part of ROPE, and its value is the latent: where the GPU multiplies
matrices, a tile of latents is read once, for scores and for what is summed up. All heads attend the same keys, so a
tile of queries has many heads, and one token or more. Rows, walks, chunks and bits are as in `triton_kernels.py`.

Where products do not run in matrix units, each operand of a product takes a register. So a program has VALUES of the
RANK dimensions of values, and adds scores up over PIECE dimensions at a time, which it reads again for each part.
"""

from __future__ import annotations

import triton
import triton.language as tl

from pagemill.attention.triton_tiles import load, load_tile, widened
from pagemill.attention.triton_walks import (
    FAR,
    LOG2_E,
    chunk_of_program,
    keys_seen,
    place_results,
    tokens_of_program,
    weigh,
)


@triton.jit(
    do_not_specialize=["rows", "few", "chunks", "table_row"],
    do_not_specialize_on_alignment=["tables"],  # those of a layer group begin anywhere
)
def attend_latents(
    query, output, lse, chunk_output, chunk_lse, key,
    tables, query_start, context_lens, positions, key_start, key_end,
    rows, few, chunks, scale, query_token, query_head, key_frame, key_token, key_dim, table_row,
    HEADS: tl.constexpr, GROUP: tl.constexpr, RANK: tl.constexpr, RANK_DIMS: tl.constexpr,
    ROPE: tl.constexpr, ROPE_DIMS: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    PIECE: tl.constexpr, VALUES: tl.constexpr, SHORT: tl.constexpr, IN_CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr, LONGEST_CHUNK: tl.constexpr, CHUNKS: tl.constexpr,
    DOT: tl.constexpr, KEY_AS: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """Attends for GROUP heads of one tile of tokens, over all keys or over one chunk of them.

    query [tokens, HEADS, RANK + ROPE], output [tokens, HEADS, RANK]. RANK_DIMS, ROPE_DIMS: rounded up to powers of 2.
    PIECE, VALUES: as above; PIECE is RANK_DIMS where a tile of latents serves twice.
    Not IN_CHUNKS: grid [tokens // TILE_TOKENS + rows, parts of heads * parts of values].
    IN_CHUNKS: grid [rows, parts of heads * parts of values, chunks], results as in `attend`.
    lse, chunk_output, chunk_lse, key_start, key_end: may be None.
    """
    PARTS: tl.constexpr = RANK_DIMS // VALUES
    part = tl.program_id(1) % PARTS
    TILE_TOKENS: tl.constexpr = BLOCK_M // GROUP
    row, start, length, begin_token, idle = tokens_of_program(query_start, rows, TILE_TOKENS, SHORT, IN_CHUNKS)
    if idle:
        return

    index = tl.arange(0, BLOCK_M)
    token = begin_token + index // GROUP
    head = tl.program_id(1) // PARTS * GROUP + index % GROUP
    real = (index < TILE_TOKENS * GROUP) & (token < length) & (head < HEADS)
    place = (start + token).to(tl.int64)
    query_at = query + place * query_token + head * query_head
    value_dims = part * VALUES + tl.arange(0, VALUES)
    WHOLE: tl.constexpr = PIECE == RANK_DIMS
    if WHOLE:
        rope_dims = tl.arange(0, ROPE_DIMS)
        q_there = real[:, None] & (value_dims < RANK)[None, :]
        q = tl.load(query_at[:, None] + value_dims[None, :], q_there, other=0).to(DOT)
        q_there = real[:, None] & (rope_dims < ROPE)[None, :]
        q_rope = tl.load(query_at[:, None] + RANK + rope_dims[None, :], q_there, other=0).to(DOT)

    # Each query sees keys first .. last.
    context = tl.load(context_lens + row)
    _, first, last = keys_seen(context, positions, place, real, key_start, key_end, row)
    lowest = tl.min(tl.where(real, first, FAR))
    highest = tl.max(tl.where(real, last, -1))
    begin, end = chunk_of_program(lowest, highest, context, CHUNK, LONGEST_CHUNK, CHUNKS, IN_CHUNKS)

    # Two walks: over tiles that every query sees in full, if there are any, and over what is left, with masks. A query
    # in chunks takes the second one.
    begin = begin // BLOCK_N * BLOCK_N
    seen_to = begin
    SEEN: tl.constexpr = not IN_CHUNKS and key_start is None
    if SEEN:
        seen_to = tl.maximum(begin, (tl.min(tl.where(real, last, FAR)) + 1) // BLOCK_N * BLOCK_N)

    table = tables + row.to(tl.int64) * table_row
    to_log2 = scale * LOG2_E
    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    result = tl.zeros([BLOCK_M, VALUES], tl.float32)
    for walk in tl.static_range(2):
        if walk == 0:
            walk_from, walk_to = begin, seen_to
        else:
            walk_from, walk_to = seen_to, end
        if walk == 1 or SEEN:
            for at in tl.range(walk_from, walk_to, BLOCK_N):
                keys = at + tl.arange(0, BLOCK_N)
                there = (keys >= lowest) & (keys <= highest)  # what lies elsewhere may be NaN
                frame = load(table + keys // BLOCK_SIZE, there, walk == 1).to(tl.int64)
                key_at = key + frame * key_frame + keys % BLOCK_SIZE * key_token
                at_tile = key_at[:, None] + value_dims[None, :] * key_dim
                v = load_tile(at_tile, there[:, None], (value_dims < RANK)[None, :], walk == 1, RANK != RANK_DIMS)
                v = widened(v, KEY_AS, False, NATIVE, DOT)
                if WHOLE:
                    at_tile = key_at[:, None] + (RANK + rope_dims)[None, :] * key_dim
                    k = load_tile(at_tile, there[:, None], (rope_dims < ROPE)[None, :], walk == 1, ROPE != ROPE_DIMS)
                    scores = tl.dot(q, tl.trans(v), input_precision="ieee")
                    k = widened(k, KEY_AS, False, NATIVE, DOT)
                    scores = tl.dot(q_rope, tl.trans(k), scores, input_precision="ieee")
                else:
                    scores = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
                    for piece in tl.range(0, RANK + ROPE, PIECE):
                        dims = piece + tl.arange(0, PIECE)
                        inside = dims < RANK + ROPE
                        q_there = real[:, None] & inside[None, :]
                        q = tl.load(query_at[:, None] + dims[None, :], q_there, other=0).to(DOT)
                        k = tl.load(
                            key_at[None, :] + dims[:, None] * key_dim, there[None, :] & inside[:, None], other=0
                        )
                        scores = tl.dot(q, widened(k, KEY_AS, False, NATIVE, DOT), scores, input_precision="ieee")
                if walk == 1:
                    seen = (keys[None, :] >= first[:, None]) & (keys[None, :] <= last[:, None])
                    scores = tl.where(seen, scores, float("-inf"))

                weights, fade, peak, total = weigh(scores, to_log2, peak, total)
                result *= fade[:, None]
                result = tl.dot(weights.to(DOT), v, result, input_precision="ieee")

    share = tl.where(total == 0, 0.0, 1.0 / total)[:, None]
    log2_sum = peak + tl.log2(total)
    told = real & (part == 0)
    out_at, out_there = place_results(
        lse, chunk_output, chunk_lse, log2_sum, total, place, row, token, head, HEADS, few, chunks, real, told
    )
    stored_to = output if chunk_output is None else chunk_output
    out_at = stored_to + out_at[:, None] * RANK + value_dims[None, :]
    out_there = out_there[:, None] & (value_dims < RANK)[None, :]
    tl.store(out_at, (result * share).to(stored_to.dtype.element_ty), out_there)
