"""SdpaAttention: rows of many queries attended by torch's own attention (cuDNN's, FlashAttention's), over keys and
values that are gathered out of their blocks first. All other rows are another backend's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from pagemill.attention.checks import check_attend
from pagemill.attention.interface import (
    AttentionBackend,
    AttentionBatch,
    GroupBatch,
    HostLengths,
    JoinedRows,
    LayerCache,
)
from pagemill.attention.sdpa_gather import Part, Span, gather, merge
from pagemill.attention.sdpa_operators import GRANULE, LONG_QUERIES, HeadShape, Operator

VERSION = 1
"""Raised whenever rows are cut otherwise: stored K/V of other bits must not be found."""
MOST_KEYS = 8192
"""Keys before a chunk that are gathered at a time: bounds the memory that long contexts take."""


class LongRow(NamedTuple):
    """States how a row is attended: `queries` from `start` on in the step, with `before` keys before them.

    pieces: keys that every query sees, as their first and how many. The keys behind them are attended causally, by as
    many queries: `front` of nobody, the row's, and others of nobody, `square` together. queries_at_once: the row's, and
    others of nobody, for the pieces.
    """

    start: int
    queries: int
    before: int
    table: Tensor
    pieces: tuple[tuple[int, int], ...]
    front: int
    square: int
    queries_at_once: int


class Plan(NamedTuple):
    """Holds a step's long rows; and the others, as a batch and the indices of their tokens, unless there are none."""

    long: list[LongRow]
    others: AttentionBatch | None
    tokens: Tensor


