"""Attention to latents for GPUs, as a Triton kernel; `triton_latent.py` launches it.

A key is a latent of RANK numbers and a rotated part of ROPE, and its value is the latent: where the GPU multiplies
matrices, a tile of latents is read once, for scores and for what is summed up. All heads attend the same keys, so a
tile of queries has many heads, and one token or more. Rows, walks, chunks and bits are as in `triton_kernels.py`; so
is the walk over the keys.

Where products do not run in matrix units, each operand of a product takes a register. So a program has VALUES of the
RANK dimensions of values, and adds scores up over PIECE dimensions at a time, which it reads again for each part.
"""

from __future__ import annotations

import triton
import triton.language as tl

from pagemill.attention.triton_kernels import FAR, LN_2, LOG2_E, row_of
from pagemill.attention.triton_tiles import load, load_tile, widened


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
    if IN_CHUNKS:
        row = tl.program_id(0)
        start = tl.load(query_start + row)
        length = tl.load(query_start + row + 1) - start
        if (length > SHORT) | (length == 0):
            return
        begin_token = 0
    else:
        tile = tl.num_programs(0) - 1 - tl.program_id(0)  # the last of a row see the most keys: they come first
        row = row_of(tile, query_start, rows, TILE_TOKENS)
        start = tl.load(query_start + row)
        length = tl.load(query_start + row + 1) - start
        begin_token = (tile - start // TILE_TOKENS - row) * TILE_TOKENS
        if (length <= SHORT) | (begin_token >= length):
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
    position = tl.load(positions + place, real, other=0).to(tl.int32)
    last = tl.minimum(position, context - 1)
    first = tl.zeros_like(last)
    if key_end is not None:
        last = tl.minimum(last, tl.load(key_end + row) - 1)
    if key_start is not None:
        first = tl.maximum(first, tl.load(key_start + row))
    lowest = tl.min(tl.where(real, first, FAR))
    highest = tl.max(tl.where(real, last, -1))
    begin, end = lowest, highest + 1
    if IN_CHUNKS:
        chunk = CHUNK
        while (chunk < LONGEST_CHUNK) & (chunk * CHUNKS < context):
            chunk *= 2
        at_chunk = lowest // chunk + tl.program_id(2)
        begin = tl.maximum(begin, at_chunk * chunk)
        end = tl.minimum(end, (at_chunk + 1) * chunk)

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
                v = widened(v, KEY_AS, NATIVE, DOT)
                if WHOLE:
                    at_tile = key_at[:, None] + (RANK + rope_dims)[None, :] * key_dim
                    k = load_tile(at_tile, there[:, None], (rope_dims < ROPE)[None, :], walk == 1, ROPE != ROPE_DIMS)
                    scores = tl.dot(q, tl.trans(v), input_precision="ieee")
                    k = widened(k, KEY_AS, NATIVE, DOT)
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
                        scores = tl.dot(q, widened(k, KEY_AS, NATIVE, DOT), scores, input_precision="ieee")
                if walk == 1:
                    seen = (keys[None, :] >= first[:, None]) & (keys[None, :] <= last[:, None])
                    scores = tl.where(seen, scores, float("-inf"))

                higher = tl.maximum(peak, tl.max(scores, 1) * to_log2)
                level = tl.where(higher == float("-inf"), 0.0, higher)  # of a query that has seen no key yet
                weights = tl.exp2(scores * to_log2 - level[:, None])
                fade = tl.exp2(peak - level)
                total = total * fade + tl.sum(weights, 1)
                result *= fade[:, None]
                peak = higher
                result = tl.dot(weights.to(DOT), v, result, input_precision="ieee")

    share = tl.where(total == 0, 0.0, 1.0 / total)[:, None]
    log2_sum = peak + tl.log2(total)
    if chunk_output is None:
        stored_to, out_at = output, place * HEADS + head
        out_there = real
        if lse is not None:
            tl.store(lse + out_at, log2_sum * LN_2, real & (part == 0))
    else:
        stored_to, out_at = chunk_output, ((row * few + token).to(tl.int64) * HEADS + head) * chunks + tl.program_id(2)
        out_there = real & (total != 0)
        tl.store(chunk_lse + out_at, log2_sum, real & (part == 0))
    out_at = stored_to + out_at[:, None] * RANK + value_dims[None, :]
    out_there = out_there[:, None] & (value_dims < RANK)[None, :]
    tl.store(out_at, (result * share).to(stored_to.dtype.element_ty), out_there)
