"""Paged attention for GPUs, as Triton kernels over any format of keys and values; `triton_backend.py` launches them.

PagedAttention (Kwon et al., SOSP 2023): keys and values are read where they lie, through the block table.
FlashAttention-2 (Dao, 2023): a tile of queries walks over the keys once, and keeps a running maximum and sum per query.
Flash decoding (Dao et al., 2023): a row of few queries cuts its keys into chunks that run side by side, and
`merge_chunks` puts their results together.

A tile is BLOCK_M queries of one KV head: TILE_TOKENS tokens, each with the GROUP heads that share this KV head, one
token after the other. So keys and values are read once for all heads of a group.

Rows of one query each that begin with the same frames are attended together, chunk by chunk: one program has all of
their queries in its tile, in the places where a row of several queries has these, and reads the chunk once.

Bits: tiles of keys and chunks begin at multiples of their length, a chunk's length follows from the row's own context
and from `shortest`, and rows of few queries are attended in chunks whatever else is in the batch. So a query's bits
depend on its own row and on `shortest`, never on what other rows hold. Nor do they depend on rows that are attended
together with it: it is the same code over the same chunk, and in products, maxima and sums a query takes its own row of
the tile alone. This rests on matrix units that compute each row of a tile alike.

Strides are in elements. A name of a pointer that may be None says so; what depends on it is then left out.
"""

from __future__ import annotations

import triton
import triton.language as tl

from pagemill.attention.triton_tiles import (
    in_fp16,
    load,
    load_key_halves,
    load_tile,
    load_value_halves,
    widened,
)
from pagemill.attention.triton_walks import (
    FAR,
    LN_2,
    LOG2_E,
    chunk_of_program,
    keys_seen,
    place_results,
    rows_of_program,
    tokens_of_program,
    weigh,
)
from pagemill.ops.triton_early import let_next_begin, wait_for_previous


