"""Triton kernels that sample; `TritonSamplingKernels` starts them.

A row of logits is split over programs, SPLIT logits each, and what each found is merged by the next kernel, always in
the same order: a row's result is a function of its own numbers. Nothing is sorted. A cut is the largest value at or
above which there is enough of something (tokens for top_k, probability for top_p). It is looked for by comparing with
several pivots at a time, as in Ye et al., "Sorting-Free GPU Kernels for LLM Sampling" (FlashInfer, 2025), but the
pivots divide an interval of floating-point numbers in the order of their bits, of which there are 2**32: PASSES passes
always find the value itself.

logits: [n, vocab] of any floating-point type, read as fp32. places: int64 [m], rows of them, or None for all in order.
splits: a row's number of programs; SPLITS: that, rounded up to a power of two.
"""

from __future__ import annotations

import triton
import triton.language as tl

PIVOTS = tl.constexpr(16)
PASSES = tl.constexpr(8)
LOWEST = tl.constexpr(-0x7F800000)
"""The place, in the order of fp32 numbers, of the least finite one."""


@triton.jit
def _row_of(places, at):
    return at if places is None else tl.load(places + at)


@triton.jit
def _ordered(x):
    """Returns integers in the order of fp32 numbers, both zeros being the same."""
    bits = tl.where(x == 0, 0.0, x).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _scaled(x, largest, temperature):
    """Returns the logarithm of each weight, of which the largest is 1."""
    return tl.where(x == float("-inf"), float("-inf"), tl.div_rn(x - largest, x * 0 + temperature))


@triton.jit
def _largest_of(maxima, at, splits, SPLITS: tl.constexpr):
    split = tl.arange(0, SPLITS)
    return tl.max(tl.load(maxima + at * splits + split, split < splits, other=float("-inf")), 0)


@triton.jit
def _is_finite(x):
    return (x > float("-inf")) & (x < float("inf"))


@triton.jit
def find_largest(logits, places, row_stride, vocab, maxima, first, splits, SPLIT: tl.constexpr):
    """Writes each split's largest logit, +inf if it holds a NaN, and the first place of it: fp32, int32 [m, splits].

    grid [m, splits].
    """
    at, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token = split * SPLIT + tl.arange(0, SPLIT)
    x = tl.load(logits + _row_of(places, at) * row_stride + token, token < vocab, other=float("-inf")).to(tl.float32)
    x = tl.where(x != x, float("inf"), x)
    largest = tl.max(x, 0)
    tl.store(maxima + at * splits + split, largest)
    tl.store(first + at * splits + split, tl.min(tl.where(x == largest, token, 0x7FFFFFFF), 0))


