"""Times the CPU kernels beside torch's in the same run: python benchmarks/kernels.py [--threads N] [--quick].

Linear layers are compared with `torch.nn.functional.linear` and with oneDNN on weights packed for the batch; attention
with `scaled_dot_product_attention` on contiguous keys and values. Every figure is a median, of wall times, or on one
thread of that thread's CPU times, which a busy machine disturbs less. The ceilings are this machine's own, taken in the
same run: the best product of large square matrices, and a pass over a large buffer.
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import linear, scaled_dot_product_attention

from pagemill import _kernels
from pagemill.attention.cpu_backend import CpuAttention
from pagemill.attention.interface import AttentionBatch, GroupBatch
from pagemill.kvcache.device_pool import DevicePool
from pagemill.kvcache.kv_format import kv_format
from pagemill.kvcache.layer_groups import group_layers
from pagemill.kvcache.layout import FrameShape
from pagemill.machine import usable_cores
from pagemill.ops.cpu_ops import CpuOps
from pagemill.ops.quantized import keep_integers, quantize_int8

BLOCK_SIZE = 16


def seconds(call: Callable[[], object], budget: float) -> float:
    """Returns the median time of one call, over seven samples that take `budget` seconds together."""
    clock = time.thread_time if _kernels.num_threads() == 1 else time.perf_counter
    call()
    begin = clock()
    call()
    repeats = max(1, int(budget / 7 / max(clock() - begin, 1e-7)))
    samples = []
    for _ in range(7):
        begin = clock()
        for _ in range(repeats):
            call()
        samples.append((clock() - begin) / repeats)
    return statistics.median(samples)


def cpu_name() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    fields = dict(line.split(":", 1) for line in lines if ":" in line)
    return next((value.strip() for key, value in fields.items() if key.strip() == "model name"), "unknown")


def ceilings(budget: float) -> tuple[dict[torch.dtype, float], float]:
    """Returns GFLOP/s of the best large product, by oneDNN or an own kernel, by dtype; and GB/s of reading 512 MiB."""
    size = 2048
    peaks = {}
    for dtype in (torch.float32, torch.bfloat16):
        a, b = torch.randn(size, size).to(dtype), torch.randn(size, size).to(dtype)
        onednn, own = packed_by_onednn(b, size), CpuOps().pack_linear(b)
        best = min(seconds(lambda a=a, call=call: call(a), budget) for call in (onednn, own))
        peaks[dtype] = 2 * size**3 / best / 1e9
    buffer = torch.ones(1 << 27)
    return peaks, buffer.nbytes / seconds(lambda: buffer.sum(), budget) / 1e9


def bf16_isas() -> list[str]:
    """Returns the chosen instruction set, and those of this CPU that multiply bf16 as it is."""
    return [_kernels.isa(), *(i for i in _kernels.available_isas() if i.endswith("bf16") and i != _kernels.isa())]


def packed_by_onednn(weight: Tensor, rows: int) -> Callable[[Tensor], Tensor]:
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, rows)  # noqa: SLF001
    return lambda x: torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], "")  # noqa: SLF001


def bench_linear(budget: float, peaks: dict[torch.dtype, float], bandwidth: float, quick: bool) -> None:
    print(
        f"\n{'linear':42} {'us':>9} {'GFLOP/s':>8} {'of peak':>8} {'GB/s':>6} {'of read':>8} "
        f"{'F.linear':>9} {'oneDNN':>7}"
    )
    chosen = _kernels.isa()
    for dtype in (torch.float32, torch.bfloat16):
        isas = bf16_isas() if dtype == torch.bfloat16 else [chosen]
        for n, k in ((1536, 576), (576, 1536), (4096, 4096)):
            weight = torch.randn(n, k).to(dtype)
            owns = {}
            for isa in isas:
                _kernels.use_isa(isa)
                owns[isa] = CpuOps().pack_linear(weight)
            for rows in (1, 16, 256) if quick else (1, 2, 4, 8, 16, 32, 64, 128, 256, 512):
                x = torch.randn(rows, k).to(dtype)
                plain = seconds(lambda x=x, w=weight: linear(x, w), budget)
                onednn = packed_by_onednn(weight, rows)
                library = seconds(lambda onednn=onednn, x=x: onednn(x), budget)
                for isa, own in owns.items():
                    taken = seconds(lambda own=own, x=x: own(x), budget)
                    flops, rate = 2 * rows * n * k / taken / 1e9, weight.nbytes / taken / 1e9
                    name = f"{isa} {str(dtype)[6:]} {n}x{k} rows {rows}"
                    print(
                        f"{name:42} {taken * 1e6:9.1f} {flops:8.1f} {flops / peaks[dtype]:8.0%} {rate:6.1f} "
                        f"{rate / bandwidth:8.0%} {plain / taken:8.2f}x {library / taken:6.2f}x",
                        flush=True,
                    )
    _kernels.use_isa(chosen)


def dynamic_linear(weight: Tensor, library: str) -> Callable[[Tensor], Tensor]:
    """Returns torch's linear layer with 8-bit weights per row; it quantizes x as a whole when it arrives."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecated, and the only way to these libraries' products
        scales = weight.abs().amax(1).double() / 127
        zeros = torch.zeros(len(weight), dtype=torch.int64)
        quantized = torch.quantize_per_channel(weight, scales, zeros, 0, torch.qint8)
    engine, torch.backends.quantized.engine = torch.backends.quantized.engine, library
    packed = torch.ops.quantized.linear_prepack(quantized, None)
    torch.backends.quantized.engine = engine
    return lambda x: torch.ops.quantized.linear_dynamic(x, packed, True)


