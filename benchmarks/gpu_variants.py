"""Times decode steps of a model of Llama 3 8B's shape on a GPU, in a CUDA graph, with other products and launches.

    python -m benchmarks.gpu_variants [--cases 1x1024,32x4096] [--forms FILE] [--profile] [--json FILE]

Products are torch's (cuBLAS), or for few rows those of `ops/triton_linear.py`, whatever its limits say; kernels begin
as usual, or "early", while the one before ends (`ops/triton_early.py`). All variants have the same weights. Each one's
logits are compared with those of cuBLAS; an early begin must not change a bit.

--forms takes the best forms of a sweep, as `gpu_products --sweep --json FILE` has found them. --profile tells what each
kernel takes, and how long none runs.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from benchmarks.gpu_decode import BLOCK_SIZE, Sizes, decode_batch, random_weights
from benchmarks.gpu_forms import best_forms
from benchmarks.gpu_products import read
from benchmarks.on_gpu import Ceilings, capture, heading, keep, measure_ceilings, median_ms, need_gpu, parser_for
from torch import Tensor

from pagemill.attention.interface import AttentionBatch
from pagemill.attention.triton_backend import TritonAttention
from pagemill.executor.backend import Backend, select_backend
from pagemill.kvcache.device_pool import DevicePool
from pagemill.kvcache.kv_format import kv_format
from pagemill.kvcache.layout import FrameShape, block_major
from pagemill.models.decoder import Decoder
from pagemill.ops.torch_ops import TorchLinear
from pagemill.ops.triton_linear import Form, TritonLinear, forms_of
from pagemill.ops.triton_ops import TritonOps

CASES = ((1, 1024), (8, 1024), (32, 4096), (64, 1024))
PROFILED_STEPS = 3

Step = Callable[[], Tensor]


class FewRows(TritonOps):
    """Takes to Triton as many rows as there is a form for; none without forms."""

    def __init__(self, capability: tuple[int, int], forms: tuple[Form, ...], early: bool = False) -> None:
        super().__init__(capability, early)
        self.forms, self.early = forms, early

    def pack_linear(self, weight: Tensor, bias: Tensor | None = None, dtype: torch.dtype | None = None) -> TorchLinear:
        if not self.forms:
            return TorchLinear(weight, bias)
        return TritonLinear(weight, bias, self.forms, self.forms[-1].rows, self.early)


@dataclass(frozen=True)
class Result:
    """Holds one case of a variant. share: of the roofline. error: the largest difference of a logit from the first
    variant's, by the largest logit. same: the logits are, bit for bit, those of the variant before."""

    variant: str
    rows: int
    context: int
    ms: float
    share: float
    error: float
    same: bool


def variants_of(backend: Backend, capability: tuple[int, int], forms: tuple[Form, ...]) -> dict[str, Backend]:
    usual, early = TritonAttention(capability), TritonAttention(capability, early=True)
    return {
        "cuBLAS": backend._replace(ops=FewRows(capability, ()), attention=usual),
        "cuBLAS, others early": backend._replace(ops=FewRows(capability, (), early=True), attention=early),
        "Triton": backend._replace(ops=FewRows(capability, forms), attention=usual),
        "Triton, early": backend._replace(ops=FewRows(capability, forms, early=True), attention=early),
    }


def uncaptured(step: Step) -> tuple[Callable[[], object], Tensor]:
    return step, step()


def decode_step(decoder: Decoder, batch: AttentionBatch, pool: DevicePool) -> Step:
    token_ids = torch.arange(len(batch.positions), device=decoder.device) % decoder.spec.vocab_size
    return lambda: decoder.logits(decoder.forward(token_ids, batch, pool))


