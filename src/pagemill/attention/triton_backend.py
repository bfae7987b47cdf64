"""TritonAttention: paged attention on NVIDIA GPUs, by the kernels in `triton_kernels.py`.

Nothing here waits for the device: which kernels run, and over how many programs, follows from the batch's shapes and
its maxima, which lie on the host.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import triton
from numpy.typing import NDArray
from torch import Tensor

from pagemill.attention import triton_latent
from pagemill.attention.checks import check_attend, check_write
from pagemill.attention.interface import AttentionBatch, JoinedRows, LayerCache
from pagemill.attention.quantize import rotated_together
from pagemill.attention.triton_kernels import attend, merge_chunks
from pagemill.attention.triton_latent import HOPPER_QUERIES, LEAST_HOPPER_DIMS, LatentTile, latent_tiles, padded
from pagemill.attention.triton_latent_kernels import attend_latents
from pagemill.attention.triton_tiles import READ_AS
from pagemill.attention.triton_walks import most_chunks_of
from pagemill.attention.triton_write import rotate_queries, write_tokens
from pagemill.ops.triton_early import EARLY_CAPABILITY, launch_options
from pagemill.triton_launch import TYPES, Grid, Launcher, launcher

KERNEL_VERSION = 5
"""Raised whenever the kernels' arithmetic, tiles or chunks change: stored K/V of other bits must not be found."""
SHORT_TILE, SHORT_QUERIES = 16, 4
"""Rows of at most SHORT_QUERIES tokens, whose heads of one KV head fit into SHORT_TILE, are attended in chunks.
Matrix products take no fewer than 16 queries."""
SHORTEST_CHUNK, SHORT_CHUNKS_OF_ROWS, LONGEST_CHUNK, CHUNKS = 128, 8, 2048, 64
"""Keys of a chunk: SHORTEST_CHUNK for one row, twice as many for two, four times for four, and so on for up to
SHORT_CHUNKS_OF_ROWS; then doubled until CHUNKS of them hold a row's context, up to LONGEST_CHUNK. Small chunks fill the
GPU when rows are few. They cost time where rows are many: each has to begin, and leaves a result in fp32."""
VECTORS = 8
"""Keys, and as many values, that are written at a time; and queries that are rotated."""
BLOCK_CHUNKS = 16
"""Results that are merged at a time."""
SCRATCH_BYTES = 256 << 20
"""Room for the results of chunks. Rows whose results need more are attended some at a time."""
ROW_STEP = 4
"""Rows begin at multiples of it where they are attended some at a time: the code that is compiled depends on whether
pointers are multiples of 16 bytes."""


@dataclass(frozen=True, slots=True)
class Tile:
    """Says how a kernel is cut: queries and keys at a time, warps, and stages of loads under way."""

    queries: int
    keys: int
    warps: int
    stages: int


class Stored(NamedTuple):
    """Says how keys and values are stored.

    widened: in another dtype than products are computed in. scaled: with scales; packed: some of them in 4 bits; rests:
    and with remainders.
    """

    widened: bool
    scaled: bool
    packed: bool
    rests: bool


def long_tile(head_dim: int, matrix_units: bool, major: int, stored: Stored) -> Tile:
    """Returns the tile of rows with many queries. major: of the GPU's compute capability."""
    if not matrix_units:  # every operand of a product takes a register, and so does what is widened ahead
        if stored.rests:
            return Tile(SHORT_TILE, 16, 8, 1)
        stages = 1 if stored.widened else 2
        return Tile(32, 32 if head_dim <= 64 else 16, 8, stages) if head_dim <= 128 else Tile(16, 16, 8, stages)
    from_shared = major in (9, 10, 11)  # their products read keys and values from shared memory
    if stored.rests and not from_shared:
        return Tile(32, 32 if head_dim <= 128 else 16, 8, 2)
    if head_dim > 128:
        return Tile(32 if stored.widened else 64, 32, 8, 2)
    if stored.rests or (stored.packed and not from_shared):
        whole = head_dim == triton.next_power_of_2(head_dim)  # else masks take registers too
        return Tile(64 if whole or from_shared else 32, 32, 8, 2)
    if from_shared and stored.widened:
        return Tile(64, 64, 4, 2) if stored.scaled else Tile(128, 128, 8, 2)
    if from_shared:
        return Tile(64, 64, 4, 3)
    return Tile(64, 64, 8, 3) if stored.widened else Tile(128, 64 if head_dim <= 64 else 32, 8, 2)