@triton.jit(
    do_not_specialize=["rows", "few", "chunks", "table_row", "rest_row", "precise", "shortest"],
    do_not_specialize_on_alignment=["tables", "rest_tables"],  # those of a layer group begin anywhere
)
def attend(
    query, output, lse, chunk_output, chunk_lse,
    key, value, key_scale, value_scale,
    tables, rest_tables, query_start, context_lens, common, positions, key_start, key_end,
    rows, few, chunks, scale, soft_cap, window,
    query_token, query_head,
    key_frame, key_head, key_token, key_dim,
    value_frame, value_head, value_token, value_dim,
    key_scale_frame, key_scale_head, value_scale_frame, value_scale_head,
    table_row, rest_row, precise, shortest,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, DIMS: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SHORT: tl.constexpr, IN_CHUNKS: tl.constexpr,
    LONGEST_CHUNK: tl.constexpr, CHUNKS: tl.constexpr,
    KEY_DOT: tl.constexpr, VALUE_DOT: tl.constexpr, KEY_AS: tl.constexpr, VALUE_AS: tl.constexpr,
    PACKED: tl.constexpr, NATIVE: tl.constexpr, TOGETHER: tl.constexpr, ALIKE: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Attends for one tile of queries and one KV head, over all keys or over one chunk of them.

    Not IN_CHUNKS: rows of more than SHORT queries; grid [tokens // TILE_TOKENS + rows, kv_heads]. A row's tiles follow
        each other, and each row has one tile more than it may need, so that a tile's row is found without knowing
        lengths on the host.
    IN_CHUNKS: rows of at most SHORT queries, one tile each; grid [rows, kv_heads, chunks]. Results go to chunk_output
        fp32 [rows * few, heads, chunks, HEAD_DIM] and chunk_lse (base 2) [rows * few, heads, chunks], where `few` is
        the most queries that such a row has; to `output` if chunk_output is None, when no row has two chunks.
    common [rows]: where `few` is 1, see `AttentionBatch`; or None. The first of the rows that have a chunk in common
        attends it for all of them, the others' programs end at once.
    lse, key_scale and value_scale, rest_tables, key_start, key_end, soft_cap, window: may be None.
    KEY_DOT, VALUE_DOT: what products with keys and with values are computed in; sums are fp32.
    KEY_AS, VALUE_AS, PACKED, NATIVE: see `triton_tiles.py`. Where keys have 4 bits, queries come rotated, and both are
        divided by TOGETHER: `scale` makes up for one of them.
    shortest: keys of a chunk at least, a power of two.
    ALIKE: whether values have the strides of keys: then one address serves both.
    rest_tables: of the remainders that a query adds to its `precise` latest keys and values, in 4 bits as they are.
    EARLY: see `ops/triton_early.py`.
    """
    let_next_begin(EARLY)
    wait_for_previous(EARLY)
    kv_head = tl.program_id(1)
    heads = tl.num_programs(1) * GROUP
    TILE_TOKENS: tl.constexpr = BLOCK_M // GROUP
    row, start, length, begin_token, idle = tokens_of_program(query_start, rows, TILE_TOKENS, SHORT, IN_CHUNKS)
    if common is not None:
        joined = rows_of_program(common, context_lens, row, shortest, LONGEST_CHUNK, CHUNKS, TILE_TOKENS)
        idle |= joined == 0
        length = tl.where(joined > 1, joined, length)
    if idle:
        return

    index = tl.arange(0, BLOCK_M)
    token = begin_token + index // GROUP
    head = kv_head * GROUP + index % GROUP
    real = (index < TILE_TOKENS * GROUP) & (token < length)
    place = (start + token).to(tl.int64)
    dims = tl.arange(0, DIMS)
    halves = tl.arange(0, DIMS // 2) // 16 * 32 + tl.arange(0, DIMS // 2) % 16  # of dimensions: the lower; + 16: upper
    query_at = query + place[:, None] * query_token + head[:, None] * query_head
    if KEY_AS == "int4":
        query_there = real[:, None] & (halves < HEAD_DIM)[None, :]
        q = tl.load(query_at + halves[None, :], query_there, other=0).to(KEY_DOT)
        q_upper = tl.load(query_at + halves[None, :] + 16, query_there, other=0).to(KEY_DOT)
    else:
        q = tl.load(query_at + dims[None, :], real[:, None] & (dims < HEAD_DIM)[None, :], other=0)
        q = in_fp16(q) if tl.float16 == KEY_DOT else q.to(KEY_DOT)

    # Each query sees keys first .. last.
    context = tl.load(context_lens + row)
    position, first, last = keys_seen(context, positions, place, real, key_start, key_end, row)
    span = context
    if window is not None:
        first = tl.maximum(first, position - window + 1)
        span = tl.minimum(span, window)
    lowest = tl.min(tl.where(real, first, FAR))
    highest = tl.max(tl.where(real, last, -1))
    begin, end = chunk_of_program(lowest, highest, span, shortest, LONGEST_CHUNK, CHUNKS, IN_CHUNKS)

    # Three walks: over tiles that some query does not see from their first key on, over tiles that every query sees
    # in full, without masks, and over what is left, the only one that adds remainders.
    begin = begin // BLOCK_N * BLOCK_N
    seen_from = begin
    if window is not None or key_start is not None:
        seen_from = tl.maximum(begin, tl.cdiv(tl.max(tl.where(real, first, 0)), BLOCK_N) * BLOCK_N)
    seen_to = tl.maximum(seen_from, tl.minimum(end, tl.min(tl.where(real, last, FAR)) + 1) // BLOCK_N * BLOCK_N)
    if rest_tables is not None:
        latest = tl.maximum(lowest, tl.min(tl.where(real, position, FAR)) - precise + 1)
        rest_from = tl.maximum(begin, latest // BLOCK_N * BLOCK_N)
        seen_from = tl.minimum(seen_from, rest_from)
        seen_to = tl.minimum(seen_to, rest_from)
        rest_table = rest_tables + row.to(tl.int64) * rest_row

    table = tables + row.to(tl.int64) * table_row
    key += kv_head * key_head
    value += kv_head * value_head
    to_log2 = LOG2_E if soft_cap is not None else scale * LOG2_E
    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    result = tl.zeros([BLOCK_M, DIMS // 2 if VALUE_AS == "int4" else DIMS], tl.float32)
    if VALUE_AS == "int4":
        result_upper = tl.zeros([BLOCK_M, DIMS // 2], tl.float32)
    FIRST: tl.constexpr = window is not None or key_start is not None
    # Scales of int8 may be so small, and weights too, that fp16 has no such number; a scale is at most 65504 / 127.
    UP: tl.constexpr = 64.0 if VALUE_AS == "int8" and tl.float16 == VALUE_DOT else 1.0
    for walk in tl.static_range(3):
        if walk == 0:
            walk_from, walk_to = begin, tl.minimum(seen_from, end)
        elif walk == 1:
            walk_from, walk_to = seen_from, seen_to
        else:
            walk_from, walk_to = seen_to, end
        if walk > 0 or FIRST:
            ahead = walk_from + tl.arange(0, BLOCK_N)
            next_frame = load(table + ahead // BLOCK_SIZE, ahead < walk_to, True)  # a tile ahead: its keys come early
            for at in tl.range(walk_from, walk_to, BLOCK_N):
                keys = at + tl.arange(0, BLOCK_N)
                there = (keys >= lowest) & (keys <= highest)  # what lies elsewhere may be NaN
                frame = next_frame.to(tl.int64)
                ahead = keys + BLOCK_N
                next_frame = load(table + ahead // BLOCK_SIZE, ahead < walk_to, True)
                offset = keys % BLOCK_SIZE
                key_at = frame * key_frame + offset * key_token
                key_scale_at = kv_head * key_scale_head + frame * key_scale_frame + offset
                if KEY_AS == "int4":
                    k, k_upper = load_key_halves(
                        key, key_scale, key_at, key_scale_at, key_dim, there,
                        HEAD_DIM, DIMS, BLOCK_SIZE, TOGETHER, walk != 1, KEY_DOT,
                    )  # fmt: skip
                    scores = tl.dot(q, k, input_precision="ieee")
                    scores = tl.dot(q_upper, k_upper, scores, input_precision="ieee")
                else:
                    at_tile = key + key_at[:, None] + dims[None, :] * key_dim
                    k = load_tile(at_tile, there[:, None], (dims < HEAD_DIM)[None, :], walk != 1, HEAD_DIM != DIMS)
                    scores = tl.dot(q, tl.trans(widened(k, KEY_AS, PACKED, NATIVE, KEY_DOT)), input_precision="ieee")
                    if KEY_AS == "int8":
                        scores *= load(key_scale + key_scale_at, there, walk != 1)[None, :]
                if walk == 2 and rest_tables is not None:
                    rest_there = there & (keys >= latest)
                    rest_frame = load(rest_table + keys // BLOCK_SIZE, rest_there, True).to(tl.int64)
                    rest_at = kv_head * key_scale_head + rest_frame * key_scale_frame + offset
                    k, k_upper = load_key_halves(
                        key, key_scale, rest_frame * key_frame + offset * key_token, rest_at, key_dim, rest_there,
                        HEAD_DIM, DIMS, BLOCK_SIZE, TOGETHER, True, KEY_DOT,
                    )  # fmt: skip
                    rest = tl.dot(q, k, input_precision="ieee")
                    rest = tl.dot(q_upper, k_upper, rest, input_precision="ieee")
                    added = keys[None, :] > (position - precise)[:, None]
                    scores += tl.where(added, rest, 0.0)
                if soft_cap is not None:
                    scores = soft_cap * _tanh(scores * (scale / soft_cap))
                if walk != 1:
                    seen = (keys[None, :] >= first[:, None]) & (keys[None, :] <= last[:, None])
                    scores = tl.where(seen, scores, float("-inf"))

                weights, fade, peak, total = weigh(scores, to_log2, peak, total)
                result *= fade[:, None]

                value_at = key_at if ALIKE else frame * value_frame + offset * value_token
                value_scale_at = kv_head * value_scale_head + frame * value_scale_frame + offset
                if VALUE_AS == "int4":
                    v, v_upper = load_value_halves(
                        value, value_scale, value_at, value_scale_at, value_dim, there,
                        HEAD_DIM, DIMS, walk != 1, VALUE_DOT,
                    )  # fmt: skip
                    result = tl.dot(weights.to(VALUE_DOT), v, result, input_precision="ieee")
                    result_upper *= fade[:, None]
                    result_upper = tl.dot(weights.to(VALUE_DOT), v_upper, result_upper, input_precision="ieee")
                else:
                    at_tile = value + value_at[:, None] + dims[None, :] * value_dim
                    v = load_tile(at_tile, there[:, None], (dims < HEAD_DIM)[None, :], walk != 1, HEAD_DIM != DIMS)
                    v = widened(v, VALUE_AS, PACKED, NATIVE, VALUE_DOT)
                    if VALUE_AS == "int8":
                        weights *= UP * load(value_scale + value_scale_at, there, walk != 1)[None, :]
                    result = tl.dot(weights.to(VALUE_DOT), v, result, input_precision="ieee")
                if walk == 2 and rest_tables is not None:
                    rest_at = kv_head * value_scale_head + rest_frame * value_scale_frame + offset
                    v, v_upper = load_value_halves(
                        value, value_scale, rest_frame * value_frame + offset * value_token, rest_at, value_dim,
                        rest_there, HEAD_DIM, DIMS, True, VALUE_DOT,
                    )  # fmt: skip
                    latest_weights = tl.where(added, weights, 0.0).to(VALUE_DOT)
                    result = tl.dot(latest_weights, v, result, input_precision="ieee")
                    result_upper = tl.dot(latest_weights, v_upper, result_upper, input_precision="ieee")

    share = tl.where(total == 0, 0.0, 1.0 / (UP * total))[:, None]
    log2_sum = peak + tl.log2(total)
    out_at, out_there = place_results(
        lse, chunk_output, chunk_lse, log2_sum, total, place, row, token, head, heads, few, chunks, real, real
    )
    stored_to = output if chunk_output is None else chunk_output
    ELEMENT: tl.constexpr = stored_to.dtype.element_ty
    columns = halves if VALUE_AS == "int4" else dims
    out_at = stored_to + out_at[:, None] * HEAD_DIM + columns[None, :]
    out_there = out_there[:, None] & (columns < HEAD_DIM)[None, :]
    tl.store(out_at, (result * share).to(ELEMENT), out_there)
    if VALUE_AS == "int4":
        tl.store(out_at + 16, (result_upper * share).to(ELEMENT), out_there)


@triton.jit(do_not_specialize=["few", "chunks"])
def merge_chunks(
    chunk_output, chunk_lse, output, lse, query_start, few, chunks,
    SHORT: tl.constexpr, HEAD_DIM: tl.constexpr, DIMS: tl.constexpr, BLOCK_CHUNKS: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Merges a query's results over chunks, in order, as `merge_states` does; see `attend`. lse may be None.

    grid [rows * few, heads].
    """
    let_next_begin(EARLY)
    wait_for_previous(EARLY)
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
def _tanh(x):
    """Computes tanh, within about 1e-7."""
    shrunk = tl.exp2(tl.abs(x) * (-2 * LOG2_E))
    size = (1 - shrunk) / (1 + shrunk)
    return tl.where(x < 0, -size, size)