def run(
    sizes: Sizes,
    cases: Sequence[tuple[int, int]],
    ceilings: Ceilings,
    ms_of: Callable[[Callable[[], object]], float],
    variants: dict[str, Backend],
    dtype: torch.dtype,
    capture: Callable[[Step], tuple[Callable[[], object], Tensor]],
    watch: Callable[[Result, Callable[[], object]], None] | None = None,
) -> Iterator[Result]:
    """Runs all cases of all variants. watch: is given a result and what ran."""
    pool, batches, logits_of = None, {}, dict[tuple[int, int], list[Tensor]]()
    for name, backend in variants.items():
        torch.manual_seed(0)
        spec = sizes.spec()
        weights = random_weights(spec, backend.ops, dtype, backend.device)
        decoder = backend.decoder(spec, weights, backend.ops, backend.attention, dtype)
        decoder.reach(max(context for _, context in cases))
        if pool is None:
            frames = max(rows * -(-context // BLOCK_SIZE) for rows, context in cases)
            format = kv_format(str(dtype).removeprefix("torch."))
            shape = FrameShape(decoder.groups, sizes.kv_heads, BLOCK_SIZE, sizes.head_dim, sizes.head_dim, format)
            pool = DevicePool(frames, shape, backend.device, block_major)
            batches = {case: decode_batch(*case, frames, backend.device) for case in cases}
        for case in cases:
            torch.manual_seed(1)
            pool.storage.normal_()  # a case before has written to it
            replay, logits = capture(decode_step(decoder, batches[case], pool))
            ms = ms_of(replay)
            known = logits_of.setdefault(case, [])
            known.append(logits.clone())
            error = float((known[-1] - known[0]).abs().max() / known[0].abs().max())
            same = torch.equal(known[-1], known[-2 if len(known) > 1 else -1])
            share = sizes.roofline_s(*case, ceilings) / ms * 1e3
            result = Result(name, *case, ms, share, error, same)
            if watch is not None:
                watch(result, replay)
            yield result
        del decoder, weights, replay
        gc.collect()  # a graph holds its memory


def profile(replay: Callable[[], object]) -> str:
    """Returns a table of kernels: how many of a step, microseconds of one and of all; and how long none ran."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for _ in range(PROFILED_STEPS):
            replay()
        torch.cuda.synchronize()
    events = [at for at in profiler.events() if at.device_type == torch.autograd.DeviceType.CUDA]
    times = sorted((at.time_range.start, at.time_range.end) for at in events)
    return kernels_of([(at.name, at.time_range.end - at.time_range.start) for at in events], idle_us(times))


def idle_us(times: Sequence[tuple[float, float]]) -> float:
    """Returns for how long nothing runs between the first begin and the last end. times: in ascending order."""
    idle, end = 0.0, times[0][1]
    for begin, until in times:
        idle += max(0.0, begin - end)
        end = max(end, until)
    return idle


def kernels_of(events: Sequence[tuple[str, float]], idle: float) -> str:
    by_name: dict[str, list[float]] = {}
    for name, us in events:
        by_name.setdefault(name, []).append(us)
    lines = ["| kernel | of a step | µs of one | µs of all |", "| --- | ---: | ---: | ---: |"]
    for name, us in sorted(by_name.items(), key=lambda item: -sum(item[1])):
        count, total = len(us) / PROFILED_STEPS, sum(us) / PROFILED_STEPS
        lines.append(f"| {name[:70]} | {count:.0f} | {sum(us) / len(us):.2f} | {total:.0f} |")
    lines.append(f"| nothing | | | {idle / PROFILED_STEPS:.0f} |")
    return "\n".join(lines)


def table(results: Sequence[Result]) -> str:
    lines = ["| variant | rows | context | ms | share of the roofline | error | bits of the one before |"]
    lines += ["| --- | ---: | ---: | ---: | ---: | ---: | --- |"]
    lines += (
        f"| {at.variant} | {at.rows} | {at.context} | {at.ms:.3f} | {at.share:.0%} | {at.error:.1e} "
        f"| {'yes' if at.same else 'no'} |"
        for at in sorted(results, key=lambda at: (at.rows, at.context))
    )
    return "\n".join(lines)


def main() -> None:
    parser = parser_for(__doc__)
    parser.add_argument("--cases", help="rows and contexts, as in 1x1024,32x4096")
    parser.add_argument("--forms", type=Path, help="what a sweep has found")
    parser.add_argument("--profile", action="store_true", help="tell what each kernel takes")
    options = parser.parse_args()
    cases = CASES
    if options.cases:
        cases = tuple(tuple(int(part) for part in case.split("x")) for case in options.cases.split(","))
    need_gpu(parser)
    ceilings, capability = measure_ceilings(), torch.cuda.get_device_capability()
    torch.cuda.empty_cache()
    dtype = torch.bfloat16 if capability >= (8, 0) else torch.float16
    print(heading(str(dtype), ceilings.both), flush=True)

    def watch(result: Result, replay: Callable[[], object]) -> None:
        print(table([result]).splitlines()[-1], flush=True)
        if options.profile:
            print(f"\n{profile(replay)}\n", flush=True)

    forms = forms_of(capability) if options.forms is None else best_forms(read(options.forms))
    print(f"forms: {forms}", flush=True)
    variants = variants_of(select_backend("cuda"), capability, forms)
    results = list(run(Sizes(), cases, ceilings, median_ms, variants, dtype, capture, watch))
    print(f"\n{table(results)}")
    keep(options.json, ceilings, results)


if __name__ == "__main__":
    main()