@triton.jit(do_not_specialize=["rows", "turn"])
def narrow(
    logits, places, row_stride, vocab, maxima, temperature, top_k, top_p, log_min_p, starts, cuts,
    intervals, targets, parts, rows, splits, turn,
    OF_K: tl.constexpr, SPLIT: tl.constexpr, SPLITS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Does pass `turn` of the search for the cut of top_k (OF_K) or of top_p. After PASSES, writes cuts: int32 [m].

    grid [m, splits]; of turn PASSES, [m, 1].
    starts: int32 [m], the cut of top_k where that of top_p is sought; may be None.
    intervals: int64 [2, m, 2]; targets: fp64 [2, m]; parts: fp32 [2, m, splits, PIVOTS]. A pass reads one half of each,
    which the pass before wrote, and writes the other.
    At or above the interval's begin there is as much as the target, and from its end on, less.
    """
    at, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    degree = tl.load(temperature + at)
    largest = _largest_of(maxima, at, splits, SPLITS)
    start = tl.full((), LOWEST, tl.int64)
    if starts is not None:
        start = tl.load(starts + at).to(tl.int64)
    if OF_K:
        wanted = tl.load(top_k + at).to(tl.float64)
        active = wanted > 0
    else:
        wanted = tl.load(top_p + at).to(tl.float64)
        active = wanted < 1
    active = active & (degree > 0) & _is_finite(largest)
    if active:
        pivot_at = tl.arange(0, PIVOTS)
        begin, end = start, _ordered(largest).to(tl.int64) + 1
        if turn > 0:
            before = (turn - 1) % 2
            in_split = tl.arange(0, SPLITS)
            held = tl.load(
                parts + ((before * rows + at) * splits + in_split[:, None]) * PIVOTS + pivot_at[None, :],
                (in_split < splits)[:, None],
                other=0,
            )
            totals = tl.sum(held.to(tl.float64), 0)
            whole = tl.max(totals, 0)  # at or above the first pivot: in turn 1, where the search began
            target = tl.minimum(wanted, whole) if OF_K else wanted * whole
            target = tl.where(turn == 1, target, tl.load(targets + before * rows + at, turn > 1, other=0))
            begin = tl.load(intervals + (before * rows + at) * 2)
            end = tl.load(intervals + (before * rows + at) * 2 + 1)
            step = (end - begin + PIVOTS - 1) // PIVOTS
            part = tl.maximum(tl.sum((totals >= target).to(tl.int32), 0) - 1, 0)
            begin = begin + part * step
            end = tl.minimum(begin + step, end)
            if split == 0:
                tl.store(targets + turn % 2 * rows + at, target)
        if split == 0:
            tl.store(intervals + (turn % 2 * rows + at) * 2, begin)
            tl.store(intervals + (turn % 2 * rows + at) * 2 + 1, end)
        if turn == PASSES:
            tl.store(cuts + at, begin.to(tl.int32))
        else:
            step = (end - begin + PIVOTS - 1) // PIVOTS
            pivots = tl.minimum(begin + pivot_at * step, 0x7FFFFFFF).to(tl.int32)
            row = logits + _row_of(places, at) * row_stride
            least = tl.load(log_min_p + at)
            enough = tl.zeros([PIVOTS, CHUNK], tl.float32)
            for chunk in range(0, SPLIT, CHUNK):
                token = split * SPLIT + chunk + tl.arange(0, CHUNK)
                x = tl.load(row + token, token < vocab, other=float("-inf")).to(tl.float32)
                if OF_K:
                    weight = tl.full([CHUNK], 1.0, tl.float32)
                else:
                    scaled = _scaled(x, largest, degree)
                    weight = tl.where(scaled >= least, tl.exp(scaled), 0.0)
                enough += tl.where(_ordered(x)[None, :] >= pivots[:, None], weight[None, :], 0.0)
            tl.store(parts + ((turn % 2 * rows + at) * splits + split) * PIVOTS + pivot_at, tl.sum(enough, 1))
    else:
        if turn == PASSES:
            tl.store(cuts + at, start.to(tl.int32))


@triton.jit
def _weights(row, token, vocab, largest, degree, log_min_p, cuts, at):
    """Returns the weights of tokens in proportion to their probabilities, 0 of those that are not kept."""
    x = tl.load(row + token, token < vocab, other=float("-inf")).to(tl.float32)
    scaled = _scaled(x, largest, degree)
    weight = tl.exp(scaled)
    if cuts is not None:
        kept = (_ordered(x) >= tl.load(cuts + at)) & (scaled >= tl.load(log_min_p + at))
        weight = tl.where(kept, weight, 0.0)
    return weight


@triton.jit
def weigh(
    logits, places, row_stride, vocab, maxima, temperature, log_min_p, cuts, sums, splits,
    SPLIT: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Writes the sum of each split's weights, fp32 [m, splits]. grid [m, splits]. cuts: None if nothing is left out."""
    at, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    degree = tl.load(temperature + at)
    largest = _largest_of(maxima, at, splits, SPLITS)
    if (degree > 0) & _is_finite(largest):
        row = logits + _row_of(places, at) * row_stride
        token = split * SPLIT + tl.arange(0, SPLIT)
        weight = _weights(row, token, vocab, largest, degree, log_min_p, cuts, at)
        tl.store(sums + at * splits + split, tl.sum(weight, 0))


@triton.jit
def _first_above(weight, target, places):
    """Returns the first of `places` that has weight and up to which the weights add up to more than target, and what
    is before it. A target that is not below the sum, by rounding, finds the last one that has weight."""
    sums = tl.cumsum(weight, 0)
    whole = tl.max(tl.where(weight > 0, sums, 0.0), 0)
    target = tl.minimum(target, whole * (1 - 2.0**-50))
    found = tl.min(tl.where((weight > 0) & (sums > target), places, 0x7FFFFFFF), 0)
    return found, tl.sum(tl.where(places == found, sums - weight, 0.0), 0)


@triton.jit
def pick(
    logits, places, row_stride, vocab, maxima, first, temperature, log_min_p, cuts, sums, uniforms, tokens, splits,
    NOT_FINITE: tl.constexpr, ALL_FORBIDDEN: tl.constexpr, SPLIT: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Writes each row's token, int32 [m]: the argmax, or the inverse CDF in the order of the vocabulary.

    grid [m]. temperature: None if all rows take the argmax.
    """
    at = tl.program_id(0).to(tl.int64)
    split = tl.arange(0, SPLITS)
    there = split < splits
    largest = _largest_of(maxima, at, splits, SPLITS)
    maximum = tl.load(maxima + at * splits + split, there, other=float("-inf"))
    best = tl.load(first + at * splits + split, there, other=0x7FFFFFFF)
    token = tl.min(tl.where(maximum == largest, best, 0x7FFFFFFF), 0)
    token = tl.where(largest == float("-inf"), ALL_FORBIDDEN, token)
    token = tl.where(largest == float("inf"), NOT_FINITE, token)
    if temperature is not None:
        degree = tl.load(temperature + at)
        if (degree > 0) & _is_finite(largest):
            held = tl.load(sums + at * splits + split, there, other=0).to(tl.float64)
            target = tl.load(uniforms + at) * tl.sum(held, 0)
            chosen, before = _first_above(held, target, split)
            row = logits + _row_of(places, at) * row_stride
            inside = chosen * SPLIT + tl.arange(0, SPLIT)
            weight = _weights(row, inside, vocab, largest, degree, log_min_p, cuts, at).to(tl.float64)
            token, _ = _first_above(weight, target - before, inside)
    tl.store(tokens + at, token)


@triton.jit
def forbid(logits, places, row_stride, vocab, bits, words, SPLIT: tl.constexpr):
    """Makes -inf of the logits whose bit, of int32 [m, words], is not set. grid [m, splits]."""
    at = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * SPLIT + tl.arange(0, SPLIT)
    word = tl.load(bits + at * words + token // 32, token < vocab, other=-1)
    forbidden = ((word >> (token % 32)) & 1) == 0
    nothing = tl.full([SPLIT], float("-inf"), logits.dtype.element_ty)
    tl.store(logits + _row_of(places, at) * row_stride + token, nothing, forbidden & (token < vocab))
