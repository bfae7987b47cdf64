"""Times whole decode steps of a model of Llama 3 8B's shape with random weights on a GPU, beside their roofline.

    python -m benchmarks.gpu_decode [--quick] [--json FILE] [--expect TB_PER_S]

A step is the model's forward pass, logits and argmax, for one token of each row over contexts whose blocks of 16 lie
scattered over a pool. It runs in a CUDA graph, outside of one, and in a graph with torch's operators in the place of
Triton's; and by the engine, after it has computed as many prompts, where these have no more than 2**19 tokens.
The roofline: max(bytes of weights / speed of a copy, FLOP / speed of a matrix product) + bytes of K and V / speed of a
copy. Times are medians over 200 ms by `triton.testing.do_bench`; the engine's are by the host's clock. How busy the GPU
was in the engine is the share of time in which a kernel ran, in some more steps under torch's profiler. Cases
whose keys and values do not fit into the free memory are left out.

--expect needs no GPU: it prints what the step's bytes and launches take by the model, where a copy moves so many
terabytes per second and a launch in a graph takes a microsecond.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from benchmarks.on_gpu import Ceilings, captured, heading, keep, measure_ceilings, median_ms, need_gpu, parser_for
from benchmarks.random_engine import STEPS, EngineSteps, time_engine
from torch import Tensor

from pagemill.attention.interface import AttentionBatch, GroupBatch
from pagemill.executor.backend import Backend, select_backend
from pagemill.executor.device import CudaDevice
from pagemill.kvcache.device_pool import DevicePool
from pagemill.kvcache.kv_format import kv_format
from pagemill.kvcache.layout import FrameShape, block_major
from pagemill.models.decoder import Decoder, DecoderWeights, GatedMLP, LayerWeights
from pagemill.models.spec import DecoderSpec, LayerSpec, RopeSpec
from pagemill.ops.interface import Linear, Ops
from pagemill.ops.torch_ops import TorchOps

BLOCK_SIZE = 16
CASES = [(rows, context) for rows in (1, 32, 256) for context in (1024, 4096, 16384)]
LAUNCHES = 11
"""Launches of a layer: four products, two sums with norms, rotation, activation, writing, attending, merging."""
OTHER_LAUNCHES = 7
"""Launches of a step beside its layers: embedding, cosines, sines, first norm, head, widening, argmax."""
LAUNCH_S = 1e-6
ENGINE_TOKENS = 1 << 19

Step = Callable[[], object]
Milliseconds = Callable[[Step], float]


@dataclass(frozen=True)
class Sizes:
    vocab: int = 128256
    hidden: int = 4096
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    intermediate: int = 14336
    layers: int = 32
    itemsize: int = 2

    def spec(self) -> DecoderSpec:
        half = self.head_dim // 2
        rope = RopeSpec(tuple(500000.0 ** (-at / half) for at in range(half)))
        return DecoderSpec(
            family="llama", vocab_size=self.vocab, hidden_size=self.hidden, num_heads=self.heads,
            num_kv_heads=self.kv_heads, head_dim=self.head_dim, intermediate_size=self.intermediate,
            layers=(LayerSpec(None),) * self.layers, ropes=(rope,), norm_eps=1e-5, activation="silu",
            scale=self.head_dim**-0.5, max_position=131072,
        )  # fmt: skip

    @property
    def parameters(self) -> int:
        """Numbers that all products of one token take, the head's included."""
        return self.spec().products

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's K and V in all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * self.itemsize

    def roofline_s(self, rows: int, context: int, ceilings: Ceilings) -> float:
        weights_s = self.itemsize * self.parameters / ceilings.copy_bytes_per_s
        products_s = 2 * rows * self.parameters / ceilings.gemm_flop_per_s
        return max(weights_s, products_s) + rows * context * self.token_bytes / ceilings.copy_bytes_per_s

    def expected_s(self, rows: int, context: int, ceilings: Ceilings) -> float:
        """Returns the roofline, the launches, and the traffic of what lies between products, none of it in a cache."""
        wide = self.heads + 2 * self.kv_heads
        elements = 2 * 4 * self.hidden  # two sums with norms
        elements += (
            3 * wide + 2 * self.heads
        ) * self.head_dim  # of joined heads: out, turned, read; context in and out
        elements += 6 * self.intermediate  # gate and up out and in, their product out and in
        between = rows * self.layers * elements * self.itemsize + rows * self.vocab * 12
        launches = self.layers * LAUNCHES + OTHER_LAUNCHES
        return self.roofline_s(rows, context, ceilings) + between / ceilings.copy_bytes_per_s + launches * LAUNCH_S


