"""Measures this machine's ceilings, states each workload's floor under them, and pagemill's share of that floor.

    python -m benchmarks.roofline [--dtype float32] [--quantization gguf] [--kv-cache-dtype int8]
                                  [--workloads one,two,mixed] [--rounds 3] [--model PATH] [--json FILE]

Floor of a workload: the sum over the steps that the engine ran of max(weight bytes / read bandwidth, FLOP / GEMM rate)
+ distinct attended K/V bytes / read bandwidth. FLOP counts the layers for every token, the head for rows that are
sampled, and attention; each at its own rate: of a quantized model, layers at that of int8 products, attention at the
rate of the dtype of its queries. The last column counts attention at the layers' rate too. Weights count once per step,
with the bytes of the dtype that is computed in, quantized ones as they are held; a K/V block that several sequences
attend counts once. A float32 model may hold what is stored in 16 bits, or in a GGUF file's integers, as it is stored,
and tiles hold bf16 in 12 bits; they then read less than that: the share "of held" is of the floor with the bytes that
are held.
Ceilings are the best samples just before and just after each run, by the best library at hand, since a shared host
reads twice as fast in some minutes as in others. Weights are held against the faster of two rates, of a buffer far
larger than the caches and of one as large as the weights, which a cache that other machines share may partly keep.

A second table says where the measured time went: the decoder's operators, the head, the sampler, and the engine itself.
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import torch
from benchmarks.engine_overhead import timed
from benchmarks.kernels import packed_by_onednn
from benchmarks.peers.adapters.pagemill_engine import Engine
from benchmarks.peers.child import measure
from benchmarks.peers.engines import MODEL
from benchmarks.peers.machine import describe_machine, heading
from benchmarks.peers.workloads import STANDARD, Workload, make, tokenize
from numpy.typing import NDArray

from pagemill.engine.core import EngineCore
from pagemill.hub import resolve_model
from pagemill.machine import usable_cores
from pagemill.models.cpu_decoder import CpuDecoder
from pagemill.models.decoder import Decoder, Experts
from pagemill.ops.cpu_ops import CpuLinear, CpuOps
from pagemill.scheduling.step_plan import StepPlan, StepResult

GEMM_SIZE = 2048
BUFFER_BYTES = 1 << 30
SAMPLES = 6


@dataclass(frozen=True)
class Ceilings:
    """Holds the machine's ceilings.

    read_bytes_per_s:   of a buffer far larger than the caches.
    gemm_flop_per_s:    by dtype, 2048 x 2048 x 2048.
    weight_bytes_per_s: of a buffer as large as the weights, read again and again; never below read_bytes_per_s.
    """

    read_bytes_per_s: float
    weight_bytes_per_s: float
    gemm_flop_per_s: dict[str, float]

    def best(self, other: Ceilings) -> Ceilings:
        rates = {name: max(rate, other.gemm_flop_per_s[name]) for name, rate in self.gemm_flop_per_s.items()}
        return Ceilings(
            max(self.read_bytes_per_s, other.read_bytes_per_s),
            max(self.weight_bytes_per_s, other.weight_bytes_per_s),
            rates,
        )


@dataclass(frozen=True)
class Step:
    """Counts a step's work. attended: (query token, key) pairs; kv_tokens: distinct keys; both summed over layers."""

    tokens: int
    logits: int
    attended: int
    kv_tokens: int


class Arithmetic(NamedTuple):
    """Names what the layers' products and attention's are computed in."""

    layers: str
    attention: str


@dataclass(frozen=True)
class Run:
    """Holds what one run of a workload took, its steps, and the ceilings around it."""

    wall_s: float
    steps: list[Step]
    tokens: int
    parts: dict[str, float]
    ceilings: Ceilings

    def share(self, model: Model, arithmetic: Arithmetic) -> float:
        return self.floor_s(model, arithmetic) / self.wall_s

    def floor_s(self, model: Model, arithmetic: Arithmetic) -> float:
        return sum(model.floor_s(step, self.ceilings, arithmetic) for step in self.steps)


