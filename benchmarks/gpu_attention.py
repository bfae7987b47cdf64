"""Times Triton's paged attention on a GPU beside what the GPU can do: bytes per second of a copy, FLOP per second of a
bf16 matrix product, and torch's own attention over contiguous keys and values. Prompts and chunks of prompts are also
timed through `attention_backend` sdpa, which gathers keys and values and then calls torch's; and all cases of 16 bits
through FlashInfer, where it is installed.

    python -m benchmarks.gpu_attention [--quick] [--caches all|bfloat16,int4_mixed,...] [--heads 32] [--kv-heads 8]
                                       [--head-dim 128] [--json FILE]

Every KV format has a table of its own. Blocks of 16 lie scattered over a pool; cases whose keys and values take more
than half of the free memory are left out. Times are medians over 200 ms by `triton.testing.do_bench`, which empties
the L2 cache before each; a decode step is a CUDA graph, as in the engine. Its share of the copy's speed counts the
bytes of K and V once, with scales and the remainders of a row's latest tokens; the copy's speed counts what is read and
what is written.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from benchmarks.gpu_flashinfer import flashinfer_ms
from benchmarks.on_gpu import (
    DEVICE,
    Ceilings,
    captured,
    heading,
    keep,
    measure_ceilings,
    median_ms,
    need_gpu,
    parser_for,
)

from pagemill.attention.interface import AttentionBackend, AttentionBatch, GroupBatch, HostLengths, LayerCache
from pagemill.attention.sdpa_operators import HeadShape, working_operator
from pagemill.attention.selection import SDPA_FORMATS
from pagemill.kvcache.device_pool import DevicePool
from pagemill.kvcache.kv_format import KVFormat, kv_format
from pagemill.kvcache.layer_groups import group_layers
from pagemill.kvcache.layout import FrameShape, block_major

FORMATS = ("bfloat16", "int8", "fp8_e4m3", "fp8_e5m2", "int8/int4", "int4", "int4_mixed")
BLOCK_SIZE = 16
CONTEXTS = (1024, 4096, 8192, 16384, 32768, 131072)
DECODE = [(batch, context) for batch in (1, 8, 32, 128, 256) for context in CONTEXTS]
PREFILL = [2048, 4096, 8192, 16384, 32768]
CHUNKS = [(512, 8192), (2048, 8192), (512, 32768), (2048, 32768)]
"""Query tokens at the end of contexts."""


@dataclass(frozen=True)
class Shape:
    heads: int
    kv_heads: int
    head_dim: int
    format: KVFormat

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's K and V, scales included."""
        return self.format.slot_bytes(self.kv_heads, self.head_dim, self.head_dim)

    def row_bytes(self, context: int) -> int:
        """Bytes that a decode step reads of a row: K and V, and the remainders of the latest tokens."""
        return (context + min(context, self.format.precise)) * self.token_bytes


@dataclass(frozen=True)
class Result:
    """Holds one case. share: of the copy's speed in decode, of the product's elsewhere. sdpa_ms: torch's own.
    gathered_ms: by the backend sdpa. flashinfer_ms: FlashInfer's, over the same pool."""

    name: str
    batch: int
    context: int
    ms: float
    share: float
    sdpa_ms: float | None
    gathered_ms: float | None
    flashinfer_ms: float | None


def make_cache(shape: Shape, frames: int) -> LayerCache:
    """Makes a pool's only layer, of random keys and values."""
    groups, head_dim = group_layers([None]), shape.head_dim
    frame = FrameShape(groups, shape.kv_heads, BLOCK_SIZE, head_dim, head_dim, shape.format)
    cache = DevicePool(frames, frame, DEVICE, block_major).layer(0)
    for elements in (cache.key, cache.value):
        if elements.itemsize > 1:
            elements.normal_()
        else:
            elements.view(torch.uint8).random_(0, 112)  # in 8-bit floating point all of them are finite
    for scales in (cache.key_scale, cache.value_scale):
        if scales is not None and scales.dtype == torch.int32:
            scales.fill_(0x3D80BF00)  # a scale of 1/16 and a low of -1/2
        elif scales is not None:
            scales.fill_(1 / 64)
    return cache