@dataclass(frozen=True)
class Result:
    """Holds one case. ms: in a graph, where there are graphs; share: of the roofline. eager_ms: outside of a graph.
    torch_ms: as `ms`, with torch's operators. engine: the engine's steps; None for more than ENGINE_TOKENS."""

    rows: int
    context: int
    ms: float
    share: float
    eager_ms: float
    torch_ms: float
    engine: EngineSteps | None


def random_weights(spec: DecoderSpec, ops: Ops, dtype: torch.dtype, device: torch.device) -> DecoderWeights:
    def linear(inputs: int, outputs: int) -> Linear:
        return ops.pack_linear(torch.randn(outputs, inputs, dtype=dtype, device=device) * inputs**-0.5)

    def norm() -> Tensor:
        return torch.ones(spec.hidden_size, device=device)

    hidden, queries = spec.hidden_size, spec.num_heads * spec.head_dim
    layers = tuple(
        LayerWeights(
            input_norm=norm(),
            qkv=linear(hidden, queries + 2 * spec.num_kv_heads * spec.head_dim),
            o=linear(queries, hidden),
            pre_mlp_norm=norm(),
            mlp=GatedMLP(linear(hidden, 2 * spec.intermediate_size), linear(spec.intermediate_size, hidden)),
        )
        for _ in spec.layers
    )
    embedding = torch.randn(spec.vocab_size, hidden, dtype=dtype, device=device)
    return DecoderWeights(embedding, layers, norm(), linear(hidden, spec.vocab_size))


