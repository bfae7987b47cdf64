"""Times what the host does to start the kernels of a step outside of CUDA graphs, as the engine starts them and as
Triton does.

    python -m benchmarks.gpu_launches [--quick] [--json FILE]

Sizes are those of Llama 3 8B in bf16, but for the vocabulary; a step runs the model's layers, without logits. A time is
the host's from a call to its return, the GPU's queue being all but empty: medians over 200 ms. Whole steps run
with one layer and with two, from which one of 32 is told.

Where there is no GPU, kernels are compiled for capability 9.0 and start nothing, layers are narrow, and tensors are the
CPU's: what is left out is the driver's part of a launch, and what torch takes for a GPU's memory.
"""

from __future__ import annotations

import json
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from benchmarks.gpu_decode import BLOCK_SIZE, Sizes, decode_batch, random_weights
from benchmarks.on_gpu import parser_for

from pagemill.attention.interface import AttentionBatch, GroupBatch
from pagemill.executor.backend import Backend, torch_backend
from pagemill.kvcache.device_pool import DevicePool
from pagemill.kvcache.kv_format import kv_format
from pagemill.kvcache.layout import FrameShape, block_major

CONTEXT, PROMPT = 1024, 16
LAYERS = 32
RUNS_S = 0.2
AT_ONCE = 20
"""Calls between two waits for the GPU: fewer launches than it takes into its queue."""
ON_GPU = Sizes(vocab=1024, layers=2)
ELSEWHERE = Sizes(vocab=64, hidden=64, heads=4, kv_heads=2, head_dim=64, intermediate=64, layers=2)

Call = Callable[[], object]


@dataclass(frozen=True)
class Result:
    """Holds one case: how many kernels of Triton's it starts, the host's µs, and those where Triton starts them."""

    name: str
    launches: int
    us: float
    by_triton_us: float


@contextmanager
def started_by_triton() -> Iterator[list[object]]:
    """Has Triton's own launch start every kernel, and gives a list of those that are."""
    from pagemill.triton_launch import Launcher

    started: list[object] = []

    def start(self: Launcher, grid: tuple[int, int, int], *arguments: Any) -> None:
        started.append(self.kernel)
        with torch.cuda.device_of(arguments[0]):
            self.kernel[grid](*arguments, **self.constants)

    with mock.patch.object(Launcher, "__call__", start):
        yield started


class NoLauncher:
    """Stands in for what hands compiled kernels to the driver."""

    def __init__(self, source: object, metadata: object) -> None:
        pass

    def __call__(self, *arguments: object) -> None:
        pass


def start_nothing() -> None:
    """Has Triton compile for an H100, and start nothing."""
    import triton
    from triton.backends.compiler import GPUTarget

    target = GPUTarget("cuda", 90, 32)
    utils = SimpleNamespace(
        get_device_properties=lambda _: {"max_shared_mem": 227 << 10}, load_binary=lambda *_: (object(), 0, 0, 0, 1024)
    )
    driver = SimpleNamespace(
        get_current_device=lambda: 0, get_current_stream=lambda _: 0, get_current_target=lambda: target,
        launcher_cls=NoLauncher, utils=utils,
    )  # fmt: skip
    triton.runtime.driver.set_active(driver)


def gpu_operators(device: torch.device, capability: tuple[int, int]) -> Backend:
    from pagemill.attention.triton_backend import TritonAttention
    from pagemill.models.gpu_decoder import GpuDecoder
    from pagemill.ops.triton_ops import TritonOps
    from pagemill.sampling.triton_sampling import TritonSamplingKernels

    return torch_backend(device)._replace(
        ops=TritonOps(capability, early=True), attention=TritonAttention(capability, early=True), decoder=GpuDecoder,
        sampling=TritonSamplingKernels(),
    )  # fmt: skip


