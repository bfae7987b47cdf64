"""Paged attention for GPUs, as Triton kernels; `triton_backend.py` launches them.

PagedAttention (Kwon et al., SOSP 2023): keys and values are read where they lie, through the block table.
FlashAttention-2 (Dao, 2023): a tile of queries walks over the keys once, and keeps a running maximum and sum per query.
Flash decoding (Dao et al., 2023): a row of few queries cuts its keys into chunks that run side by side, and
`merge_chunks` puts their results together.

A tile is BLOCK_M queries of one KV head: TILE_TOKENS tokens, each with the GROUP heads that share this KV head, one
token after the other. So keys and values are read once for all heads of a group.

Bits: tiles of keys and chunks begin at multiples of their length, a chunk's length follows from the row's own context,
and rows of few queries are attended in chunks whatever else is in the batch. So a query's bits depend on its own row,
never on other rows.

Strides are in elements. A name of a pointer that may be None says so; what depends on it is then left out.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
FAR = tl.constexpr(2**31 - 1)
LEAST = tl.constexpr(2.0**-100)
"""As in quantize.py: shorter vectors are stored as zeros."""
ROUNDER = tl.constexpr(1.5 * 2**23)
"""Added and taken away, it rounds a float32 below 2**22 to an integer, halves to even."""


@triton.jit(do_not_specialize=["tokens"])
def write_tokens(
    key, value, slots, key_cache, value_cache, key_scale, value_scale, tokens,
    key_token, key_head, value_token, value_head,
    key_cache_frame, key_cache_head, key_cache_token, key_cache_dim,
    value_cache_frame, value_cache_head, value_cache_token, value_cache_dim,
    scale_frame, scale_head,
    KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, DIMS: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    VECTORS: tl.constexpr,
):  # fmt: skip
    """Writes keys and values [tokens, KV_HEADS, HEAD_DIM] to their slots, VECTORS at a time; slot -1 is skipped.

    grid [tokens * KV_HEADS / VECTORS]. key_scale and value_scale: None unless the cache is of int8.
    To be compiled without fused multiply-add: a product is rounded before it is rounded to an integer.
    """
    vector = tl.program_id(0).to(tl.int64) * VECTORS + tl.arange(0, VECTORS)
    token, head = vector // KV_HEADS, vector % KV_HEADS
    slot = tl.load(slots + token, token < tokens, other=-1)
    written = slot >= 0
    frame, offset = slot // BLOCK_SIZE, slot % BLOCK_SIZE
    dims = tl.arange(0, DIMS)
    there = written[:, None] & (dims < HEAD_DIM)[None, :]
    new_key = tl.load(key + (token * key_token + head * key_head)[:, None] + dims[None, :], there, other=0)
    new_value = tl.load(value + (token * value_token + head * value_head)[:, None] + dims[None, :], there, other=0)
    key_at = frame * key_cache_frame + head * key_cache_head + offset * key_cache_token
    key_at = key_cache + key_at[:, None] + dims[None, :] * key_cache_dim
    value_at = frame * value_cache_frame + head * value_cache_head + offset * value_cache_token
    value_at = value_cache + value_at[:, None] + dims[None, :] * value_cache_dim
    if key_scale is None:
        tl.store(key_at, new_key.to(tl.float32).to(key_cache.dtype.element_ty), there)
        tl.store(value_at, new_value.to(tl.float32).to(value_cache.dtype.element_ty), there)
    else:
        scale_at = frame * scale_frame + head * scale_head + offset
        elements, scale = _quantize(new_key)
        tl.store(key_at, elements, there)
        tl.store(key_scale + scale_at, scale, written)
        elements, scale = _quantize(new_value)
        tl.store(value_at, elements, there)
        tl.store(value_scale + scale_at, scale, written)


@triton.jit
def _quantize(x):
    """Returns int8 elements and fp32 scales [n] of vectors [n, dims]: the bits of `quantize` in quantize.py."""
    x = x.to(tl.float32)
    largest = tl.max(tl.abs(x), 1)
    finite = tl.max(((x != x) | (tl.abs(x) == float("inf"))).to(tl.int32), 1) == 0
    usable = finite & (largest >= LEAST)
    most = tl.full(largest.shape, 127.0, tl.float32)
    factor = tl.where(usable, tl.div_rn(most, tl.where(usable, largest, 1.0)), 0.0)
    scale = tl.where(usable, tl.div_rn(largest, most), tl.where(finite, 0.0, float("nan")))
    scaled = tl.where(usable[:, None], x, 0.0) * factor[:, None]
    return ((scaled + ROUNDER) - ROUNDER).to(tl.int8), scale


@triton.jit(do_not_specialize=["rows", "few", "chunks", "table_row"])
def attend(
    query, output, lse, chunk_output, chunk_lse,
    key, value, key_scale, value_scale,
    tables, query_start, context_lens, positions, key_start, key_end,
    rows, few, chunks, scale, soft_cap, window,
    query_token, query_head,
    key_frame, key_head, key_token, key_dim,
    value_frame, value_head, value_token, value_dim,
    scale_frame, scale_head, table_row,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, DIMS: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SHORT: tl.constexpr, IN_CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr, LONGEST_CHUNK: tl.constexpr, CHUNKS: tl.constexpr,
    DOT: tl.constexpr,
):  # fmt: skip
    """Attends for one tile of queries and one KV head, over all keys or over one chunk of them.

    Not IN_CHUNKS: rows of more than SHORT queries; grid [tokens // TILE_TOKENS + rows, kv_heads]. A row's tiles follow
        each other, and each row has one tile more than it may need, so that a tile's row is found without knowing
        lengths on the host.
    IN_CHUNKS: rows of at most SHORT queries, one tile each; grid [rows, kv_heads, chunks]. Results go to chunk_output
        fp32 [rows * few, heads, chunks, HEAD_DIM] and chunk_lse (base 2) [rows * few, heads, chunks], where `few` is
        the most queries that such a row has; to `output` if chunk_output is None, when no row has two chunks.
    lse, key_scale and value_scale, key_start, key_end, soft_cap, window: may be None.
    DOT: what products are computed in; sums are fp32.
    """
    kv_head = tl.program_id(1)
    heads = tl.num_programs(1) * GROUP
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
        row = _row_of(tile, query_start, rows, TILE_TOKENS)
        start = tl.load(query_start + row)
        length = tl.load(query_start + row + 1) - start
        begin_token = (tile - start // TILE_TOKENS - row) * TILE_TOKENS
        if (length <= SHORT) | (begin_token >= length):
            return

    index = tl.arange(0, BLOCK_M)
    token = begin_token + index // GROUP
    head = kv_head * GROUP + index % GROUP
    real = (index < TILE_TOKENS * GROUP) & (token < length)
    place = (start + token).to(tl.int64)
    dims = tl.arange(0, DIMS)
    query_there = real[:, None] & (dims < HEAD_DIM)[None, :]
    query_at = query + place[:, None] * query_token + head[:, None] * query_head + dims[None, :]
    q = tl.load(query_at, query_there, other=0).to(DOT)

    # Each query sees keys first .. last.
    context = tl.load(context_lens + row)
    position = tl.load(positions + place, real, other=0).to(tl.int32)
    last = tl.minimum(position, context - 1)
    first = tl.zeros_like(last)
    if key_end is not None:
        last = tl.minimum(last, tl.load(key_end + row) - 1)
    if key_start is not None:
        first = tl.maximum(first, tl.load(key_start + row))
    span = context
    if window is not None:
        first = tl.maximum(first, position - window + 1)
        span = tl.minimum(span, window)
    lowest = tl.min(tl.where(real, first, FAR))
    highest = tl.max(tl.where(real, last, -1))
    begin, end = lowest, highest + 1
    if IN_CHUNKS:
        chunk = CHUNK
        while (chunk < LONGEST_CHUNK) & (chunk * CHUNKS < span):
            chunk *= 2
        at_chunk = lowest // chunk + tl.program_id(2)
        begin = tl.maximum(begin, at_chunk * chunk)
        end = tl.minimum(end, (at_chunk + 1) * chunk)

    # Three walks: over tiles that some query does not see from their first key on, over tiles that every query sees
    # in full, and over what is left. A query in chunks takes one, with masks.
    begin = begin // BLOCK_N * BLOCK_N
    seen_from, seen_to = begin, begin
    if not IN_CHUNKS:
        if window is not None or key_start is not None:
            seen_from = tl.maximum(begin, tl.cdiv(tl.max(tl.where(real, first, 0)), BLOCK_N) * BLOCK_N)
        seen_to = tl.maximum(seen_from, (tl.min(tl.where(real, last, FAR)) + 1) // BLOCK_N * BLOCK_N)

    table = tables + row.to(tl.int64) * table_row
    key += kv_head * key_head
    value += kv_head * value_head
    to_log2 = LOG2_E if soft_cap is not None else scale * LOG2_E
    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    result = tl.zeros([BLOCK_M, DIMS], tl.float32)
    for walk in tl.static_range(3):
        if walk == 0:
            walk_from, walk_to = begin, tl.minimum(seen_from, end)
        elif walk == 1:
            walk_from, walk_to = seen_from, seen_to
        else:
            walk_from, walk_to = seen_to, end
        if (walk == 2) or (not IN_CHUNKS and (walk == 1 or window is not None or key_start is not None)):
            for at in tl.range(walk_from, walk_to, BLOCK_N):
                keys = at + tl.arange(0, BLOCK_N)
                there = (keys >= lowest) & (keys <= highest)  # what lies elsewhere may be NaN
                frame = _load(table + keys // BLOCK_SIZE, there, walk != 1).to(tl.int64)
                offset = keys % BLOCK_SIZE

                key_at = key + (frame * key_frame + offset * key_token)[None, :] + dims[:, None] * key_dim
                k = _load_tile(key_at, there[None, :], (dims < HEAD_DIM)[:, None], walk != 1, HEAD_DIM != DIMS)
                scores = tl.dot(q, k.to(DOT), input_precision="ieee")
                if key_scale is not None:
                    scale_at = kv_head * scale_head + frame * scale_frame + offset
                    scores *= _load(key_scale + scale_at, there, walk != 1)[None, :]
                if soft_cap is not None:
                    scores = soft_cap * _tanh(scores * (scale / soft_cap))
                if walk != 1:
                    seen = (keys[None, :] >= first[:, None]) & (keys[None, :] <= last[:, None])
                    scores = tl.where(seen, scores, float("-inf"))

                higher = tl.maximum(peak, tl.max(scores, 1) * to_log2)
                level = tl.where(higher == float("-inf"), 0.0, higher)  # of a query that has seen no key yet
                weights = tl.exp2(scores * to_log2 - level[:, None])
                fade = tl.exp2(peak - level)
                total = total * fade + tl.sum(weights, 1)
                result *= fade[:, None]
                peak = higher

                value_at = value + (frame * value_frame + offset * value_token)[:, None] + dims[None, :] * value_dim
                v = _load_tile(value_at, there[:, None], (dims < HEAD_DIM)[None, :], walk != 1, HEAD_DIM != DIMS)
                if value_scale is not None:
                    v = v.to(tl.float32) * _load(value_scale + scale_at, there, walk != 1)[:, None]
                result = tl.dot(weights.to(DOT), v.to(DOT), result, input_precision="ieee")

    result *= tl.where(total == 0, 0.0, 1.0 / total)[:, None]
    log2_sum = peak + tl.log2(total)
    if chunk_output is None:
        out_at = (place * heads + head) * HEAD_DIM
        tl.store(output + out_at[:, None] + dims[None, :], result.to(output.dtype.element_ty), query_there)
        if lse is not None:
            tl.store(lse + place * heads + head, log2_sum * LN_2, real)
    else:
        at_chunk = ((row * few + token).to(tl.int64) * heads + head) * chunks + tl.program_id(2)
        tl.store(chunk_lse + at_chunk, log2_sum, real)
        out_at = at_chunk[:, None] * HEAD_DIM + dims[None, :]
        tl.store(chunk_output + out_at, result, query_there & (total != 0)[:, None])


@triton.jit(do_not_specialize=["few", "chunks"])
def merge_chunks(
    chunk_output, chunk_lse, output, lse, query_start, few, chunks,
    SHORT: tl.constexpr, HEAD_DIM: tl.constexpr, DIMS: tl.constexpr, BLOCK_CHUNKS: tl.constexpr,
):  # fmt: skip
    """Merges a query's results over chunks, in order, as `merge_states` does; see `attend`. lse may be None.

    grid [rows * few, heads].
    """
    row, token = tl.program_id(0) // few, tl.program_id(0) % few
    head, heads = tl.program_id(1), tl.num_programs(1)
    start = tl.load(query_start + row)
    length = tl.load(query_start + row + 1) - start
    if (length > SHORT) | (token >= length):
        return
    begin = (tl.program_id(0).to(tl.int64) * heads + head) * chunks
    dims = tl.arange(0, DIMS)
    peak = float("-inf")
    total = 0.0
    result = tl.zeros([DIMS], tl.float32)
    for at in tl.range(0, chunks, BLOCK_CHUNKS):
        index = at + tl.arange(0, BLOCK_CHUNKS)
        log2_sum = tl.load(chunk_lse + begin + index, index < chunks, other=float("-inf"))
        there = (log2_sum != float("-inf"))[:, None] & (dims < HEAD_DIM)[None, :]
        part = tl.load(chunk_output + (begin + index)[:, None] * HEAD_DIM + dims[None, :], there, other=0)
        higher = tl.maximum(peak, tl.max(log2_sum, 0))
        level = tl.where(higher == float("-inf"), 0.0, higher)
        weights = tl.exp2(log2_sum - level)
        fade = tl.exp2(peak - level)
        total = total * fade + tl.sum(weights, 0)
        result = result * fade + tl.sum(part * weights[:, None], 0)
        peak = higher
    result *= tl.where(total == 0, 0.0, 1.0 / total)
    place = (start + token).to(tl.int64) * heads + head
    tl.store(output + place * HEAD_DIM + dims, result.to(output.dtype.element_ty), dims < HEAD_DIM)
    if lse is not None:
        tl.store(lse + place, (peak + tl.log2(total)) * LN_2)


@triton.jit
def _row_of(tile, query_start, rows, TILE_TOKENS: tl.constexpr):
    """Returns the row of a tile: row r's tiles begin at query_start[r] // TILE_TOKENS + r."""
    begun = 0
    for at in tl.range(0, rows, 128):
        index = at + tl.arange(0, 128)
        begin = tl.load(query_start + index, index < rows, other=0) // TILE_TOKENS + index
        begun += tl.sum(((index < rows) & (begin <= tile)).to(tl.int32), 0)
    return begun - 1


@triton.jit
def _load(pointers, there, MASKED: tl.constexpr):
    """Loads what is there, and 0 elsewhere; all, if not MASKED."""
    return tl.load(pointers, there, other=0) if MASKED else tl.load(pointers)


@triton.jit
def _load_tile(pointers, there, inside, MASKED: tl.constexpr, PADDED: tl.constexpr):
    """Loads a tile of keys or values: `there` by token, `inside` by dimension, where it is MASKED and PADDED."""
    if PADDED:
        return _load(pointers, there & inside if MASKED else inside, True)
    else:
        return _load(pointers, there, MASKED)


@triton.jit
def _tanh(x):
    """Computes tanh, within about 1e-7."""
    shrunk = tl.exp2(tl.abs(x) * (-2 * LOG2_E))
    size = (1 - shrunk) / (1 + shrunk)
    return tl.where(x < 0, -size, size)