def decode_batch(rows: int, context: int, frames: int, device: torch.device) -> AttentionBatch:
    """Makes rows of one length, whose last token is computed, and whose blocks lie anywhere among the frames."""
    entries = -(-context // BLOCK_SIZE)
    tables = torch.randperm(frames, device=device)[: rows * entries].view(rows, entries)
    last = context - 1
    return AttentionBatch(
        query_start=torch.arange(rows + 1, dtype=torch.int32, device=device),
        context_lens=torch.full((rows,), context, dtype=torch.int32, device=device),
        positions=torch.full((rows,), last, device=device),
        groups=(GroupBatch(tables.int(), tables[:, last // BLOCK_SIZE] * BLOCK_SIZE + last % BLOCK_SIZE),),
        max_query_len=1,
        max_context_len=context,
    )


def decode_step(decoder: Decoder, batch: AttentionBatch, pool: DevicePool) -> Step:
    """Returns what runs a step, again and again over the same contexts."""
    token_ids = torch.arange(len(batch.positions), device=decoder.device) % decoder.spec.vocab_size

    def step() -> Tensor:
        return decoder.logits(decoder.forward(token_ids, batch, pool)).argmax(-1)

    return step


def run(
    sizes: Sizes,
    cases: Sequence[tuple[int, int]],
    ceilings: Ceilings,
    milliseconds: Milliseconds,
    *,
    dtype: torch.dtype,
    backend: Backend,
    steps: int = STEPS,
) -> list[Result]:
    """Runs all cases on one set of weights, and one pool for the largest. steps: of the engine."""
    ops, attention, device, spec = backend.ops, backend.attention, backend.device, sizes.spec()
    weights = random_weights(spec, ops, dtype, device)
    decoder = backend.decoder(spec, weights, ops, attention, dtype)
    by_torch = Decoder(spec, weights, TorchOps(), attention, dtype)
    for each in (decoder, by_torch):
        each.reach(max(context for _, context in cases))
    frames = max(rows * -(-context // BLOCK_SIZE) for rows, context in cases)
    format = kv_format(str(dtype).removeprefix("torch."))
    shape = FrameShape(decoder.groups, sizes.kv_heads, BLOCK_SIZE, sizes.head_dim, sizes.head_dim, format)
    pool = DevicePool(frames, shape, device, block_major)
    pool.storage.normal_()
    results = []
    for rows, context in cases:
        batch = decode_batch(rows, context, frames, device)
        step = decode_step(decoder, batch, pool)
        ms = milliseconds(captured(step))
        share = sizes.roofline_s(rows, context, ceilings) / ms * 1e3
        torch_ms = milliseconds(captured(decode_step(by_torch, batch, pool)))
        results.append(Result(rows, context, ms, share, milliseconds(step), torch_ms, None))
        print(f"{rows} rows of {context} tokens: {ms:.2f} ms, {share:.0%} of the roofline", file=sys.stderr, flush=True)
    del pool, step, batch  # the engine has a pool of its own
    accelerator = CudaDevice(device) if device.type == "cuda" else None
    for index, at in enumerate(results):
        if at.rows * at.context <= ENGINE_TOKENS:
            gc.collect()
            if accelerator is not None:
                torch.cuda.empty_cache()  # the engine asks the GPU what is free
            engine = time_engine(decoder, backend, accelerator, at.rows, at.context, steps=steps)
            results[index] = replace(at, engine=engine)
    return results


def table(results: list[Result]) -> str:
    lines = [
        "| rows | context | ms | of the roofline | without a graph, ms | torch's operators, ms | engine, ms | busy |",
        "| ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for at in results:
        engine = "–" if at.engine is None else f"{at.engine.ms:.2f}"
        busy = "–" if at.engine is None or at.engine.busy is None else f"{at.engine.busy.share:.0%}"
        beside = f"{at.eager_ms:.2f} | {at.torch_ms:.2f} | {engine} | {busy}"
        lines.append(f"| {at.rows} | {at.context} | {at.ms:.2f} | {at.share:.0%} | {beside} |")
    return "\n".join(lines)


def expectation(sizes: Sizes, cases: Sequence[tuple[int, int]], ceilings: Ceilings) -> str:
    lines = ["| rows | context | roofline, ms | modelled, ms | share |", "| ---: | ---: | ---: | ---: | ---: |"]
    for rows, context in cases:
        floor, expected = (part(rows, context, ceilings) for part in (sizes.roofline_s, sizes.expected_s))
        lines.append(f"| {rows} | {context} | {1e3 * floor:.2f} | {1e3 * expected:.2f} | {floor / expected:.0%} |")
    return "\n".join(lines)


def main() -> None:
    parser = parser_for(__doc__, "every second case")
    parser.add_argument("--expect", type=float, metavar="TB_PER_S", help="model the steps, and run nothing")
    options = parser.parse_args()
    sizes, cases = Sizes(), CASES[:: 2 if options.quick else 1]
    if options.expect is not None:
        bytes_per_s = options.expect * 1e12
        print(expectation(sizes, cases, Ceilings(bytes_per_s, 160 * bytes_per_s)))
        return
    need_gpu(parser)
    ceilings = measure_ceilings()
    torch.cuda.empty_cache()
    dtype = torch.bfloat16 if torch.cuda.get_device_capability() >= (8, 0) else torch.float16
    room = int(0.85 * torch.cuda.mem_get_info()[0]) - sizes.itemsize * (sizes.parameters + sizes.vocab * sizes.hidden)
    cases = [(rows, context) for rows, context in cases if rows * context * sizes.token_bytes <= room]
    if not cases:
        parser.error(f"the weights and one context take more than the {room / 1e9:.1f} GB that are free; free some")
    results = run(sizes, cases, ceilings, median_ms, dtype=dtype, backend=select_backend("cuda"))
    print(f"{heading(str(dtype), ceilings.both)}\n\n{table(results)}")
    modelled = [sizes.roofline_s(*case, ceilings) / sizes.expected_s(*case, ceilings) for case in cases]
    keep(options.json, ceilings, results, modelled_shares=modelled)


if __name__ == "__main__":
    main()
