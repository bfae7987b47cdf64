"""Measures what paging costs attention and gives it: python -m benchmarks.paging [--gib 4] [--sections decode,shared].

decode: every row of a pool far larger than the caches takes a step; its K/V lie in one piece and are read without
    tables, or in frames that are neighbours, or in frames scattered at random. The same kernel reads all three.
shared: 64 rows over one prefix of 1,024 tokens, with 32 to 128 tokens of their own, attended once for all of them or
    row by row. The shared part's time is what is left without the time of the own tokens alone.
prefill: one row through tables, beside `scaled_dot_product_attention` on contiguous tensors.

What is compared takes turns, each figure is its shortest time, and the ceilings are measured before and after.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
from benchmarks.kernels import BLOCK_SIZE, paged
from benchmarks.peers.machine import describe_machine
from benchmarks.roofline import BUFFER_BYTES, GEMM_SIZE, best_s, products, read_rate
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from pagemill import _kernels
from pagemill.attention.cpu_backend import CpuAttention
from pagemill.attention.interface import AttentionBatch, GroupBatch, LayerCache
from pagemill.machine import usable_cores
from pagemill.ops.cpu_ops import DTYPES

SHAPES = ((9, 3, 64), (32, 8, 128))
SCALE = 0.1
CONTEXT = 2048


def shortest(calls: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Returns the seconds of each call, the shortest of several rounds in turns."""
    times = dict.fromkeys(calls, float("inf"))
    for i in range(rounds + 1):
        for name, call in calls.items():
            begin = time.perf_counter()
            call()
            if i:
                times[name] = min(times[name], time.perf_counter() - begin)
    return times


def without_tables(backend: CpuAttention, query: Tensor, cache: LayerCache, batch: AttentionBatch) -> Tensor:
    """Returns rows of equal context lengths whose frames follow each other from the pool's first on."""
    tokens, heads, _ = query.shape
    output = torch.empty_like(query)
    blocks = batch.groups[0].tables.shape[1]
    backend.native(cache).attend(
        query.data_ptr(), DTYPES[query.dtype], query.stride(0), query.stride(1), heads, output.data_ptr(), 0,
        0, blocks, batch.query_start.data_ptr(), batch.context_lens.data_ptr(), batch.positions.data_ptr(),
        0, 0, tokens, SCALE, 0, 0.0, 0, 0, 0, False,
    )  # fmt: skip
    return output


def with_tables(batch: AttentionBatch, tables: Tensor) -> AttentionBatch:
    return AttentionBatch(
        query_start=batch.query_start,
        context_lens=batch.context_lens,
        positions=batch.positions,
        groups=(GroupBatch(tables, batch.groups[0].slots),),
        max_query_len=batch.max_query_len,
        max_context_len=batch.max_context_len,
    )


def decode(dtype: torch.dtype, shape: tuple[int, int, int], gib: float, rounds: int) -> dict[str, float]:
    heads, kv_heads, head_dim = shape
    rows = int(gib * 2**30) // (CONTEXT * 2 * kv_heads * head_dim * dtype.itemsize)
    pool, batch = paged([(CONTEXT, 1)] * rows, kv_heads, head_dim, dtype, scatter=False)
    tables = batch.groups[0].tables
    scattered = with_tables(batch, torch.randperm(tables.numel()).int().view_as(tables))
    query, cache, backend = torch.randn(rows, heads, head_dim).to(dtype), pool.layer(0), CpuAttention()
    taken = shortest(
        {
            "contiguous": lambda: without_tables(backend, query, cache, batch),
            "neighbouring": lambda: backend.attend(query, cache, batch, 0, scale=SCALE),
            "scattered": lambda: backend.attend(query, cache, scattered, 0, scale=SCALE),
        },
        rounds,
    )
    return taken | {"bytes": rows * CONTEXT * 2 * kv_heads * head_dim * dtype.itemsize}