def mixed_batch(context: int, prompt: int, device: torch.device) -> AttentionBatch:
    """Makes a row of one token behind its context, and a prompt."""
    entries = -(-max(context, prompt) // BLOCK_SIZE)
    tables = torch.arange(2 * entries, device=device).view(2, entries)
    positions = torch.cat([torch.tensor([context - 1]), torch.arange(prompt)]).to(device)
    rows = torch.tensor([0] + [1] * prompt, device=device)
    slots = tables[rows, positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE
    return AttentionBatch(
        query_start=torch.tensor([0, 1, 1 + prompt], dtype=torch.int32, device=device),
        context_lens=torch.tensor([context, prompt], dtype=torch.int32, device=device),
        positions=positions,
        groups=(GroupBatch(tables.int(), slots),),
        max_query_len=prompt,
        max_context_len=max(context, prompt),
    )


def cases(sizes: Sizes, backend: Backend, dtype: torch.dtype) -> Iterator[tuple[str, Call]]:
    """Returns what is called, by name: each kernel's operator, and forward passes of one layer and of all."""
    device, ops, attention, spec = backend.device, backend.ops, backend.attention, sizes.spec()
    entries = -(-CONTEXT // BLOCK_SIZE)
    decode = decode_batch(1, CONTEXT, 2 * entries, device)
    mixed = mixed_batch(CONTEXT, PROMPT, device)

    def draw(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.randn(shape, device=device).to(dtype)

    weights = random_weights(spec, ops, dtype, device)
    decoder = backend.decoder(spec, weights, ops, attention, dtype)
    decoder.reach(CONTEXT)
    one = replace(spec, layers=spec.layers[:1])
    first = backend.decoder(one, replace(weights, layers=weights.layers[:1]), ops, attention, dtype)
    first.reach(CONTEXT)
    shape = FrameShape(
        decoder.groups, sizes.kv_heads, BLOCK_SIZE, sizes.head_dim, sizes.head_dim,
        kv_format(str(dtype).removeprefix("torch.")),
    )  # fmt: skip
    pool = DevicePool(2 * entries, shape, device, block_major)
    pool.storage.zero_()

    x, added, norm = draw(1, sizes.hidden), draw(1, sizes.hidden), torch.ones(sizes.hidden, device=device)
    heads = draw(1, sizes.heads + 2 * sizes.kv_heads, sizes.head_dim)
    q, k, v = torch.split(heads, [sizes.heads, sizes.kv_heads, sizes.kv_heads], dim=1)
    angle = torch.ones(1, sizes.head_dim // 2, device=device)
    both, logits = draw(1, 2 * sizes.intermediate), draw(1, 128256)
    queries = draw(1 + PROMPT, sizes.heads, sizes.head_dim)
    cache, slots = pool.layer(0), decode.groups[0].slots
    yield "torch's sum in place", lambda: x.add_(added)
    yield "rms_norm", lambda: ops.rms_norm(x, norm, 1e-5)
    yield "add_rms_norm", lambda: ops.add_rms_norm(x, added, norm, 1e-5)
    yield "rotate", lambda: ops.rotate(heads[:, : sizes.heads + sizes.kv_heads], angle, angle)
    yield "gated", lambda: ops.gated(both, "silu")
    yield "write", lambda: attention.write(k, v, cache, slots)
    yield "attend, one row", lambda: attention.attend(q, cache, decode, 0, scale=spec.scale)
    yield "attend, mixed", lambda: attention.attend(queries, cache, mixed, 0, scale=spec.scale)
    yield "argmax", lambda: backend.sampling.choose_on_device(logits, None)
    for name, batch in (("one row", decode), ("mixed", mixed)):
        ids = torch.zeros(len(batch.positions), dtype=torch.int64, device=device)
        yield f"one layer, {name}", lambda ids=ids, batch=batch: first.forward(ids, batch, pool)
        yield f"two layers, {name}", lambda ids=ids, batch=batch: decoder.forward(ids, batch, pool)


def host_us(call: Call, wait: Call, seconds: float = RUNS_S) -> float:
    """Returns the host's µs of a call, the median over `seconds`."""
    call()
    times = []
    end = time.perf_counter() + seconds
    while not times or time.perf_counter() < end:
        wait()
        for _ in range(AT_ONCE):
            begin = time.perf_counter()
            call()
            times.append(time.perf_counter() - begin)
    wait()
    return 1e6 * statistics.median(times)


def run(sizes: Sizes, backend: Backend, dtype: torch.dtype, us: Callable[[Call], float]) -> list[Result]:
    results = []
    for name, call in cases(sizes, backend, dtype):
        with torch.inference_mode():
            call()
            ours = us(call)
            with started_by_triton() as started:
                call()
                launches = len(started)
                theirs = us(call)
        results.append(Result(name, launches, ours, theirs))
    return results


def table(results: list[Result]) -> str:
    lines = ["| | launches by Triton | host, µs | where Triton starts them, µs |", "| --- | ---: | ---: | ---: |"]
    lines += [f"| {at.name} | {at.launches} | {at.us:.1f} | {at.by_triton_us:.1f} |" for at in results]
    by_name = {at.name: at for at in results}
    for name in ("one row", "mixed"):
        one, two = by_name[f"one layer, {name}"], by_name[f"two layers, {name}"]
        ours, theirs = (a + (LAYERS - 1) * (b - a) for a, b in ((one.us, two.us), (one.by_triton_us, two.by_triton_us)))
        launches = one.launches + (LAYERS - 1) * (two.launches - one.launches)
        lines.append(f"| so {LAYERS} layers, {name} | {launches} | {ours:.0f} | {theirs:.0f} |")
    return "\n".join(lines)


def main() -> None:
    parser = parser_for(__doc__, "a tenth of the time for each case")
    options = parser.parse_args()
    import triton

    seconds = RUNS_S / 10 if options.quick else RUNS_S
    if torch.cuda.is_available():
        device, capability = torch.device("cuda"), torch.cuda.get_device_capability()
        sizes, on, wait = ON_GPU, torch.cuda.get_device_name(), torch.cuda.synchronize
        dtype = torch.bfloat16 if capability >= (8, 0) else torch.float16
    else:
        device, capability, sizes, on, wait = torch.device("cpu"), (9, 0), ELSEWHERE, "no GPU", lambda: None
        dtype = torch.float32  # bf16 products take the CPU most of a step
        torch.set_num_threads(1)  # products are the CPU's, and small
        start_nothing()
    results = run(sizes, gpu_operators(device, capability), dtype, lambda call: host_us(call, wait, seconds))
    versions = f"torch {torch.__version__}, triton {triton.__version__}, Python {platform.python_version()}"
    print(f"{on}, {versions}\n\n{table(results)}")
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(at) for at in results]))


if __name__ == "__main__":
    main()
