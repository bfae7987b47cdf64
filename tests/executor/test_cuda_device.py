"""CudaDevice over a fake torch.cuda, which behaves as the real one does where that is easily forgotten."""

from __future__ import annotations

import gc
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch

from pagemill.executor.device import CudaDevice


class FakeGraph:
    """Refuses a pool of which no graph is alive, as the allocator does while some of its memory is held."""

    def __init__(self) -> None:
        self.held: object = None

    def pool(self) -> object:
        return self.held


class FakeStream:
    def __init__(self, device: torch.device) -> None:
        self.device = device

    def wait_stream(self, other: FakeStream) -> None:
        pass


class FakeCuda:
    """Holds a thread's GPU, each one's current stream, which GPUs have a context, memory that torch keeps, what a
    capture takes, here and in another process meanwhile, and pools of graphs by whether one of theirs was captured."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.gpus = [torch.device("cuda", index) for index in range(2)]
        self.at, self.contexts = self.gpus[0], set()
        self.current = {gpu: FakeStream(gpu) for gpu in self.gpus}
        self.defaults = [*self.current.values()]
        self.cached, self.free, self.total = 300, 500, 1000
        self.reserved = self.captures = self.elsewhere = 0
        self.fails: Exception | None = None
        self.pools: list[Any] = []
        self.recording: list[Any] = []
        self.released: list[Any] = []
        for name in (
            "device", "set_device", "stream", "graph", "graph_pool_handle",
            "empty_cache", "mem_get_info", "memory_reserved", "synchronize",
        ):  # fmt: skip
            monkeypatch.setattr(torch.cuda, name, getattr(self, name))
        monkeypatch.setattr("torch._C._cuda_endAllocateToPool", self.end)
        monkeypatch.setattr("torch._C._cuda_releasePool", lambda _, pool: self.released.append(pool))
        monkeypatch.setattr(torch.cuda, "CUDAGraph", FakeGraph)
        monkeypatch.setattr(torch.cuda, "Stream", FakeStream)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: self.at.index)
        monkeypatch.setattr(torch.cuda, "current_stream", self.current.__getitem__)

    def set_device(self, device: torch.device) -> None:
        """Makes a context."""
        self.at = device
        self.contexts.add(device)

    @contextmanager
    def device(self, device: torch.device) -> Any:
        """Makes no context where it goes back to."""
        before = self.at
        self.set_device(device)
        try:
            yield
        finally:
            self.at = before

    def _set_stream(self, stream: FakeStream) -> None:
        self.set_device(stream.device)
        self.current[stream.device] = stream

    @contextmanager
    def stream(self, stream: FakeStream) -> Any:
        there, here = self.current[stream.device], self.current[self.at]
        self._set_stream(stream)
        try:
            yield
        finally:
            self._set_stream(there)
            self._set_stream(here)

    @contextmanager
    def graph(self, graph: FakeGraph, pool: object, stream: FakeStream, capture_error_mode: str) -> Any:
        assert capture_error_mode == "thread_local"
        before = self.current[stream.device]
        self._set_stream(stream)
        graph.held = pool
        self.pools.append(pool)
        self.recording.append(pool)
        self.free -= self.captures + self.elsewhere
        self.reserved += self.captures
        try:
            yield
        finally:
            if self.fails is not None:
                raise self.fails  # when the capture ends, before the stream is put back
            self.end(0, pool)
            self._set_stream(before)

    def end(self, index: int, pool: object) -> None:
        if pool not in self.recording:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
        self.recording.remove(pool)

    def synchronize(self, device: torch.device) -> None:
        pass

    def graph_pool_handle(self) -> object:
        return object()

    def empty_cache(self) -> None:
        self.free, self.cached = self.free + self.cached, 0

    def mem_get_info(self, device: torch.device) -> tuple[int, int]:
        return self.free, self.total

    def memory_reserved(self, device: torch.device) -> int:
        return self.reserved + self.cached


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    return FakeCuda(monkeypatch)


def device() -> CudaDevice:
    return CudaDevice(torch.device("cuda"))


def test_a_capture_that_fails_leaves_computations_their_stream(cuda: FakeCuda) -> None:
    accelerator = device()
    cuda.fails = RuntimeError("CUDA error: operation failed due to a previous error during capture")
    with pytest.raises(RuntimeError, match="during capture"):
        accelerator.capture(lambda: torch.zeros(1))
    assert accelerator.compute is cuda.defaults[0]
    assert not cuda.recording
    assert cuda.released == cuda.pools


def test_a_step_that_fails_in_a_capture_leaves_its_memory_to_torch(cuda: FakeCuda) -> None:
    def run() -> torch.Tensor:
        if cuda.recording:
            raise torch.OutOfMemoryError("no memory")
        return torch.zeros(1)

    with pytest.raises(torch.OutOfMemoryError):
        device().capture(run)
    assert not cuda.recording
    assert not cuda.released


def test_only_the_gpu_in_use_has_a_context(cuda: FakeCuda) -> None:
    accelerator = CudaDevice(cuda.gpus[1])
    assert cuda.at == cuda.gpus[1]
    cuda.at = cuda.gpus[0]  # as in another thread
    with accelerator.use(accelerator.stream()):
        assert cuda.at == cuda.gpus[1]
    accelerator.capture(lambda: torch.zeros(1))
    assert cuda.at == cuda.gpus[0]
    assert accelerator.compute is cuda.defaults[1]
    assert cuda.contexts == {cuda.gpus[1]}


def test_graphs_share_memory_until_all_of_them_have_ended(cuda: FakeCuda) -> None:
    accelerator = device()
    graphs = [accelerator.capture(lambda: torch.zeros(1)).graph for _ in range(2)]
    assert accelerator.compute is cuda.defaults[0]
    assert cuda.pools[0] is cuda.pools[1]
    del graphs[0]
    graphs.append(accelerator.capture(lambda: torch.zeros(1)).graph)
    assert cuda.pools[2] is cuda.pools[0]
    graphs.clear()
    graphs.append(accelerator.capture(lambda: torch.zeros(1)).graph)
    assert cuda.pools[3] is not cuda.pools[0]


@pytest.mark.parametrize("collects", [True, False])
@pytest.mark.parametrize("fails", [None, RuntimeError("CUDA error")])
def test_no_garbage_is_collected_while_a_graph_is_captured(
    cuda: FakeCuda, collects: bool, fails: Exception | None
) -> None:
    """Collected objects may call CUDA, which no capture survives."""
    seen = []

    def run() -> torch.Tensor:
        seen.append((bool(cuda.recording), gc.isenabled()))
        return torch.zeros(1)

    cuda.fails = fails
    (gc.enable if collects else gc.disable)()
    try:
        with nullcontext() if fails is None else pytest.raises(RuntimeError):
            device().capture(run)
        assert seen == [(False, collects), (True, False)]
        assert gc.isenabled() == collects
    finally:
        gc.enable()


def test_a_graph_has_taken_what_this_process_took(cuda: FakeCuda) -> None:
    accelerator = device()
    cuda.captures, cuda.elsewhere = 20, 400
    assert accelerator.capture(lambda: torch.zeros(1)).nbytes == 20
    cuda.captures, cuda.elsewhere = 0, -400
    assert accelerator.capture(lambda: torch.zeros(1)).nbytes == 0


def test_memory_that_torch_keeps_for_later_counts_as_free(cuda: FakeCuda) -> None:
    assert tuple(device().memory()) == (800, 1000)