def bench_quantized(budget: float, bandwidth: float, quick: bool) -> None:
    """Times linear layers on integers: 4 and 8 bits beside torch's dynamically quantized weights and our own bf16."""
    libraries = [name for name in torch.backends.quantized.supported_engines if name in ("fbgemm", "onednn")]
    print(
        f"\n{'quantized linear':28} {'us':>9} {'GOP/s':>8} {'GB/s':>6} {'of read':>8} "
        + " ".join(f"{name:>8}" for name in libraries)
        + f" {'our bf16':>9}"
    )
    ops = CpuOps()
    for n, k in ((1536, 576), (576, 1536), (4096, 4096)):
        weight = torch.randn(n, k)
        values = torch.randint(0, 16, (n, k), dtype=torch.uint8)
        scale = torch.rand(n, k // 32)
        bits4 = ops.pack_quantized(keep_integers(values, scale, -8 * scale, 4), None, torch.float32)
        bits8 = ops.pack_quantized(quantize_int8(weight), None, torch.float32)
        half = ops.pack_linear(weight.bfloat16())
        others = [dynamic_linear(weight, name) for name in libraries]
        for rows in (1, 16, 256) if quick else (1, 2, 8, 16, 64, 256, 512):
            x = torch.randn(rows, k)
            times = [seconds(lambda x=x, other=other: other(x), budget) for other in others]
            narrow = x.bfloat16()
            times.append(seconds(lambda x=narrow, half=half: half(x), budget))
            for bits, own in ((4, bits4), (8, bits8)):
                taken = seconds(lambda own=own, x=x: own(x), budget)
                rate = own.nbytes / taken / 1e9
                print(
                    f"{f'{bits} bits {n}x{k} rows {rows}':28} {taken * 1e6:9.1f} {2 * rows * n * k / taken / 1e9:8.1f} "
                    f"{rate:6.1f} {rate / bandwidth:8.0%} " + " ".join(f"{time / taken:7.2f}x" for time in times),
                    flush=True,
                )


def paged(rows: list[tuple[int, int]], kv_heads: int, head_dim: int, dtype: torch.dtype, scatter: bool) -> tuple:
    """Returns a pool filled with random keys and values, and a batch of rows (context length, query length)."""
    held = [-(-context // BLOCK_SIZE) for context, _ in rows]
    groups, format = group_layers([None]), kv_format(str(dtype))
    pool = DevicePool(sum(held), FrameShape(groups, kv_heads, BLOCK_SIZE, head_dim, head_dim, format))
    values = torch.randn(pool.layout.frame_stride)
    if dtype == torch.int8:
        values = (values * 40).clamp(-127, 127)
    pool.storage.view(-1, pool.layout.frame_stride).copy_(values.to(dtype))
    for scale in pool.layer(0)[2:]:
        if scale is not None:
            scale.fill_(1 / 40)
    frames = (torch.randperm(sum(held)) if scatter else torch.arange(sum(held))).int()
    tables = torch.full((len(rows), max(held)), -1, dtype=torch.int32)
    for row, part in enumerate(frames.split(held)):
        tables[row, : len(part)] = part
    lengths = torch.tensor([0, *(length for _, length in rows)])
    positions = torch.cat([torch.arange(context - length, context) for context, length in rows])
    return pool, AttentionBatch(
        query_start=lengths.cumsum(0).int(),
        context_lens=torch.tensor([context for context, _ in rows], dtype=torch.int32),
        positions=positions,
        groups=(GroupBatch(tables, torch.empty(0, dtype=torch.int64)),),
        max_query_len=max(length for _, length in rows),
        max_context_len=max(context for context, _ in rows),
    )


def bench_attention(budget: float, peak: float, bandwidth: float, quick: bool) -> None:
    print(f"\n{'attention':44} {'us':>9} {'GFLOP/s':>8} {'of peak':>8} {'GB/s':>6} {'of read':>8} {'sdpa':>6}")
    backend = CpuAttention()
    steps = {
        "prefill 2048": [(2048, 2048)],
        "prefill 512": [(512, 512)],
        "chunk 256 at 4096": [(4096, 256)],
        "decode 64 x 1024": [(1024, 1)] * 64,
        "decode 1 x 16384": [(16384, 1)],
    }
    for dtype in (torch.float32, torch.bfloat16):
        for heads, kv_heads, head_dim in ((9, 3, 64), (32, 8, 128)):
            for name, rows in list(steps.items())[:: 3 if quick else 1]:
                for scatter in (False, True) if "decode" in name else (False,):
                    pool, batch = paged(rows, kv_heads, head_dim, dtype, scatter)
                    query = torch.randn(len(batch.positions), heads, head_dim).to(dtype)
                    cache = pool.layer(0)
                    taken = seconds(lambda q=query, c=cache, b=batch: backend.attend(q, c, b, 0, scale=0.1), budget)
                    work = 4 * heads * head_dim * int((batch.positions + 1).sum())
                    read = sum(context for context, _ in rows) * 2 * kv_heads * head_dim * dtype.itemsize
                    flops, rate = work / taken / 1e9, read / taken / 1e9
                    ratio = ""
                    if rows[0][0] == rows[0][1]:
                        q = query.transpose(0, 1).unsqueeze(0).contiguous()
                        kv = torch.randn(1, kv_heads, rows[0][0], head_dim).to(dtype)
                        other = seconds(
                            lambda q=q, kv=kv: scaled_dot_product_attention(q, kv, kv, is_causal=True, enable_gqa=True),
                            budget,
                        )
                        ratio = f"{other / taken:5.2f}x"
                    label = f"{str(dtype)[6:]} {heads}/{kv_heads}x{head_dim} {name}{' scattered' if scatter else ''}"
                    print(
                        f"{label:44} {taken * 1e6:9.0f} {flops:8.1f} {flops / peak:8.0%} {rate:6.1f} "
                        f"{rate / bandwidth:8.0%} {ratio:>6}",
                        flush=True,
                    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=usable_cores())
    parser.add_argument("--quick", action="store_true", help="fewer shapes, shorter samples")
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(options.threads)
    _kernels.set_num_threads(options.threads)
    budget = 0.05 if options.quick else 0.3
    peaks, bandwidth = ceilings(budget)
    print(f"{cpu_name()}, {options.threads} threads, kernels {_kernels.isa()}, torch {torch.__version__}")
    print(
        f"ceilings: {peaks[torch.float32]:.0f} GFLOP/s fp32, {peaks[torch.bfloat16]:.0f} bf16, {bandwidth:.1f} GB/s; "
        f"attention's share is of fp32's; columns F.linear, oneDNN, sdpa: their time over ours"
    )
    bench_linear(budget, peaks, bandwidth, options.quick)
    bench_quantized(budget, bandwidth, options.quick)
    bench_attention(budget, peaks[torch.float32], bandwidth, options.quick)


if __name__ == "__main__":
    main()
