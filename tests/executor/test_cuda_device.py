"""CudaDevice over a fake torch.cuda, which behaves as the real one does where that is easily forgotten."""

from __future__ import annotations

from contextlib import contextmanager
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
    def wait_stream(self, other: FakeStream) -> None:
        pass


class FakeCuda:
    """Holds the current stream, memory that torch keeps, and pools of graphs by whether one of theirs was captured."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.default = self.current = FakeStream()
        self.cached, self.free, self.total = 300, 500, 1000
        self.fails: Exception | None = None
        self.pools: list[Any] = []
        for name in ("graph", "stream", "empty_cache", "mem_get_info", "graph_pool_handle", "synchronize"):
            monkeypatch.setattr(torch.cuda, name, getattr(self, name))
        monkeypatch.setattr(torch.cuda, "CUDAGraph", FakeGraph)
        monkeypatch.setattr(torch.cuda, "Stream", lambda device: FakeStream())
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: self.current)

    @contextmanager
    def stream(self, stream: FakeStream) -> Any:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    @contextmanager
    def graph(self, graph: FakeGraph, pool: object, stream: FakeStream, capture_error_mode: str) -> Any:
        assert capture_error_mode == "thread_local"
        before, self.current = self.current, stream
        graph.held = pool
        self.pools.append(pool)
        yield
        if self.fails is not None:
            raise self.fails  # when the capture ends, before the stream is put back
        self.current = before

    def synchronize(self, device: torch.device) -> None:
        pass

    def graph_pool_handle(self) -> object:
        return object()

    def empty_cache(self) -> None:
        self.free, self.cached = self.free + self.cached, 0

    def mem_get_info(self, device: torch.device) -> tuple[int, int]:
        return self.free, self.total


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
    assert accelerator.compute is cuda.default


def test_graphs_share_memory_until_all_of_them_have_ended(cuda: FakeCuda) -> None:
    accelerator = device()
    graphs = [accelerator.capture(lambda: torch.zeros(1)).graph for _ in range(2)]
    assert accelerator.compute is cuda.default
    assert cuda.pools[0] is cuda.pools[1]
    del graphs[0]
    graphs.append(accelerator.capture(lambda: torch.zeros(1)).graph)
    assert cuda.pools[2] is cuda.pools[0]
    graphs.clear()
    graphs.append(accelerator.capture(lambda: torch.zeros(1)).graph)
    assert cuda.pools[3] is not cuda.pools[0]


def test_memory_that_torch_keeps_for_later_counts_as_free(cuda: FakeCuda) -> None:
    assert tuple(device().memory()) == (800, 1000)