class SdpaAttention:
    """Implements `AttentionBackend`: rows of LONG_QUERIES or more are attended here, if they attend to all keys before
    them, the host knows their lengths, and their heads are those of `shape`.

    rest: writes, and attends what is left: decode steps, captured steps, windows, soft caps, keys of a range, latents,
    caches in 4 bits. capability: the GPU's.

    Operators are given numbers of queries and keys out of a small set (see `cut`), because cuDNN prepares itself for
    each, which takes longer than a step. What is added so has zeros, and is not seen or not used. Int8 keys and values
    are rounded to the queries' dtype as they are widened.

    A query's bits depend on its own row alone, on where its chunk begins and ends; those of rows that `rest` attends,
    on what these depend on there. Cut into other chunks, a prompt may differ in its last bits. Every chunk gathers all
    keys before it again, so a prompt cut into n chunks of one length gathers about n / 2 times its keys and values.
    """

    def __init__(
        self, operator: Operator, shape: HeadShape, rest: AttentionBackend, capability: tuple[int, int]
    ) -> None:
        self.name = f"sdpa-{torch.__version__}-{operator.name}-{VERSION}+{rest.name}"
        self.kv_formats: tuple[str, ...] | None = None
        self.waits = rest.waits
        self._operator = operator
        self._shape = shape
        self._rest = rest
        self._native_e4m3 = capability >= (8, 9)
        self._planned: tuple[AttentionBatch, dict[int, Plan]] | None = None

    def write(
        self, key: Tensor, value: Tensor | None, cache: LayerCache, slots: Tensor, remainder_slots: Tensor | None = None
    ) -> None:
        self._rest.write(key, value, cache, slots, remainder_slots)

    def joined_rows(self, heads: int, kv_heads: int) -> JoinedRows | None:
        return self._rest.joined_rows(heads, kv_heads)

    def attend(
        self,
        query: Tensor,
        cache: LayerCache,
        batch: AttentionBatch,
        group: int,
        *,
        scale: float,
        window: int | None = None,
        soft_cap: float | None = None,
        key_start: Tensor | None = None,
        key_end: Tensor | None = None,
        return_lse: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        limited = any(each is not None for each in (window, soft_cap, key_start, key_end))
        if limited or batch.max_query_len < LONG_QUERIES or batch.host is None or not self._takes(query, cache):
            return self._rest.attend(
                query, cache, batch, group, scale=scale, window=window, soft_cap=soft_cap, key_start=key_start,
                key_end=key_end, return_lse=return_lse,
            )  # fmt: skip
        check_attend(query, cache, batch, group, key_start, key_end)
        with torch.cuda.device_of(query):  # type: ignore[no-untyped-call]  # kernels start on the current device
            plan = self._plan(batch, batch.host, group)
            if plan.others is None and len(plan.long) == 1:
                output, lse = self._attend_row(query, cache, plan.long[0], scale)
                return output.contiguous(), lse.contiguous() if return_lse else None
            output = torch.empty_like(query, memory_format=torch.contiguous_format)
            lse = torch.empty(query.shape[:2], dtype=torch.float32, device=query.device)
            for row in plan.long:
                part = self._attend_row(query, cache, row, scale)
                for whole, of_row in zip((output, lse), part, strict=True):
                    whole[row.start : row.start + row.queries] = of_row
            if plan.others is not None:
                others, others_lse = self._rest.attend(
                    query[plan.tokens], cache, plan.others, 0, scale=scale, return_lse=return_lse
                )
                output.index_copy_(0, plan.tokens, others)
                if others_lse is not None:
                    lse.index_copy_(0, plan.tokens, others_lse)
        return output, lse if return_lse else None

    def _takes(self, query: Tensor, cache: LayerCache) -> bool:
        (kv_heads, _, head_dim), (_, heads, _) = cache.block_shape, query.shape
        stored = {cache.key.dtype, cache.value.dtype}
        return (
            HeadShape(query.dtype, heads, kv_heads, head_dim) == self._shape
            and all(dtype == query.dtype or (dtype.itemsize == 1 and dtype != torch.uint8) for dtype in stored)
            and cache.beside == 1
            and not cache.values_in_keys
        )

    def _plan(self, batch: AttentionBatch, host: HostLengths, group: int) -> Plan:
        """Returns the plan of a step for the layers of a group. Does not wait for the device."""
        if self._planned is None or self._planned[0] is not batch:
            self._planned = (batch, {})
        planned = self._planned[1]
        if group not in planned:
            planned[group] = _plan_of(batch, host, group)
        return planned[group]

    def _attend_row(self, query: Tensor, cache: LayerCache, row: LongRow, scale: float) -> Part:
        queries = _padded(query[row.start : row.start + row.queries], row)
        end, result = row.before + row.queries, None

        def attend(first: int, count: int, begin: int, keys: int, *, causal: bool) -> Part:
            span = Span(begin, keys, end)
            key, value = gather(cache, row.table, span, query.dtype, self._native_e4m3)
            return Part(*self._operator.attend(queries[first : first + count], key, value, causal, scale))

        for begin, keys in row.pieces:
            part = attend(row.front, row.queries_at_once, begin, keys, causal=False).of(0, row.queries)
            result = part if result is None else merge(result, part, torch.float32)
        part = attend(0, row.square, row.before - row.front, row.square, causal=True).of(row.front, row.queries)
        return part if result is None else merge(result, part, query.dtype)


def cut(queries: int, before: int) -> tuple[tuple[tuple[int, int], ...], int, int, int]:
    """Returns pieces, front, square and queries_at_once of a `LongRow`.

    Numbers of queries are rounded up by an eighth at most, or to multiples of GRANULE; pieces have 2^n or 3 * 2^n times
    GRANULE keys, up to MOST_KEYS. What is left of the keys before is less than GRANULE, and taken as the first of the
    chunk's own, with queries of nobody.
    """
    front = before % GRANULE
    return tuple(_pieces(before - front)), front, _rounded(front + queries), _rounded(queries)


def _pieces(keys: int) -> Iterator[tuple[int, int]]:
    begin = 0
    while begin < keys:
        left = min(keys - begin, MOST_KEYS)
        power = 1 << left.bit_length() - 1
        count = power + power // 2 if power + power // 2 <= left else power
        yield begin, count
        begin += count


def _rounded(count: int) -> int:
    step = max(GRANULE, (1 << (count - 1).bit_length()) // 16)
    return -(-count // step) * step


def _padded(query: Tensor, row: LongRow) -> Tensor:
    """Returns the row's queries between those of nobody, contiguous: cuDNN prepares itself for strides too."""
    count = max(row.square, row.front + row.queries_at_once) if row.pieces else row.square
    if count == row.queries:
        return query.contiguous()
    return torch.nn.functional.pad(query, (0, 0, 0, 0, row.front, count - row.front - row.queries))


def _plan_of(batch: AttentionBatch, host: HostLengths, group: int) -> Plan:
    of_group, device = batch.groups[group], batch.positions.device
    lengths, contexts = host.query.tolist(), host.context.tolist()
    long: list[LongRow] = []
    rows: list[int] = []
    tokens: list[int] = []
    start = 0
    for row, (length, context) in enumerate(zip(lengths, contexts, strict=True)):
        if length >= LONG_QUERIES:
            before = context - length
            long.append(LongRow(start, length, before, of_group.tables[row], *cut(length, before)))
        elif length:
            rows.append(row)
            tokens.extend(range(start, start + length))
        start += length
    starts = [0, *torch.tensor([lengths[row] for row in rows], dtype=torch.int64, device="cpu").cumsum(0).tolist()]
    sent = torch.tensor([*rows, *tokens, *starts], dtype=torch.int64, device="cpu")
    if device.type == "cuda":
        sent = sent.pin_memory().to(device, non_blocking=True)
    index, at, query_start = torch.split(sent, [len(rows), len(tokens), len(starts)])
    if not rows:
        return Plan(long, None, at)
    short = HostLengths(host.query[rows], host.context[rows])
    others = AttentionBatch(
        query_start=query_start.int(),
        context_lens=batch.context_lens[index],
        positions=batch.positions[at],
        groups=(GroupBatch(of_group.tables[index], of_group.slots[at]),),
        max_query_len=int(short.query.max()),
        max_context_len=int(short.context.max()),
        host=short,
    )
    return Plan(long, others, at)