def make_batch(shape: Shape, rows: int, queries: int, context: int, frames: int) -> AttentionBatch:
    """Makes `rows` rows of one length, whose blocks lie anywhere among the frames; remainders lie in the same ones."""
    entries = -(-context // BLOCK_SIZE)
    tables = torch.randperm(frames, device=DEVICE, dtype=torch.int32)[: rows * entries].view(rows, entries)
    positions = torch.arange(context - queries, context, device=DEVICE).repeat(rows)
    group = GroupBatch(tables, torch.full((rows * queries,), -1, device=DEVICE))
    if shape.format.precise:
        group = replace(group, remainders=GroupBatch(tables.flip(1), group.slots), precise=shape.format.precise)
    return AttentionBatch(
        query_start=torch.arange(0, rows * queries + 1, queries, dtype=torch.int32, device=DEVICE),
        context_lens=torch.full((rows,), context, dtype=torch.int32, device=DEVICE),
        positions=positions,
        groups=(group,),
        max_query_len=queries,
        max_context_len=context,
        host=HostLengths(*(torch.full((rows,), each, dtype=torch.int32) for each in (queries, context))),
    )


def sdpa_ms(shape: Shape, rows: int, queries: int, context: int) -> float | None:
    """Times torch's attention over contiguous keys and values of 16 bits; None where they take too much memory, and for
    chunks, which it does not know."""
    if rows * context * shape.kv_heads * shape.head_dim * 4 > 10 << 30 or 1 < queries < context:
        return None

    def draw(heads: int, tokens: int) -> torch.Tensor:
        return torch.randn(rows, heads, tokens, shape.head_dim, device=DEVICE, dtype=torch.bfloat16)

    query, key, value = draw(shape.heads, queries), draw(shape.kv_heads, context), draw(shape.kv_heads, context)

    def attend() -> torch.Tensor:
        return F.scaled_dot_product_attention(query, key, value, is_causal=queries > 1, enable_gqa=True)

    return median_ms(attend if queries > 1 else captured(attend))


def gathering(shape: Shape, triton: AttentionBackend) -> AttentionBackend | None:
    """Returns the backend sdpa; None, and says why, where it does not take the case."""
    from pagemill.attention.sdpa_backend import SdpaAttention

    if shape.format.name not in SDPA_FORMATS:
        return None
    heads = HeadShape(torch.bfloat16, shape.heads, shape.kv_heads, shape.head_dim)
    operator = working_operator(heads, torch.device(DEVICE))
    if isinstance(operator, str):
        print(operator)
        return None
    return SdpaAttention(operator, heads, triton, torch.cuda.get_device_capability())


def run(
    shape: Shape,
    ceilings: Ceilings,
    decode: list[tuple[int, int]],
    prefill: list[int],
    chunks: list[tuple[int, int]],
) -> list[Result]:
    from pagemill.attention.triton_backend import TritonAttention

    attention = TritonAttention(torch.cuda.get_device_capability())
    gathered = gathering(shape, attention)
    torch.cuda.empty_cache()
    room = torch.cuda.mem_get_info()[0] // 2 // shape.token_bytes
    cases = [
        *(("decode", rows, 1, context) for rows, context in decode if rows * context <= room),
        *(("prefill", 1, context, context) for context in prefill if context <= room),
        *((f"chunk of {queries}", 1, queries, context) for queries, context in chunks if context <= room),
    ]
    if not cases:
        raise SystemExit(f"half of the GPU's free memory holds {room} tokens, and no case has so few; free some memory")
    frames = max(rows * -(-context // BLOCK_SIZE) for _, rows, _, context in cases)
    cache = make_cache(shape, frames)
    scale = shape.head_dim**-0.5
    results = []
    for name, rows, queries, context in cases:
        batch = make_batch(shape, rows, queries, context, frames)
        query = torch.randn(rows * queries, shape.heads, shape.head_dim, device=DEVICE, dtype=torch.bfloat16)

        def ms_of(backend: AttentionBackend, query: torch.Tensor = query, batch: AttentionBatch = batch) -> float:
            def attend() -> object:
                return backend.attend(query, cache, batch, 0, scale=scale)

            return median_ms(captured(attend) if batch.max_query_len == 1 else attend)

        ms = ms_of(attention)
        if name == "decode":
            share = rows * shape.row_bytes(context) / ms * 1e3 / ceilings.copy_bytes_per_s
        else:
            pairs = queries * (context - queries) + queries * (queries + 1) // 2
            share = 4 * pairs * shape.heads * shape.head_dim / ms * 1e3 / ceilings.gemm_flop_per_s
        gathered_ms = None if gathered is None or name == "decode" else ms_of(gathered)
        others = sdpa_ms(shape, rows, queries, context), gathered_ms, flashinfer_ms(query, cache, batch, scale)
        results.append(Result(name, rows, context, ms, share, *others))
    return results


def table(results: list[Result]) -> str:
    heads = "| | batch | context | ms | share of peak | torch's SDPA, ms | backend sdpa, ms | FlashInfer, ms |"
    lines = [heads, "| --- " * 8 + "|"]
    for at in results:
        others = ("–" if ms is None else f"{ms:.3f}" for ms in (at.sdpa_ms, at.gathered_ms, at.flashinfer_ms))
        lines.append(f"| {at.name} | {at.batch} | {at.context} | {at.ms:.3f} | {at.share:.0%} | {' | '.join(others)} |")
    return "\n".join(lines)


def main() -> None:
    parser = parser_for(__doc__, "every second case")
    parser.add_argument("--caches", default="all", help="KV formats, commas between them (default: all)")
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)
    options = parser.parse_args()
    need_gpu(parser)
    step = 2 if options.quick else 1
    ceilings = measure_ceilings()
    print(heading(ceilings.both))
    results = {}
    for name in FORMATS if options.caches == "all" else options.caches.split(","):
        shape = Shape(options.heads, options.kv_heads, options.head_dim, kv_format(name))
        results[name] = run(shape, ceilings, DECODE[::step], PREFILL[::step], CHUNKS[::step])
        print(f"\n{name}: {shape.token_bytes} bytes per token\n\n{table(results[name])}", flush=True)
    keep(options.json, ceilings, results)


if __name__ == "__main__":
    main()
