"""TritonAttention: paged attention on NVIDIA GPUs, by the kernels in `triton_kernels.py`.

Nothing here waits for the device: which kernels run, and over how many programs, follows from the batch's shapes and
its maxima, which lie on the host.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from pagemill.attention import triton_latent
from pagemill.attention.checks import check_attend, check_write
from pagemill.attention.interface import AttentionBatch, LayerCache
from pagemill.attention.quantize import rotated_together
from pagemill.attention.triton_kernels import attend, merge_chunks
from pagemill.attention.triton_latent import LatentTile, latent_tiles, padded
from pagemill.attention.triton_latent_kernels import attend_latents
from pagemill.attention.triton_walks import most_chunks_of
from pagemill.attention.triton_write import rotate_queries, write_tokens
from pagemill.ops.triton_early import EARLY_CAPABILITY, launch_options

KERNEL_VERSION = 3
"""Raised whenever the kernels' arithmetic, tiles or chunks change: stored K/V of other bits must not be found."""
SHORT_TILE, SHORT_QUERIES = 16, 4
"""Rows of at most SHORT_QUERIES tokens, whose heads of one KV head fit into SHORT_TILE, are attended in chunks.
Matrix products take no fewer than 16 queries."""
CHUNK, LONGEST_CHUNK, CHUNKS = 512, 2048, 64
"""Keys of a chunk: CHUNK, doubled until CHUNKS of them hold a row's context, up to LONGEST_CHUNK. Small chunks fill the
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


def long_tile(
    head_dim: int, matrix_units: bool, major: int, widened: bool, scaled: bool, packed: bool, rests: bool
) -> Tile:
    """Returns the tile of rows with many queries.

    major: of the GPU's compute capability. widened: keys and values have another dtype than products. scaled: they have
    scales; packed: some of them have 4 bits; rests: and remainders.
    """
    if not matrix_units:  # every operand of a product takes a register, and so does what is widened ahead
        if rests:
            return Tile(SHORT_TILE, 16, 8, 1)
        stages = 1 if widened else 2
        return Tile(32, 32 if head_dim <= 64 else 16, 8, stages) if head_dim <= 128 else Tile(16, 16, 8, stages)
    from_shared = major in (9, 10, 11)  # their products read keys and values from shared memory
    if rests and not from_shared:
        return Tile(32, 32 if head_dim <= 128 else 16, 8, 2)
    if head_dim > 128:
        return Tile(32 if widened else 64, 32, 8, 2)
    if rests or (packed and not from_shared):
        return Tile(64, 32, 8, 2)
    if from_shared and widened:
        return Tile(64, 64, 4, 2) if scaled else Tile(128, 128, 8, 2)
    if from_shared:
        return Tile(64, 64, 4, 3)
    return Tile(64, 64, 8, 3) if widened else Tile(128, 64, 8, 2)


def short_tile(head_dim: int, matrix_units: bool, widened: bool, packed: bool, rests: bool) -> Tile:
    """Returns the tile of rows in chunks."""
    if not matrix_units:
        if rests:
            return Tile(SHORT_TILE, 16, 8, 1)
        return Tile(SHORT_TILE, 32 if head_dim <= 128 else 16, 8, 1 if widened else 2)
    if rests:
        return Tile(SHORT_TILE, 32, 4, 3)
    warps = 4 if packed or head_dim > 128 else 2
    return Tile(SHORT_TILE, 64 if head_dim <= 128 else 32, warps, 3 if widened else 2)


def most_chunks(max_context: int, window: int | None) -> int:
    """Returns how many chunks a row may have at most, as the kernel cuts contexts of up to `max_context` keys."""
    span = max_context if window is None else min(max_context, window)
    count = most_chunks_of(span, CHUNK, LONGEST_CHUNK, CHUNKS)
    return count if span == max_context else count + 2  # a window begins and ends within chunks


def rows_at_once(rows: int, row_bytes: int) -> int:
    """Returns how many rows SCRATCH_BYTES hold, where each takes `row_bytes`: all, or a multiple of ROW_STEP."""
    return min(rows, max(1, SCRATCH_BYTES // (row_bytes * ROW_STEP)) * ROW_STEP)


class TritonAttention:
    """Implements `AttentionBackend` for GPUs of compute capability 7.5 or higher, and for Triton's interpreter.

    capability: the GPU's. Below 8.0 Triton takes no matrix units, and tiles are small. early: kernels of decode steps
    begin while the one before ends (see `ops/triton_early.py`).

    A query's bits depend on its own row alone: on its query length, context and window, never on other rows.
    """

    def __init__(self, capability: tuple[int, int], early: bool = False) -> None:
        self.name = f"triton-{triton.__version__}-{capability[0]}.{capability[1]}-{KERNEL_VERSION}"
        self.kv_formats: tuple[str, ...] | None = None
        self.waits = False
        self._major, self._native_e4m3 = capability[0], capability >= (8, 9)
        compiled = isinstance(attend, triton.JITFunction)  # the interpreter knows no assembler
        self._packed = compiled and capability >= (8, 0)
        self._options = launch_options(early and capability >= EARLY_CAPABILITY)

    def write(
        self, key: Tensor, value: Tensor | None, cache: LayerCache, slots: Tensor, remainder_slots: Tensor | None = None
    ) -> None:
        kv_heads, block_size, head_dim = _block_shape(cache)
        check_write(key, value, cache, slots, remainder_slots)
        tokens = slots.shape[0]
        if not tokens:
            return
        with torch.cuda.device_of(slots):  # type: ignore[no-untyped-call]  # kernels start on the current device
            write_tokens[(triton.cdiv(tokens * kv_heads, VECTORS),)](
                key, value, slots, remainder_slots,
                _elements(cache.key), None if value is None else _elements(cache.value),
                cache.key_scale, cache.value_scale, tokens,
                key.stride(0), key.stride(1), *((0, 0) if value is None else (value.stride(0), value.stride(1))),
                *cache.key.stride(), *cache.value.stride(), *_scale_strides(cache),
                KV_HEADS=kv_heads, HEAD_DIM=head_dim, DIMS=_padded(head_dim, cache), BLOCK_SIZE=block_size,
                VECTORS=VECTORS, STAGES=_stages(head_dim), KEY_AS=_AS[cache.key.dtype], VALUE_AS=_AS[cache.value.dtype],
                enable_fp_fusion=False, **self._options,
            )  # fmt: skip

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
        kv_heads, block_size, head_dim = _block_shape(cache)
        check_attend(query, cache, batch, group, key_start, key_end)
        tokens, heads, _ = query.shape
        if scale <= 0:
            raise ValueError(f"scale is {scale}; it must be positive")
        of_group, rows, size = batch.groups[group], batch.context_lens.shape[0], heads // kv_heads
        tables, rest = of_group.tables, None if of_group.remainders is None else of_group.remainders.tables
        output = torch.empty(tokens, heads, cache.value_dim, dtype=query.dtype, device=query.device)
        lse = torch.empty(tokens, heads, device=query.device) if return_lse else None
        if not tokens:
            return output, lse
        dot = query.dtype if cache.key.dtype == query.dtype or cache.key.dtype.itemsize == 1 else torch.float32
        if cache.values_in_keys:
            if window is not None or soft_cap is not None:
                raise ValueError("values that lie in keys are attended without a window and without a soft cap")
            self._attend_latents(query, output, lse, cache, batch, group, dot, scale, key_start, key_end)
            return output, lse
        matrix_units, widened = self._major >= 8 and dot != torch.float32, cache.key.dtype != dot
        scaled, rests = cache.key_scale is not None, rest is not None
        packed = torch.uint8 in (cache.key.dtype, cache.value.dtype)
        at_least = triton.next_power_of_2(size)
        short = max(1, min(SHORT_QUERIES, SHORT_TILE // size))
        few, chunks = min(short, batch.max_query_len), most_chunks(batch.max_context_len, window)
        dims, together = _padded(head_dim, cache), 1
        if cache.key.dtype == torch.uint8:
            together = rotated_together(head_dim)
            query, scale = self._rotated(query, dims), scale * together

        def launch(grid: tuple[int, ...], tile: Tile, first: int = 0, *parts: Tensor | None, in_chunks: bool) -> None:
            chunk_output, chunk_lse = parts or (None, None)
            attend[grid](
                query, output, lse, chunk_output, chunk_lse,
                _elements(cache.key), _elements(cache.value), cache.key_scale, cache.value_scale,
                _from(first, tables), _from(first, rest), _from(first, batch.query_start),
                _from(first, batch.context_lens), batch.positions, _from(first, key_start), _from(first, key_end),
                rows, few, chunks, scale, soft_cap, window,
                query.stride(0), query.stride(1), *cache.key.stride(), *cache.value.stride(), *_scale_strides(cache),
                tables.stride(0), 0 if rest is None else rest.stride(0), of_group.precise,
                GROUP=size, HEAD_DIM=head_dim, DIMS=dims, BLOCK_SIZE=block_size,
                BLOCK_M=max(tile.queries, at_least), BLOCK_N=tile.keys, SHORT=short, IN_CHUNKS=in_chunks,
                CHUNK=CHUNK, LONGEST_CHUNK=LONGEST_CHUNK, CHUNKS=CHUNKS,
                KEY_DOT=_TRITON[_in_halves(dot, cache.key)],
                VALUE_DOT=_TRITON[dot if cache.value.dtype == torch.uint8 else _in_halves(dot, cache.value)],
                KEY_AS=_AS[cache.key.dtype], VALUE_AS=_AS[cache.value.dtype],
                PACKED=self._packed, NATIVE=self._native_e4m3,
                TOGETHER=together, ALIKE=cache.key.stride() == cache.value.stride(),
                num_warps=tile.warps, num_stages=tile.stages, **self._options,
            )  # fmt: skip

        with torch.cuda.device_of(query):  # type: ignore[no-untyped-call]  # kernels start on the current device
            if batch.max_query_len > short:
                tile = long_tile(head_dim, matrix_units, self._major, widened, scaled, packed, rests)
                launch((tokens // (max(tile.queries, at_least) // size) + rows, kv_heads), tile, in_chunks=False)
            if rows > 1 or batch.max_query_len <= short:
                tile = short_tile(head_dim, matrix_units, widened, packed, rests)

                def some(first: int, count: int, *parts: Tensor | None) -> None:
                    launch((count, kv_heads, chunks), tile, first, *parts, in_chunks=True)

                _in_chunks(some, output, lse, batch, few, short, chunks, dims, self._options)
        return output, lse

    def _attend_latents(
        self,
        query: Tensor,
        output: Tensor,
        lse: Tensor | None,
        cache: LayerCache,
        batch: AttentionBatch,
        group: int,
        dot: torch.dtype,
        scale: float,
        key_start: Tensor | None,
        key_end: Tensor | None,
    ) -> None:
        """Attends to keys that are values too. What is queried has one KV head."""
        (_, block_size, head_dim), rank = cache.block_shape, cache.value_dim
        tokens, heads, _ = query.shape
        units, widened = self._major >= 8 and dot != torch.float32, cache.key.dtype != dot
        tile, long = latent_tiles(heads, rank, self._major, matrix_units=units, widened=widened)
        rows, tables, short = batch.context_lens.shape[0], batch.groups[group].tables, tile.short(heads)
        few, chunks = min(short, batch.max_query_len), triton_latent.most_latent_chunks(batch.max_context_len)
        key, programs = _elements(cache.key), tile.programs(heads, rank)

        def launch(
            grid: tuple[int, ...], tile: LatentTile, first: int = 0, *parts: Tensor | None, in_chunks: bool
        ) -> None:
            chunk_output, chunk_lse = parts or (None, None)
            attend_latents[grid](
                query, output, lse, chunk_output, chunk_lse, key,
                _from(first, tables), _from(first, batch.query_start), _from(first, batch.context_lens),
                batch.positions, _from(first, key_start), _from(first, key_end),
                rows, few, chunks, scale, query.stride(0), query.stride(1), key.stride(0), key.stride(2),
                key.stride(3), tables.stride(0),
                HEADS=heads, GROUP=tile.heads(heads), RANK=rank, RANK_DIMS=padded(rank),
                ROPE=head_dim - rank, ROPE_DIMS=padded(head_dim - rank), BLOCK_SIZE=block_size,
                BLOCK_M=tile.queries, BLOCK_N=tile.keys, PIECE=tile.piece, VALUES=tile.values,
                SHORT=short, IN_CHUNKS=in_chunks, CHUNK=triton_latent.CHUNK,
                LONGEST_CHUNK=triton_latent.LONGEST_CHUNK, CHUNKS=triton_latent.CHUNKS,
                DOT=_TRITON[dot], KEY_AS=_AS[cache.key.dtype], NATIVE=self._native_e4m3,
                num_warps=tile.warps, num_stages=tile.stages,
            )  # fmt: skip

        def some(first: int, count: int, *parts: Tensor | None) -> None:
            launch((count, programs, chunks), tile, first, *parts, in_chunks=True)

        with torch.cuda.device_of(query):  # type: ignore[no-untyped-call]  # kernels start on the current device
            if batch.max_query_len > short:
                launch((tokens // tile.tokens(heads) + rows, programs), long, in_chunks=False)
            if rows > 1 or batch.max_query_len <= short:
                _in_chunks(some, output, lse, batch, few, short, chunks, padded(rank), {})

    def _rotated(self, query: Tensor, dims: int) -> Tensor:
        """Returns queries rotated as 4-bit keys are: in fp16 if they have 16 bits. bf16 would round off more than there
        is between the bits of a key and its remainder."""
        tokens, heads, head_dim = query.shape
        dtype = torch.float32 if query.dtype == torch.float32 else torch.float16
        output = torch.empty(query.shape, dtype=dtype, device=query.device)
        with torch.cuda.device_of(query):  # type: ignore[no-untyped-call]
            rotate_queries[(triton.cdiv(tokens * heads, VECTORS),)](
                query, output, tokens * heads, query.stride(0), query.stride(1),
                HEADS=heads, HEAD_DIM=head_dim, DIMS=dims, VECTORS=VECTORS, STAGES=_stages(head_dim),
            )  # fmt: skip
        return output


def _in_chunks(
    launch: Callable[..., None],
    output: Tensor,
    lse: Tensor | None,
    batch: AttentionBatch,
    few: int,
    short: int,
    chunks: int,
    dims: int,
    options: dict[str, bool],
) -> None:
    """Attends rows of at most `short` tokens in up to `chunks` chunks, and merges these.

    launch: called with the first row, how many rows, and where chunks' results go; nowhere if none has two.
    """
    rows, (_, heads, value_dim) = batch.context_lens.shape[0], output.shape
    if chunks == 1:
        launch(0, rows)
        return
    at_once = rows_at_once(rows, few * heads * chunks * (value_dim + 1) * 4)
    chunk_output = torch.empty(at_once * few, heads, chunks, value_dim, device=output.device)
    chunk_lse = torch.empty(at_once * few, heads, chunks, device=output.device)
    for first in range(0, rows, at_once):
        count = min(at_once, rows - first)
        launch(first, count, chunk_output, chunk_lse)
        merge_chunks[(count * few, heads)](
            chunk_output, chunk_lse, output, lse, _from(first, batch.query_start), few, chunks,
            SHORT=short, HEAD_DIM=value_dim, DIMS=dims, BLOCK_CHUNKS=BLOCK_CHUNKS, num_warps=max(1, dims // 128),
            **options,
        )  # fmt: skip


_TRITON = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
_AS = {
    torch.float32: "float", torch.float16: "float", torch.bfloat16: "float", torch.int8: "int8", torch.uint8: "int4",
    torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2",
}  # fmt: skip
"""Names of the formats of elements in the kernels: see `triton_tiles.py`."""


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


def _elements(cached: Tensor) -> Tensor:
    """Returns keys or values as kernels take them: floating point of 8 bits as bytes."""
    return cached.view(torch.uint8) if _AS[cached.dtype] in ("e4m3", "e5m2") else cached


def _block_shape(cache: LayerCache) -> tuple[int, int, int]:
    if cache.beside > 1:
        raise ValueError("elements lie side by side, as CPU kernels take them; Triton's need the block-major layout")
    return cache.block_shape


def _scale_strides(cache: LayerCache) -> tuple[int, int, int, int]:
    """Returns the strides of frames and heads, of keys' scales and of values'."""
    if cache.key_scale is None or cache.value_scale is None:
        return 0, 0, 0, 0
    keys, values = cache.key_scale, cache.value_scale
    return keys.stride(0), keys.stride(1), values.stride(0), values.stride(1)
