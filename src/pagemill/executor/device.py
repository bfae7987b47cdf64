"""Device: what the executor needs of an accelerator whose work is asynchronous, and CUDA's.

Work is done in the order in which a stream gets it; streams run beside each other, and beside the host, but for what
events order. Nothing here waits unless it says so.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor

from pagemill.executor.interface import ExecutorMemory


class Event(Protocol):
    """Marks a place in a stream's work."""

    def query(self) -> bool:
        """Returns whether the device has come to it."""

    def synchronize(self) -> None:
        """Waits until the device has come to it. Raises RuntimeError for an error of the work before it."""


class Stream(Protocol):
    """Is work that is done in order."""

    def record_event(self) -> Event:
        """Returns a mark of all that the stream has been given so far."""

    def wait_event(self, event: Any) -> None:
        """Lets what the stream is given from now on wait for an event."""


class Graph(Protocol):
    """Is work that was captured: the same operations on the same memory."""

    def replay(self) -> None:
        """Gives the work to the stream of computations."""


class Device(Protocol):
    """Gives an executor one accelerator. One thread calls it.

    where: the device on which torch allocates.
    compute: the stream of computations, on which work runs that nothing else is said of.
    """

    where: torch.device

    @property
    def compute(self) -> Stream: ...

    def stream(self) -> Stream:
        """Returns a further stream."""

    def use(self, stream: Stream) -> AbstractContextManager[object]:
        """Lets work and memory asked for inside belong to this stream."""

    def pinned(self, nbytes: int) -> Tensor:
        """Returns page-locked host memory, uint8 [nbytes], which the device copies to and from by itself."""

    def copy(self, source: Tensor, target: Tensor) -> None:
        """Copies between pinned memory and the device's, in the order of the stream in use. Until that is done, the
        host may neither write the one nor read the other."""

    def capture(self, run: Callable[[], Tensor]) -> tuple[Graph, Tensor]:
        """Runs `run` once, captures it, and returns the graph and the memory of its result.

        Inside, `run` may neither wait for the device nor depend on what the host knows: all is done again, as it was
        captured. Only a replay fills the result. Raises RuntimeError where the device cannot capture it.
        """

    def memory(self) -> ExecutorMemory: ...

    def synchronize(self) -> None:
        """Waits for all streams. Raises RuntimeError for an error of the device."""


class CudaDevice:
    """Implements `Device` by torch.cuda. Computations run in the stream that is current when they are asked for, as
    those of the pool's frames do."""

    def __init__(self, where: torch.device) -> None:
        self.where = torch.device("cuda", torch.cuda.current_device() if where.index is None else where.index)
        self._captures = self.stream()
        self._pool = torch.cuda.graph_pool_handle()
        """The memory that all graphs share: one runs at a time, and what it leaves is copied before the next."""

    @property
    def compute(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self.where)

    def stream(self) -> torch.cuda.Stream:
        return torch.cuda.Stream(self.where)  # type: ignore[no-untyped-call]

    def use(self, stream: Stream) -> AbstractContextManager[object]:
        assert isinstance(stream, torch.cuda.Stream)
        return torch.cuda.stream(stream)

    def pinned(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def copy(self, source: Tensor, target: Tensor) -> None:
        target.copy_(source, non_blocking=True)

    def capture(self, run: Callable[[], Tensor]) -> tuple[Graph, Tensor]:
        compute, captures = self.compute, self._captures
        captures.wait_stream(compute)
        with torch.cuda.stream(captures):
            run()  # compiles kernels, and lets libraries choose theirs: neither can be captured
        compute.wait_stream(captures)
        graph = torch.cuda.CUDAGraph()
        # Other threads copy blocks meanwhile, which an error mode for all of them would forbid.
        with torch.cuda.graph(graph, pool=self._pool, stream=captures, capture_error_mode="thread_local"):
            result = run()
        return graph, result

    def memory(self) -> ExecutorMemory:
        return ExecutorMemory(*torch.cuda.mem_get_info(self.where))

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.where)
