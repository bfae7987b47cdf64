"""Device: what the executor needs of an accelerator whose work is asynchronous, and CUDA's."""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple, Protocol
from weakref import WeakSet

import torch
from torch import Tensor

from pagemill.executor.interface import ExecutorMemory
from pagemill.kvcache.device_streams import CudaStreams, DeviceStreams


class Graph(Protocol):
    """Is work that was captured: the same operations on the same memory."""

    def replay(self) -> None:
        """Gives the work to the stream of computations."""


class Captured(NamedTuple):
    """A graph, the memory of its result, and the bytes that it has taken: of this process, as others take and give back
    memory of the same GPU meanwhile."""

    graph: Graph
    result: Tensor
    nbytes: int


class Device(DeviceStreams, Protocol):
    """Gives an executor one accelerator. One thread calls it."""

    def capture(self, run: Callable[[], Tensor]) -> Captured:
        """Runs `run` once, and captures it.

        Inside, `run` may neither wait for the device nor depend on what the host knows: all is done again, as it was
        captured. Only a replay fills the result. Raises RuntimeError where the device cannot capture it.
        """

    def memory(self) -> ExecutorMemory: ...

    def peak(self, run: Callable[[], object]) -> int:
        """Runs `run`, and returns how many bytes of memory were held for work meanwhile at most, beyond what is in use
        afterwards. Then they are given back."""

    def idle(self) -> int:
        """Returns how many bytes, not free in `memory`, are held for work to come and not in use."""


class CudaDevice(CudaStreams):
    """Implements `Device` by torch.cuda, and makes the GPU the current one of the thread that makes it. Computations
    run in the stream that is current when they are asked for, as those of the pool's frames do."""

    def __init__(self, where: torch.device) -> None:
        super().__init__(where)
        torch.cuda.set_device(self.where)  # else each kernel that is started goes there and back
        self._captures = self.stream()
        self._graphs: WeakSet[torch.cuda.CUDAGraph] = WeakSet()
        """Graphs that are alive. They share their memory: one runs at a time, and what it leaves is copied before the
        next. Torch refuses memory whose graphs have all ended while any of it is still held."""

    def capture(self, run: Callable[[], Tensor]) -> Captured:
        compute, captures = self.compute, self._captures
        captures.wait_stream(compute)
        with self.use(captures):
            run()  # compiles kernels, and lets libraries choose theirs: neither can be captured
        compute.wait_stream(captures)
        self.synchronize()
        before, graph, alive = self._reserved(), torch.cuda.CUDAGraph(), next(iter(self._graphs), None)
        pool = torch.cuda.graph_pool_handle() if alive is None else alive.pool()
        # Where a capture fails, `torch.cuda.graph` leaves its stream the current one: this one comes back in any case.
        # Other threads copy blocks meanwhile, which an error mode for all of them would forbid.
        collects = gc.isenabled()
        gc.disable()  # what is collected may wait for the device, as a pool's memory does: that would end the capture
        try:
            with (
                self.use(compute),
                torch.cuda.graph(graph, pool=pool, stream=captures, capture_error_mode="thread_local"),
            ):
                result = run()
        except BaseException:
            # One that CUDA has invalidated is not ended for torch's allocator, which would give no memory back until
            # then. It raises RuntimeError where it was ended. Not every torch has these functions.
            with suppress(AttributeError, RuntimeError):
                torch._C._cuda_endAllocateToPool(self.where.index, pool)  # noqa: SLF001
                torch._C._cuda_releasePool(self.where.index, pool)  # noqa: SLF001
            raise
        finally:
            if collects:
                gc.enable()
        self._graphs.add(graph)
        return Captured(graph, result, max(0, self._reserved() - before))

    def _reserved(self) -> int:
        """Returns how many bytes torch holds, but for what it keeps for later."""
        torch.cuda.empty_cache()
        return torch.cuda.memory_reserved(self.where)

    def memory(self) -> ExecutorMemory:
        torch.cuda.empty_cache()  # what torch keeps for later, such as of weights that were packed, is free
        return ExecutorMemory(*torch.cuda.mem_get_info(self.where))

    def peak(self, run: Callable[[], object]) -> int:
        self.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self.where)
        run()
        self.synchronize()
        held = torch.cuda.max_memory_reserved(self.where) - torch.cuda.memory_allocated(self.where)
        torch.cuda.empty_cache()
        return held

    def idle(self) -> int:
        return torch.cuda.memory_reserved(self.where) - torch.cuda.memory_allocated(self.where)