@dataclass(frozen=True)
class Model:
    """Sizes that the floor is computed from."""

    layer_parameters: int
    """For the linear layers of all decoder layers."""
    layer_bytes: int
    head_parameters: int
    head_bytes: int
    flop_per_pair: int
    """For one layer's attention, one query token and one key."""
    kv_bytes_per_token: int
    """For one layer."""

    @classmethod
    def of(cls, decoder: Decoder, kv: torch.dtype, held: bool) -> Model:
        """Counts a model's bytes. held: as the engine holds them, scales of quantized weights too; else by dtype."""
        spec = decoder.spec
        linears: list[CpuLinear] = []
        for layer in decoder.weights.layers:
            if isinstance(layer.mlp, Experts):
                raise ValueError("the floor of a mixture of experts depends on which experts each step uses")
            linears += [layer.qkv, layer.o, layer.mlp.gate_up, layer.mlp.down]
        head = decoder.weights.lm_head

        def parameters(linear: CpuLinear) -> int:
            return linear.out_features * linear.in_features

        def nbytes(linear: CpuLinear) -> int:
            return linear.nbytes if held else parameters(linear) * decoder.dtype.itemsize

        return cls(
            layer_parameters=sum(map(parameters, linears)),
            layer_bytes=sum(map(nbytes, linears)),
            head_parameters=parameters(head),
            head_bytes=nbytes(head),
            flop_per_pair=4 * spec.num_heads * spec.head_dim,
            kv_bytes_per_token=2 * spec.num_kv_heads * spec.head_dim * kv.itemsize,
        )

    def floor_s(self, step: Step, ceilings: Ceilings, arithmetic: Arithmetic) -> float:
        weights_s = (self.layer_bytes + (step.logits > 0) * self.head_bytes) / ceilings.weight_bytes_per_s
        kv_s = step.kv_tokens * self.kv_bytes_per_token / ceilings.read_bytes_per_s
        rates = ceilings.gemm_flop_per_s
        products_s = self.products(step) / rates[arithmetic.layers]
        return max(weights_s, products_s + step.attended * self.flop_per_pair / rates[arithmetic.attention]) + kv_s

    def products(self, step: Step) -> int:
        return 2 * (step.tokens * self.layer_parameters + step.logits * self.head_parameters)

    def flop(self, step: Step) -> int:
        return self.products(step) + step.attended * self.flop_per_pair


def measure_ceilings(weight_bytes: int) -> Ceilings:
    a, b = torch.randn(GEMM_SIZE, GEMM_SIZE), torch.randn(GEMM_SIZE, GEMM_SIZE)
    read = read_rate(BUFFER_BYTES)
    weights = max(read, read_rate(weight_bytes))
    rates = {
        "float32": products(a, b),
        "bfloat16": products(a.bfloat16(), b.bfloat16()),
        "int8": int8_products(a, b),
    }
    flop = 2 * GEMM_SIZE**3
    return Ceilings(read, weights, {name: flop / min(map(best_s, calls)) for name, calls in rates.items()})


