"""The GPU's benchmarks do all that they do there, on tiny sizes here."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest
import torch
from torch.autograd import DeviceType

from interpreter import CAPABILITY, DEVICE

pytest.importorskip("triton")

from benchmarks.on_gpu import Ceilings
from benchmarks.random_engine import time_engine

from benchmarks import gpu_busy, gpu_decode, gpu_launches, gpu_ops, gpu_sampling, random_engine
from pagemill.attention.triton_backend import TritonAttention
from pagemill.executor.backend import torch_backend
from pagemill.executor.device import CudaDevice
from pagemill.models.gpu_decoder import GpuDecoder
from pagemill.ops.triton_ops import TritonOps

pytestmark = pytest.mark.gpu

CEILINGS = Ceilings(1e9, 1e12)


class Clock:
    """Runs what it is to time once, notes what it gave, and says that it took 2 ms."""

    def __init__(self) -> None:
        self.results: list[object] = []

    def __call__(self, run) -> float:
        self.results.append(run())
        return 2.0


def test_operators() -> None:
    sizes = gpu_ops.Sizes(64, 3, 1, 32, 96, mixture_hidden=32, experts=4, chosen=2, expert_size=16)
    clock = Clock()
    results = gpu_ops.run([1, 3], 1e9, clock, sizes=sizes, dtype=torch.float32, device=DEVICE, capability=CAPABILITY)
    assert [(at.name, at.rows) for at in results[:2]] == [("rms_norm", 1), ("add_rms_norm", 1)]
    assert len(results) == 12
    by_name = {(at.name, at.rows): at for at in results}
    assert by_name["gated", 3].share == pytest.approx(3 * 3 * 96 * 4 / 1e9 / 2e-3)
    assert by_name["experts", 1].share == pytest.approx((2 * 3 * 32 * 16 + 2 * 32 + 4) * 4 / 1e9 / 2e-3), "2 of 4"
    torch.testing.assert_close(clock.results[0], clock.results[1])
    assert gpu_ops.table(results).count("\n") == 13
    assert "| experts | 3 | 2000.0 |" in gpu_ops.table(results)


def test_sampling() -> None:
    clock = Clock()
    results = gpu_sampling.run([1, 2], 1e9, clock, vocab=90, device=DEVICE)
    assert [(at.name, at.rows) for at in results] == [(name, rows) for rows in (1, 2) for name in gpu_sampling.LIMITS]
    assert all(0 <= token < 90 for tokens in clock.results for token in tokens.tolist())
    assert clock.results[10].tolist() == clock.results[11].tolist(), "the argmax"
    assert results[0].share == pytest.approx(90 * 4 / 1e9 / 2e-3)
    assert "| both | 2 | 2000.0 |" in gpu_sampling.table(results)


def test_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_launches, "CONTEXT", 320)
    sizes = gpu_decode.Sizes(96, 64, 4, 2, 16, 48, layers=2, itemsize=4)
    backend = gpu_launches.gpu_operators(torch.device(DEVICE), CAPABILITY)
    results = gpu_launches.run(sizes, backend, torch.float32, Clock())
    launches = {at.name: at.launches for at in results}
    assert launches["rms_norm"] == 1
    assert launches["attend, mixed"] == 3, "long rows, chunks, and merging"
    assert launches["two layers, one row"] == 1 + 2 * 7, "norms, rotation, activation, writing, attending, merging"
    assert "| so 32 layers, mixed | 257 | 2 | 2 |" in gpu_launches.table(results)
    assert gpu_launches.host_us(lambda: time.sleep(0.001), lambda: None, seconds=0.01) > 1000


def test_decode_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_decode, "ENGINE_TOKENS", 50)
    sizes = gpu_decode.Sizes(96, 64, 4, 2, 16, 48, layers=2, itemsize=4)
    clock = Clock()
    backend = torch_backend(torch.device(DEVICE))._replace(
        ops=TritonOps(CAPABILITY), attention=TritonAttention(CAPABILITY), decoder=GpuDecoder
    )
    results = gpu_decode.run(sizes, [(1, 20), (3, 33)], CEILINGS, clock, dtype=torch.float32, backend=backend, steps=2)
    assert results[0].engine.ms > 0
    assert (results[0].engine.busy is None) == (DEVICE == "cpu")
    assert results[1].engine is None
    assert [(at.rows, at.context, at.ms) for at in results] == [(1, 20, 2.0), (3, 33, 2.0)]
    if DEVICE == "cpu":
        for first in (0, 3):
            graph, by_torch, eager = clock.results[first : first + 3]
            assert graph.shape == ((1,) if first == 0 else (3,))
            assert torch.equal(graph, eager)
            assert torch.equal(graph, by_torch)
    assert "| 3 | 33 | 2.00 |" in gpu_decode.table(results)


def test_the_engine_generates_for_all_rows_while_it_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes, backend = gpu_decode.Sizes(96, 64, 4, 2, 16, 48, layers=1, itemsize=4), torch_backend(torch.device(DEVICE))
    weights = gpu_decode.random_weights(sizes.spec(), backend.ops, torch.float32, backend.device)
    decoder = backend.decoder(sizes.spec(), weights, backend.ops, backend.attention, torch.float32)
    accelerator = CudaDevice(backend.device) if DEVICE == "cuda" else None
    with monkeypatch.context() as patched:
        times = iter([10.0, 12.0])
        patched.setattr(random_engine, "time", SimpleNamespace(monotonic=time.monotonic, perf_counter=times.__next__))
        ms = time_engine(decoder, backend, accelerator, 3, 30, steps=4, budget=20).ms
    assert ms == 2000 / 4, "all three rows generate in each of four steps"


def test_a_gpu_is_busy_while_a_kernel_runs_and_overlaps_count_once() -> None:
    assert gpu_busy.busy_of([(150, 160), (100, 110), (105, 130), (107, 108), (180, 200)], 2) == gpu_busy.Busy(0.6, 0.03)
    assert gpu_busy.busy_of([], 2) is None
    seen = gpu_busy.watch(lambda: torch.ones(9, device=DEVICE).sum(), 3)
    assert (seen is None) if DEVICE == "cpu" else 0 < seen.share <= 1


def test_only_kernels_of_the_gpu_count() -> None:
    def event(name, device_type=DeviceType.CUDA, *, annotation=False):
        span = SimpleNamespace(start=1.0, end=len(name))
        return SimpleNamespace(name=name, device_type=device_type, time_range=span, is_user_annotation=annotation)

    events = [
        event("gemm"), event("Memcpy DtoH (Device -> Pinned)"), event("Memset (Device)"),
        event("step", annotation=True), event("cudaGraphLaunch", DeviceType.CPU), event("attend"),
    ]  # fmt: skip
    assert gpu_busy.kernel_spans(events) == [(1.0, 4), (1.0, 6)]


def test_the_roofline_counts_weights_once_and_every_context() -> None:
    sizes = gpu_decode.Sizes()
    layer = 4096 * (4096 + 2 * 1024) + 4096 * 4096 + 3 * 4096 * 14336
    assert sizes.parameters == 32 * layer + 4096 * 128256
    assert sizes.token_bytes == 131072
    bytes_of_weights = 2 * sizes.parameters
    assert sizes.roofline_s(4, 100, CEILINGS) == pytest.approx((bytes_of_weights + 4 * 100 * 131072) / 1e9)
    assert sizes.roofline_s(9000, 1, CEILINGS) == pytest.approx(
        2 * 9000 * sizes.parameters / 1e12 + 9000 * 131072 / 1e9
    ), "bound by products"
    assert sizes.expected_s(1, 1024, CEILINGS) > sizes.roofline_s(1, 1024, CEILINGS)
    assert gpu_decode.expectation(sizes, gpu_decode.CASES, CEILINGS).count("\n") == 1 + len(gpu_decode.CASES)
