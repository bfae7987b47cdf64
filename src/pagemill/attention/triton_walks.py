"""Parts of the Triton kernels of attention that do not depend on how keys and values lie: which tokens a program has,
which keys they see, how a row's keys are cut into chunks, and how scores are weighed as they come."""

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
FAR = tl.constexpr(2**31 - 1)


@triton.jit
def tokens_of_program(query_start, rows, TILE_TOKENS: tl.constexpr, SHORT: tl.constexpr, IN_CHUNKS: tl.constexpr):
    """Returns a program's row, where its queries begin, how many it has, which of them is the first of the program's
    tile, and whether the program has nothing to do. See `attend` for the grid."""
    if IN_CHUNKS:
        row = tl.program_id(0)
        start = tl.load(query_start + row)
        length = tl.load(query_start + row + 1) - start
        return row, start, length, 0, (length > SHORT) | (length == 0)
    else:
        tile = tl.num_programs(0) - 1 - tl.program_id(0)  # the last of a row see the most keys: they come first
        row = _row_of(tile, query_start, rows, TILE_TOKENS)
        start = tl.load(query_start + row)
        length = tl.load(query_start + row + 1) - start
        begin_token = (tile - start // TILE_TOKENS - row) * TILE_TOKENS
        return row, start, length, begin_token, (length <= SHORT) | (begin_token >= length)


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
def keys_seen(context, positions, place, real, key_start, key_end, row):
    """Returns each query's position, and the first and the last key that it sees without a window. key_start and
    key_end may be None."""
    position = tl.load(positions + place, real, other=0).to(tl.int32)
    last = tl.minimum(position, context - 1)
    first = tl.zeros_like(last)
    if key_end is not None:
        last = tl.minimum(last, tl.load(key_end + row) - 1)
    if key_start is not None:
        first = tl.maximum(first, tl.load(key_start + row))
    return position, first, last


@triton.jit
def chunk_of_program(
    lowest, highest, span, shortest,
    LONGEST_CHUNK: tl.constexpr, CHUNKS: tl.constexpr, IN_CHUNKS: tl.constexpr,
):  # fmt: skip
    """Returns where a program's keys begin and end: lowest .. highest, or those of them that its chunk has. span: keys
    of the row, by which the length of its chunks is chosen; see `most_chunks_of`."""
    begin, end = lowest, highest + 1
    if IN_CHUNKS:
        chunk = chunk_of(span, shortest, LONGEST_CHUNK, CHUNKS)
        at_chunk = lowest // chunk + tl.program_id(2)
        begin = tl.maximum(begin, at_chunk * chunk)
        end = tl.minimum(end, (at_chunk + 1) * chunk)
    return begin, end


@triton.jit
def chunk_of(span, shortest, LONGEST_CHUNK: tl.constexpr, CHUNKS: tl.constexpr):
    """Returns how many keys a row's chunks have."""
    chunk = shortest
    while (chunk < LONGEST_CHUNK) & (chunk * CHUNKS < span):
        chunk *= 2
    return chunk


@triton.jit
def rows_of_program(
    common, context_lens, row, shortest,
    LONGEST_CHUNK: tl.constexpr, CHUNKS: tl.constexpr, MOST: tl.constexpr,
):  # fmt: skip
    """Returns for how many rows a program attends its chunk, from its own row on: 1 if the next does not have the whole
    chunk in common with it, and 0 if it is attended with an earlier row's. MOST: rows that are joined."""
    context = tl.load(context_lens + row)
    end = (tl.program_id(2) + 1) * chunk_of(context, shortest, LONGEST_CHUNK, CHUNKS)
    at, rows = tl.program_id(0), tl.num_programs(0)
    index = 1 + tl.arange(0, triton.next_power_of_2(MOST))
    joins = tl.load(common + row + index, (index < MOST) & (at + index < rows), other=0) >= end
    joined = tl.min(tl.where(joins, MOST, index), 0)
    led = (at > 0) & (tl.load(common + row) >= end)
    return tl.where(led, 0, joined)


def most_chunks_of(span: int, chunk: int, longest: int, chunks: int) -> int:
    """Returns into how many chunks a row of up to `span` keys is cut at most, from its first key on.

    A chunk has `chunk` keys, doubled until `chunks` of them hold the row, up to `longest`.
    """
    return min(-(-span // chunk), max(chunks, -(-span // longest)))


@triton.jit
def weigh(scores, to_log2, peak, total):
    """Returns the weights of a tile of scores, how much what was summed before fades beside them, and the new maximum
    and sum of each query (FlashAttention-2, algorithm 1). Maxima are of logarithms to base 2."""
    higher = tl.maximum(peak, tl.max(scores, 1) * to_log2)
    level = tl.where(higher == float("-inf"), 0.0, higher)  # of a query that has seen no key yet
    weights = tl.exp2(scores * to_log2 - level[:, None])
    fade = tl.exp2(peak - level)
    return weights, fade, higher, total * fade + tl.sum(weights, 1)


@triton.jit
def place_results(
    lse, chunk_output, chunk_lse, log2_sum, total, place, row, token, head, heads, few, chunks, real, told
):  # fmt: skip
    """Stores the log-sum-exps of the queries that are `told`. Returns the numbers of the vectors that take the queries'
    results, and which queries have one. See `attend`."""
    if chunk_output is None:
        at = place * heads + head
        there = real
        if lse is not None:
            tl.store(lse + at, log2_sum * LN_2, told)
    else:
        at = ((row * few + token).to(tl.int64) * heads + head) * chunks + tl.program_id(2)
        there = real & (total != 0)
        tl.store(chunk_lse + at, log2_sum, told)
    return at, there