def read_rate(num_bytes: int) -> float:
    """Returns the bytes per second of reading a buffer by the fastest call: one stream per thread, or several."""
    columns = 1 << 14
    whole = torch.ones(max(1, num_bytes // (4 * columns)), columns)
    ones = torch.ones(columns)
    flat = whole.view(-1)
    calls: list[Callable[[], object]] = [flat.sum, flat.amax, lambda: flat.dot(flat), lambda: whole.mv(ones)]
    return whole.nbytes / min(map(best_s, calls))


def products(a: torch.Tensor, b: torch.Tensor) -> list[Callable[[], object]]:
    """Returns calls of the same product by torch, by oneDNN on packed weights, and by pagemill."""
    onednn, own = packed_by_onednn(b, GEMM_SIZE), CpuOps().pack_linear(b)
    return [
        lambda: torch.nn.functional.linear(a, b),
        lambda: onednn(a),
        lambda: own(a),
    ]


def int8_products(a: torch.Tensor, b: torch.Tensor) -> list[Callable[[], object]]:
    """Integers only, and torch's dynamically quantized linear layer by each of its libraries."""
    ints = [torch.randint(-127, 128, (GEMM_SIZE, GEMM_SIZE), dtype=torch.int8) for _ in range(2)]
    calls: list[Callable[[], object]] = [lambda: torch._int_mm(*ints)]  # noqa: SLF001
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecated, and the only way to these libraries' products
        weight = torch.quantize_per_tensor(b, 0.05, 0, torch.qint8)
    engine = torch.backends.quantized.engine
    for library in torch.backends.quantized.supported_engines:
        if library in ("fbgemm", "onednn"):
            torch.backends.quantized.engine = library
            packed = torch.ops.quantized.linear_prepack(weight, None)
            calls.append(lambda packed=packed: torch.ops.quantized.linear_dynamic(a, packed, True))
    torch.backends.quantized.engine = engine
    return calls


def best_s(call: Callable[[], object]) -> float:
    """Returns the shortest of several calls: whatever else runs on the machine can only lengthen one."""
    call()
    times = []
    for _ in range(SAMPLES):
        begin = time.perf_counter()
        call()
        times.append(time.perf_counter() - begin)
    return min(times)


class Planned(NamedTuple):
    """Copies what a step's work is counted from, after the run: counting takes as long as a short step."""

    starts: NDArray[Any]
    query_lens: NDArray[Any]
    sample_from: NDArray[Any]
    tables: list[NDArray[np.int32]]
    """The rows' block tables, an array for each layer group."""


class Recorder:
    """Notes the plan of every step that an engine runs, how long its parts and the noting took."""

    def __init__(self, core: EngineCore) -> None:
        self._plans: list[Planned] = []
        self.spent_s = 0.0
        self._parts: dict[str, float] = defaultdict(float)
        self._decoder = core.executor.decoder
        timed(self._decoder, "forward", "layers", self._parts)
        timed(self._decoder, "logits", "head", self._parts)
        timed(self._decoder, "argmax", "head", self._parts)
        timed(core.executor.sampler, "sample", "sampler", self._parts)
        self._tables, self._block_size = core.executor.rows.tables, core.config.block_size
        self._groups = core.executor.decoder.groups
        self._num_frames = core.ready.num_frames
        self._run = core.executor.run
        core.executor.run = self.run  # type: ignore[method-assign]

    def reset(self) -> None:
        self._plans, self.spent_s = [], 0.0
        self._parts.clear()
        self._operators = self._operator_seconds()

    def parts(self, wall_s: float) -> dict[str, float]:
        """Returns the seconds since the reset by part; together they are `wall_s`.

        The decoder's operators by name where it runs as one call, "layers" what else there is of it; "engine": all that
        is neither the model nor the sampler.
        """
        found = {name: total - self._operators[name] for name, total in self._operator_seconds().items()}
        layers = self._parts["layers"] - sum(found.values())
        found |= {"layers": layers, "head": self._parts["head"], "sampler": self._parts["sampler"]}
        return found | {"engine": wall_s - sum(found.values())}

    def _operator_seconds(self) -> dict[str, float]:
        return dict(self._decoder.operator_seconds()) if isinstance(self._decoder, CpuDecoder) else {}

    def run(self, plan: StepPlan) -> StepResult:
        begin = time.perf_counter()
        tables = [of_group[plan.rows] for of_group in self._tables]
        self._plans.append(Planned(plan.starts.copy(), plan.query_lens.copy(), plan.sample_from.copy(), tables))
        self.spent_s += time.perf_counter() - begin
        return self._run(plan)

    def steps(self) -> list[Step]:
        return [self._count(planned) for planned in self._plans]

    def _count(self, planned: Planned) -> Step:
        attended = kv_tokens = 0
        for layers, tables in zip(self._groups.groups, planned.tables, strict=True):
            attended += len(layers.layers) * count_pairs(planned, layers.window)
            kv_tokens += len(layers.layers) * self._distinct(tables, planned, layers.window)
        return Step(int(planned.query_lens.sum()), len(np.unique(planned.sample_from)), attended, kv_tokens)

    def _distinct(self, tables: NDArray[np.int32], plan: Planned, window: int | None) -> int:
        """Counts the tokens whose K/V the step attends in one layer, each slot once however many rows see it."""
        size = self._block_size
        ends = plan.starts + plan.query_lens
        begins = np.zeros_like(ends) if window is None else np.maximum(0, plan.starts + 1 - window)
        entries = np.arange(-(-int(ends.max()) // size)) * size
        used = np.minimum(ends[:, None] - entries, size)
        seen = (used > 0) & (entries + size > begins[:, None])
        most = np.zeros(self._num_frames, dtype=np.int64)
        np.maximum.at(most, tables[:, : len(entries)][seen], used[seen])
        return int(most.sum())


def count_pairs(plan: Planned, window: int | None) -> int:
    """Returns the number of (query token, key) pairs of one layer."""
    total = 0
    for start, length in zip(plan.starts.tolist(), plan.query_lens.tolist(), strict=True):
        keys = np.arange(start + 1, start + length + 1)
        total += int((keys if window is None else np.minimum(keys, window)).sum())
    return total


def run_workload(engine: Engine, recorder: Recorder, workload: Workload) -> tuple[float, list[Step]]:
    """Returns the seconds without the recorder's own, and the steps."""
    recorder.reset()
    begin = time.perf_counter()
    requests = measure(engine, asdict(workload))
    wall = time.perf_counter() - begin - recorder.spent_s
    got = [int(request["tokens"]) for request in requests]
    if got != workload.max_tokens:
        raise RuntimeError(f"{workload.name}: requests got {got} tokens instead of {workload.max_tokens}")
    return wall, recorder.steps()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--quantization", choices=["gguf", "int8"])
    parser.add_argument("--kv-cache-dtype", default="auto", choices=["auto", "int8"])
    parser.add_argument("--workloads", default=",".join(STANDARD))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--model", default=MODEL, help="with the tokenizer of the default")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    arguments = parser.parse_args()
    torch.set_num_threads(usable_cores())
    machine = describe_machine()
    engine = Engine(
        {"gguf": str(resolve_model(arguments.model))},
        {
            "dtype": arguments.dtype,
            "quantization": arguments.quantization,
            "kv_cache_dtype": arguments.kv_cache_dtype,
        },
    )
    decoder = engine.core.executor.decoder
    held = Model.of(decoder, engine.core.executor.pool.dtype, held=True)
    model = Model.of(decoder, engine.core.executor.pool.dtype, held=arguments.quantization is not None)
    recorder = Recorder(engine.core)
    text = tokenize(MODEL)
    run_workload(engine, recorder, make("tiny", text, arguments.rounds))
    runs: dict[str, list[Run]] = {name: [] for name in arguments.workloads.split(",")}
    weight_bytes = model.layer_bytes + model.head_bytes
    before = measure_ceilings(weight_bytes)
    for round in range(arguments.rounds):
        for name, found in runs.items():
            workload = make(name, text, round)
            wall_s, steps = run_workload(engine, recorder, workload)
            after = measure_ceilings(weight_bytes)
            parts = recorder.parts(wall_s)
            found.append(Run(wall_s, steps, workload.output_tokens, parts, before.best(after)))
            before = after
    arithmetic = Arithmetic(arguments.dtype if arguments.quantization is None else "int8", arguments.dtype)
    rows = {name: summary(found, model, held, arithmetic) for name, found in runs.items()}
    report(machine, engine.description, rows)
    if arguments.json:
        figures = {
            "machine": machine,
            "dtype": arguments.dtype,
            "quantization": arguments.quantization,
            "kv_cache_dtype": arguments.kv_cache_dtype,
            "ceilings": {name: [asdict(run.ceilings) for run in found] for name, found in runs.items()},
            "workloads": rows,
        }
        arguments.json.write_text(json.dumps(figures, indent=1) + "\n")


def summary(runs: list[Run], model: Model, held: Model, arithmetic: Arithmetic) -> dict[str, Any]:
    """Returns the medians of a workload's runs."""
    return {
        "steps": median(len(run.steps) for run in runs),
        "tflop": median(sum(map(model.flop, run.steps)) / 1e12 for run in runs),
        "read_gb_per_s": median(run.ceilings.read_bytes_per_s / 1e9 for run in runs),
        "weights_gb_per_s": median(run.ceilings.weight_bytes_per_s / 1e9 for run in runs),
        "gemm_gflop_per_s": median(run.ceilings.gemm_flop_per_s[arithmetic.layers] / 1e9 for run in runs),
        "floor_s": median(run.floor_s(model, arithmetic) for run in runs),
        "wall_s": median(run.wall_s for run in runs),
        "tokens_per_s": median(run.tokens / run.wall_s for run in runs),
        "share": median(run.share(model, arithmetic) for run in runs),
        "share_of_held": median(run.share(held, arithmetic) for run in runs),
        "share_at_one_rate": median(run.share(model, Arithmetic(*[arithmetic.layers] * 2)) for run in runs),
        "parts_s": {part: median(run.parts[part] for run in runs) for part in runs[0].parts},
    }


def report(machine: dict[str, object], description: str, rows: dict[str, dict[str, Any]]) -> None:
    print(heading(machine))
    print(f"{description}\n")
    print(
        "| workload | steps | TFLOP | read, as much as the weights, GB/s | GEMM, GFLOP/s | floor s | measured s |",
        end="",
    )
    print(" tokens/s | share of floor | of held | at one rate |")
    print("| --- " * 11 + "|")
    for name, row in rows.items():
        print(
            f"| {name} | {row['steps']:.0f} | {row['tflop']:.2f} | {row['read_gb_per_s']:.1f}, "
            f"{row['weights_gb_per_s']:.1f} | {row['gemm_gflop_per_s']:.0f} | {row['floor_s']:.2f} | "
            f"{row['wall_s']:.2f} | {row['tokens_per_s']:.1f} | {row['share']:.1%} | {row['share_of_held']:.1%} | "
            f"{row['share_at_one_rate']:.1%} |"
        )
    names = list(next(iter(rows.values()))["parts_s"])
    print("\nWhere the measured time went, by part:\n")
    print("| workload | " + " | ".join(names) + " |")
    print("| --- " * (len(names) + 1) + "|")
    for name, row in rows.items():
        print(f"| {name} | " + " | ".join(f"{row['parts_s'][part] / row['wall_s']:.1%}" for part in names) + " |")


if __name__ == "__main__":
    main()