def short_tile(head_dim: int, matrix_units: bool, major: int, stored: Stored) -> Tile:
    """Returns the tile of rows in chunks. major: of the GPU's compute capability."""
    if not matrix_units:
        if stored.rests:
            return Tile(SHORT_TILE, 16, 8, 1)
        return Tile(SHORT_TILE, 32 if head_dim <= 128 else 16, 8, 1 if stored.widened else 2)
    if stored.rests:
        return Tile(SHORT_TILE, 32, 4, 3)
    few_warps = head_dim <= 128 and not stored.packed and (major == 9 or not stored.widened)
    return Tile(SHORT_TILE, 64 if head_dim <= 128 else 32, 2 if few_warps else 4, 3 if stored.widened else 2)


def shortest_chunk(rows: int) -> int:
    """Returns how many keys a chunk has at least, in a batch of so many rows."""
    return SHORTEST_CHUNK * min(SHORT_CHUNKS_OF_ROWS, int(triton.next_power_of_2(rows)))


def chunk_lengths(context_lens: NDArray[np.int32], rows: int) -> NDArray[np.int32]:
    """Returns how many keys the chunks of rows [n] without a window have, int32, in a batch of so many rows."""
    chunks = np.full_like(context_lens, shortest_chunk(rows))
    while (longer := (chunks < LONGEST_CHUNK) & (chunks * CHUNKS < context_lens)).any():
        chunks[longer] *= 2
    return chunks


def most_joined(group: int) -> int:
    """Returns how many rows of one query, with so many heads per KV head, fit into a tile of rows in chunks."""
    return int(max(SHORT_TILE, triton.next_power_of_2(group))) // group


def most_chunks(max_context: int, window: int | None, shortest: int) -> int:
    """Returns how many chunks a row may have at most, as the kernel cuts contexts of up to `max_context` keys."""
    span = max_context if window is None else min(max_context, window)
    count = most_chunks_of(span, shortest, LONGEST_CHUNK, CHUNKS)
    return count if span == max_context else count + 2  # a window begins and ends within chunks