def shared(dtype: torch.dtype, shape: tuple[int, int, int], rounds: int) -> dict[str, float]:
    heads, kv_heads, head_dim = shape
    own = [32 + 96 * i // 63 for i in range(64)]
    pool, batch = paged([(1024 + count, 1) for count in own], kv_heads, head_dim, dtype, scatter=True)
    tables = batch.groups[0].tables
    tables[:, : 1024 // BLOCK_SIZE] = tables[0, : 1024 // BLOCK_SIZE].clone()
    rest, rest_batch = paged([(count, 1) for count in own], kv_heads, head_dim, dtype, scatter=True)
    query = torch.randn(64, heads, head_dim).to(dtype)
    together, apart = CpuAttention(), CpuAttention(share_prefixes=False)
    taken = shortest(
        {
            "once": lambda: together.attend(query, pool.layer(0), batch, 0, scale=SCALE),
            "by row": lambda: apart.attend(query, pool.layer(0), batch, 0, scale=SCALE),
            "own": lambda: together.attend(query, rest.layer(0), rest_batch, 0, scale=SCALE),
        },
        10 * rounds,
    )
    return taken | {"flop": 4 * heads * head_dim * 1024 * 64}


def prefill(dtype: torch.dtype, shape: tuple[int, int, int], tokens: int, rounds: int) -> dict[str, float]:
    heads, kv_heads, head_dim = shape
    pool, batch = paged([(tokens, tokens)], kv_heads, head_dim, dtype, scatter=True)
    query, backend = torch.randn(tokens, heads, head_dim).to(dtype), CpuAttention()
    q = query.transpose(0, 1).unsqueeze(0).contiguous()
    k, v = torch.randn(2, 1, kv_heads, tokens, head_dim).to(dtype)
    taken = shortest(
        {
            "pagemill": lambda: backend.attend(query, pool.layer(0), batch, 0, scale=SCALE),
            "sdpa": lambda: scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True),
        },
        rounds,
    )
    return taken | {"flop": 2 * heads * head_dim * tokens * (tokens + 1)}


class Ceilings:
    """Returns the best of all that was measured so far."""

    def __init__(self) -> None:
        self.read = 0.0
        self.gemm = dict.fromkeys((torch.float32, torch.bfloat16), 0.0)
        self.measure()

    def measure(self) -> None:
        self.read = max(self.read, read_rate(BUFFER_BYTES))
        a, b = torch.randn(2, GEMM_SIZE, GEMM_SIZE)
        for dtype, rate in self.gemm.items():
            best = min(map(best_s, products(a.to(dtype), b.to(dtype))))
            self.gemm[dtype] = max(rate, 2 * GEMM_SIZE**3 / best)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gib", type=float, default=4, help="size of decode's pool; 8 times the last-level cache")
    parser.add_argument("--sections", default="decode,shared,prefill")
    parser.add_argument("--tokens", default="2048,8192", help="of prefill; 32768 takes a minute with 9 heads of 64")
    parser.add_argument("--head-sizes", default="64,128")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=usable_cores())
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(options.threads)
    _kernels.set_num_threads(options.threads)
    print(describe_machine(), f"{options.threads} threads, kernels {_kernels.isa()}, torch {torch.__version__}")
    ceilings = Ceilings()
    sections = options.sections.split(",")
    head_sizes = set(map(int, options.head_sizes.split(",")))
    cases = [(dtype, shape) for dtype in ceilings.gemm for shape in SHAPES if shape[2] in head_sizes]
    lines: list[tuple[str, Callable[[], str], str]] = []

    def add(name: str, measured: Callable[[], str], goal: str) -> None:
        lines.append((name, measured, goal))

    for dtype, shape in cases:
        label = f"{str(dtype)[6:]} {shape[0]}/{shape[1]}x{shape[2]}"
        peak = "fp32" if dtype == torch.float32 else "bf16"
        if "decode" in sections:
            t = decode(dtype, shape, options.gib, options.rounds)
            name = f"decode, {options.gib:g} GiB, {label}"
            for kind, goal in (("neighbouring", "<= 1.02"), ("scattered", "<= 1.10")):
                add(
                    f"{name}: {kind} frames / no tables",
                    lambda t=t, kind=kind: f"{t[kind] / t['contiguous']:.3f}",
                    goal,
                )
            add(
                f"{name}: neighbouring frames, of read bandwidth",
                lambda t=t: f"{t['bytes'] / t['neighbouring'] / ceilings.read:.0%}",
                ">= 85%",
            )
        if "shared" in sections:
            t = shared(dtype, shape, options.rounds)
            add(f"shared prefix, {label}: by row / once", lambda t=t: f"{t['by row'] / t['once']:.2f}", ">= 1.5")
            add(
                f"shared prefix, {label}: shared part, of {peak} GEMM",
                lambda t=t, dtype=dtype: f"{t['flop'] / (t['once'] - t['own']) / ceilings.gemm[dtype]:.0%}",
                ">= 60%",
            )
        if "prefill" in sections:
            for tokens in map(int, options.tokens.split(",")):
                t = prefill(dtype, shape, tokens, options.rounds)
                add(
                    f"prefill {tokens}, {label}: of {peak} GEMM",
                    lambda t=t, dtype=dtype: f"{t['flop'] / t['pagemill'] / ceilings.gemm[dtype]:.0%}",
                    ">= 60%" if dtype == torch.float32 else ">= 45%",
                )
                add(
                    f"prefill {tokens}, {label}: sdpa / pagemill", lambda t=t: f"{t['sdpa'] / t['pagemill']:.2f}", "> 1"
                )
    ceilings.measure()
    fp32, bf16 = (ceilings.gemm[dtype] / 1e9 for dtype in (torch.float32, torch.bfloat16))
    print(f"ceilings: reading {ceilings.read / 1e9:.1f} GB/s; GEMM {fp32:.0f} GFLOP/s fp32, {bf16:.0f} bf16\n")
    print(f"{'':68} {'measured':>9} {'goal':>8}")
    for name, measured, goal in lines:
        print(f"{name:68} {measured():>9} {goal:>8}")


if __name__ == "__main__":
    main()