def rows_at_once(rows: int, row_bytes: int) -> int:
    """Returns how many rows SCRATCH_BYTES hold, where each takes `row_bytes`: all, or a multiple of ROW_STEP."""
    return min(rows, max(1, SCRATCH_BYTES // (row_bytes * ROW_STEP)) * ROW_STEP)


@dataclass(frozen=True, slots=True)
class _Form:
    """Says how queries of one shape are attended over caches of one shape.

    Rows of at most `short` tokens are attended by `in_chunks`, and their chunks put together by `merge`; longer ones by
    `whole`, in tiles of `tokens`. programs: those that share a tile's heads. joined: rows that are attended together.
    dims, together: how many a query is padded to, and how many are rotated together, where keys have 4 bits.
    """

    whole: Launcher
    in_chunks: Launcher
    merge: Launcher
    short: int
    tokens: int
    programs: int
    joined: int = 1
    dims: int = 0
    together: int = 1


class TritonAttention:
    """Implements `AttentionBackend` for GPUs of compute capability 7.5 or higher, and for Triton's interpreter.

    capability: the GPU's; below 8.0 Triton takes no matrix units, and tiles are small. early: kernels begin while the
    one before ends (see `ops/triton_early.py`), but for those of latents.

    A query's bits depend on its own row alone, on its query length, context and window, and on how many rows there are:
    on the power of two from there on, up to SHORT_CHUNKS_OF_ROWS.
    """

    def __init__(self, capability: tuple[int, int], early: bool = False) -> None:
        self.name = f"triton-{triton.__version__}-{capability[0]}.{capability[1]}-{KERNEL_VERSION}"
        self.kv_formats: tuple[str, ...] | None = None
        self.waits = False
        self._major, self._native_e4m3 = capability[0], capability >= (8, 9)
        # The interpreter knows no assembler, and for Blackwell the compiler ends itself over it in a pipelined loop.
        self._packed = isinstance(attend, triton.JITFunction) and capability[0] in (8, 9)
        self._options = launch_options(early and capability >= EARLY_CAPABILITY)
        self._writers: dict[tuple[object, ...], Launcher] = {}
        self._forms: dict[tuple[object, ...], _Form] = {}
        self._counted: tuple[AttentionBatch, int, int] | None = None

    def write(
        self, key: Tensor, value: Tensor | None, cache: LayerCache, slots: Tensor, remainder_slots: Tensor | None = None
    ) -> None:
        _check_layout(cache)
        check_write(key, value, cache, slots, remainder_slots)
        tokens = slots.shape[0]
        if not tokens:
            return
        shape = cache.block_shape, cache.key.dtype, cache.value.dtype
        writer = self._writers.get(shape)
        if writer is None:
            writer = self._writers[shape] = _writer(cache, self._options)
        key_cache, value_cache = cache.elements
        writer(
            (-(-tokens * cache.block_shape[0] // VECTORS), 1, 1),
            key, value, slots, remainder_slots, key_cache, None if value is None else value_cache,
            cache.key_scale, cache.value_scale, tokens,
            *key.stride()[:2], *((0, 0) if value is None else value.stride()[:2]), *cache.strides,
        )  # fmt: skip

    def joined_rows(self, heads: int, kv_heads: int) -> JoinedRows | None:
        most = most_joined(heads // kv_heads)
        return JoinedRows(most, chunk_lengths) if most > 1 else None

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
        _check_layout(cache)
        check_attend(query, cache, batch, group, key_start, key_end)
        if scale <= 0:
            raise ValueError(f"scale is {scale}; it must be positive")
        tokens, heads, _ = query.shape
        output = torch.empty(tokens, heads, cache.value_dim, dtype=query.dtype, device=query.device)
        lse = torch.empty(tokens, heads, dtype=torch.float32, device=query.device) if return_lse else None
        if not tokens:
            return output, lse
        of_group, rows = batch.groups[group], batch.context_lens.shape[0]
        tables, rest = of_group.tables, None if of_group.remainders is None else of_group.remainders.tables
        stored = cache.key.dtype, cache.value.dtype, cache.block_shape, cache.value_dim, cache.values_in_keys
        shape = (query.dtype, heads, *stored, rest is None, cache.strides[:4] == cache.strides[4:8])
        form = self._forms.get(shape)
        if cache.values_in_keys:
            if window is not None or soft_cap is not None:
                raise ValueError("values that lie in keys are attended without a window and without a soft cap")
            if form is None:
                form = self._forms[shape] = _latent_form(query, cache, self._major, self._native_e4m3)
            _attend_latents(form, query, output, lse, cache, batch, tables, scale, key_start, key_end)
            return output, lse
        if form is None:
            form = self._forms[shape] = self._form(query, cache, rest is not None)
        if cache.key.dtype == torch.uint8:
            query, scale = _rotated(query, form.dims), scale * form.together
        few, shortest = self._few(batch, form.short), shortest_chunk(rows)
        limited = any(each is not None for each in (window, key_start, key_end))
        common = None if limited or rows == 1 or few > 1 or form.joined == 1 else batch.common
        chunks, (key, value) = most_chunks(batch.max_context_len, window, shortest), cache.elements

        def start(launch: Launcher, grid: Grid, first: int, chunk_output: Tensor | None, sums: Tensor | None) -> None:
            launch(
                grid,
                query, output, lse, chunk_output, sums, key, value, cache.key_scale, cache.value_scale,
                _from(first, tables), _from(first, rest), _from(first, batch.query_start),
                _from(first, batch.context_lens), _from(first, common if chunk_output is not None else None),
                batch.positions, _from(first, key_start), _from(first, key_end),
                rows, few, chunks, scale, soft_cap, window,
                *query.stride()[:2], *cache.strides, tables.stride(0), 0 if rest is None else rest.stride(0),
                of_group.precise, shortest,
            )  # fmt: skip

        _attend_rows(form, start, output, lse, batch, few, chunks)
        return output, lse

    def _few(self, batch: AttentionBatch, short: int) -> int:
        """Returns how many queries a row in chunks has at most, as far as the host knows. Found once per step."""
        if batch.max_query_len <= short:
            return batch.max_query_len
        if self._counted is None or self._counted[0] is not batch or self._counted[1] != short:
            few = short if batch.host is None else int((batch.host.query * (batch.host.query <= short)).max())
            self._counted = batch, short, max(1, few)
        return self._counted[2]

    def _form(self, query: Tensor, cache: LayerCache, rests: bool) -> _Form:
        """Returns how such queries are attended over such a cache. rests: with remainders.

        Tiles of more queries than `long_tile` or `short_tile` says, since so many heads share a KV head, take 8 warps:
        fewer would have too few registers.
        """
        (kv_heads, block_size, head_dim), heads, dot = cache.block_shape, query.shape[1], _dot(query, cache)
        matrix_units, size = self._major >= 8 and dot != torch.float32, heads // kv_heads
        packed = torch.uint8 in (cache.key.dtype, cache.value.dtype)
        dims, at_least = _padded(head_dim, cache), triton.next_power_of_2(size)
        least = LEAST_HOPPER_DIMS if matrix_units and self._major == 9 else 0
        dims = max(dims, least)
        short = max(1, min(SHORT_QUERIES, SHORT_TILE // size))
        stored = Stored(cache.key.dtype != dot, cache.key_scale is not None, packed, rests)
        long = long_tile(head_dim, matrix_units, self._major, stored)
        together = rotated_together(head_dim) if cache.key.dtype == torch.uint8 else 1

        def attending(tile: Tile, *, in_chunks: bool) -> Launcher:
            queries = max(tile.queries, at_least)
            halves = 2 if packed and queries >= HOPPER_QUERIES else 1  # each half of 4-bit tiles is a tile
            return launcher(
                attend,
                GROUP=size, HEAD_DIM=head_dim, DIMS=max(dims, halves * least), BLOCK_SIZE=block_size,
                BLOCK_M=queries, BLOCK_N=tile.keys, SHORT=short, IN_CHUNKS=in_chunks,
                LONGEST_CHUNK=LONGEST_CHUNK, CHUNKS=CHUNKS,
                KEY_DOT=TYPES[_in_halves(dot, cache.key)],
                VALUE_DOT=TYPES[dot if cache.value.dtype == torch.uint8 else _in_halves(dot, cache.value)],
                KEY_AS=READ_AS[cache.key.dtype], VALUE_AS=READ_AS[cache.value.dtype],
                PACKED=self._packed, NATIVE=self._native_e4m3,
                TOGETHER=together, ALIKE=cache.strides[:4] == cache.strides[4:8],
                num_warps=tile.warps if at_least <= tile.queries else 8, num_stages=tile.stages, **self._options,
            )  # fmt: skip

        return _Form(
            whole=attending(long, in_chunks=False),
            in_chunks=attending(short_tile(head_dim, matrix_units, self._major, stored), in_chunks=True),
            merge=_merging(short, cache.value_dim, dims, self._options),
            short=short,
            tokens=max(long.queries, at_least) // size,
            programs=kv_heads,
            joined=most_joined(size),
            dims=dims,
            together=together,
        )


Start = Callable[[Launcher, Grid, int, "Tensor | None", "Tensor | None"], None]
"""Starts a kernel over a grid, with its first row and where chunks' results and log-sum-exps go, if they go anywhere
but to the output."""


def _attend_rows(
    form: _Form, start: Start, output: Tensor, lse: Tensor | None, batch: AttentionBatch, few: int, chunks: int
) -> None:
    """Attends all rows: the long ones as a whole, the others in up to `chunks` chunks, and merges these."""
    rows, (tokens, heads, value_dim) = batch.context_lens.shape[0], output.shape
    if batch.max_query_len > form.short:
        start(form.whole, (tokens // form.tokens + rows, form.programs, 1), 0, None, None)
        if rows == 1:
            return
    if chunks == 1:
        start(form.in_chunks, (rows, form.programs, 1), 0, None, None)
        return
    at_once = rows_at_once(rows, few * heads * chunks * (value_dim + 1) * 4)
    chunk_output = torch.empty(at_once * few, heads, chunks, value_dim, dtype=torch.float32, device=output.device)
    sums = torch.empty(at_once * few, heads, chunks, dtype=torch.float32, device=output.device)
    for first in range(0, rows, at_once):
        count = min(at_once, rows - first)
        start(form.in_chunks, (count, form.programs, chunks), first, chunk_output, sums)
        query_start = _from(first, batch.query_start)
        form.merge((count * few, heads, 1), chunk_output, sums, output, lse, query_start, few, chunks)


def _attend_latents(
    form: _Form,
    query: Tensor,
    output: Tensor,
    lse: Tensor | None,
    cache: LayerCache,
    batch: AttentionBatch,
    tables: Tensor,
    scale: float,
    key_start: Tensor | None,
    key_end: Tensor | None,
) -> None:
    """Attends to keys that are values too. What is queried has one KV head."""
    rows, (key, _) = batch.context_lens.shape[0], cache.elements
    few, chunks = min(form.short, batch.max_query_len), triton_latent.most_latent_chunks(batch.max_context_len)

    def start(launch: Launcher, grid: Grid, first: int, chunk_output: Tensor | None, sums: Tensor | None) -> None:
        launch(
            grid,
            query, output, lse, chunk_output, sums, key,
            _from(first, tables), _from(first, batch.query_start), _from(first, batch.context_lens),
            batch.positions, _from(first, key_start), _from(first, key_end),
            rows, few, chunks, scale, *query.stride()[:2], key.stride(0), key.stride(2), key.stride(3),
            tables.stride(0),
        )  # fmt: skip

    _attend_rows(form, start, output, lse, batch, few, chunks)


def _rotated(query: Tensor, dims: int) -> Tensor:
    """Returns queries rotated as 4-bit keys are: in fp16 if they have 16 bits. bf16 would round off more than there is
    between the bits of a key and its remainder."""
    tokens, heads, head_dim = query.shape
    dtype = torch.float32 if query.dtype == torch.float32 else torch.float16
    output = torch.empty(query.shape, dtype=dtype, device=query.device)
    constants = {"HEADS": heads, "HEAD_DIM": head_dim, "DIMS": dims, "VECTORS": VECTORS, "STAGES": _stages(head_dim)}
    grid = (-(-tokens * heads // VECTORS), 1, 1)
    launcher(rotate_queries, **constants)(grid, query, output, tokens * heads, *query.stride()[:2])
    return output


def _writer(cache: LayerCache, options: Mapping[str, bool]) -> Launcher:
    """Returns what writes to such a cache."""
    kv_heads, block_size, head_dim = cache.block_shape
    return launcher(
        write_tokens,
        KV_HEADS=kv_heads, HEAD_DIM=head_dim, DIMS=_padded(head_dim, cache), BLOCK_SIZE=block_size,
        VECTORS=VECTORS, STAGES=_stages(head_dim), KEY_AS=READ_AS[cache.key.dtype], VALUE_AS=READ_AS[cache.value.dtype],
        enable_fp_fusion=False, **options,
    )  # fmt: skip


def _latent_form(query: Tensor, cache: LayerCache, major: int, native_e4m3: bool) -> _Form:
    """Returns how such queries are attended over keys that are values too. For the others see `_form`."""
    (_, block_size, head_dim), rank, heads = cache.block_shape, cache.value_dim, query.shape[1]
    dot = _dot(query, cache)
    rope, units, widened = head_dim - rank, major >= 8 and dot != torch.float32, cache.key.dtype != dot
    tile, long = latent_tiles(heads, rank, rope, major, matrix_units=units, widened=widened)
    short = tile.short(heads)

    def attending(tile: LatentTile, *, in_chunks: bool) -> Launcher:
        return launcher(
            attend_latents,
            HEADS=heads, GROUP=tile.heads(heads), RANK=rank, RANK_DIMS=padded(rank),
            ROPE=rope, ROPE_DIMS=padded(rope), BLOCK_SIZE=block_size,
            BLOCK_M=tile.queries, BLOCK_N=tile.keys, PIECE=tile.piece, VALUES=tile.values,
            SHORT=short, IN_CHUNKS=in_chunks, CHUNK=triton_latent.CHUNK,
            LONGEST_CHUNK=triton_latent.LONGEST_CHUNK, CHUNKS=triton_latent.CHUNKS,
            DOT=TYPES[dot], KEY_AS=READ_AS[cache.key.dtype], NATIVE=native_e4m3,
            num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip

    return _Form(
        whole=attending(long, in_chunks=False),
        in_chunks=attending(tile, in_chunks=True),
        merge=_merging(short, rank, padded(rank), launch_options(False)),
        short=short,
        tokens=tile.tokens(heads),
        programs=tile.programs(heads, rank),
    )


def _merging(short: int, value_dim: int, dims: int, options: Mapping[str, bool]) -> Launcher:
    return launcher(
        merge_chunks, SHORT=short, HEAD_DIM=value_dim, DIMS=dims, BLOCK_CHUNKS=BLOCK_CHUNKS,
        num_warps=max(1, dims // 128), **options,
    )  # fmt: skip


def _dot(query: Tensor, cache: LayerCache) -> torch.dtype:
    """Returns what products are computed in."""
    return query.dtype if cache.key.dtype == query.dtype or cache.key.dtype.itemsize == 1 else torch.float32


def _in_halves(dot: torch.dtype, cached: Tensor) -> torch.dtype:
    """Returns what products with cached elements are computed in, where queries are computed with in `dot`: in fp16 in
    the place of bf16 where that holds them as they are: 4 bits, and floating point of 8."""
    narrow = cached.dtype in (torch.uint8, torch.float8_e4m3fn, torch.float8_e5m2)
    return torch.float16 if narrow and dot == torch.bfloat16 else dot


def _from(row: int, by_row: Tensor | None) -> Tensor | None:
    return by_row if by_row is None or row == 0 else by_row[row:]


def _padded(head_dim: int, cache: LayerCache) -> int:
    """Returns the dimensions of a tile, of which products add 16 or more, of each half of what is packed."""
    packed = torch.uint8 in (cache.key.dtype, cache.value.dtype)
    return padded(head_dim, least=32 if packed else 16)


def _stages(head_dim: int) -> int:
    return rotated_together(head_dim).bit_length() - 1


def _check_layout(cache: LayerCache) -> None:
    if cache.beside > 1:
        raise ValueError("elements lie side by side, as CPU kernels take them; Triton's need the block-major layout")
