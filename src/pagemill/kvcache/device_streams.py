"""DeviceStreams: how work and copies on an accelerator are ordered, and CUDA's way to do it.

Work is done in the order in which a stream gets it; streams run beside each other, and beside the host, but for what
events order. Nothing here waits unless it says so.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pagemill.errors import DriverError, KVMemoryError
from pagemill.kvcache.cuda_driver import CudaDriver, Driver
from pagemill.kvcache.pages import HUGE, private_memory
from pagemill.kvcache.sizing import host_memory

logger = logging.getLogger(__name__)


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


class DeviceStreams(Protocol):
    """Gives the streams of one accelerator, and copies between its memory and the host's.

    where: the device on which torch allocates.
    compute: the stream of computations, on which work runs that nothing else is said of.
    """

    where: torch.device

    @property
    def compute(self) -> Stream: ...

    @property
    def driver(self) -> Driver | None:
        """Returns what maps the device's memory to addresses; None where nothing does."""

    def stream(self) -> Stream:
        """Returns a further stream."""

    def use(self, stream: Any) -> AbstractContextManager[object]:
        """Lets work and memory asked for inside belong to this stream."""

    def pinned(self, nbytes: int) -> Tensor:
        """Returns page-locked host memory, uint8 [nbytes], which the device copies to and from by itself."""

    def pinned_whole(self, nbytes: int) -> Tensor:
        """Returns as `pinned` does, but takes no more than it returns, and keeps nothing for later. Raises
        KVMemoryError for more than the system gives."""

    def copy(self, source: Tensor, target: Tensor) -> None:
        """Copies between pinned memory and the device's, in the order of the stream in use. Until that is done, the
        host may neither write the one nor read the other."""

    def synchronize(self) -> None:
        """Waits for all streams. Raises RuntimeError for an error of the device."""


class CudaStreams:
    """Implements `DeviceStreams` by torch.cuda. Computations run in the stream that is current when they are asked
    for."""

    def __init__(self, where: torch.device) -> None:
        self.where = torch.device("cuda", torch.cuda.current_device() if where.index is None else where.index)

    @property
    def compute(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self.where)

    @cached_property
    def driver(self) -> Driver | None:
        try:
            if torch.version.hip is not None:
                raise DriverError("torch is made for ROCm, not for CUDA")
            return CudaDriver(self.where)
        except DriverError as error:
            logger.warning("the KV pool on %s keeps its memory, and cannot grow: %s", self.where, error)
            return None

    def stream(self) -> torch.cuda.Stream:
        return torch.cuda.Stream(self.where)  # type: ignore[no-untyped-call]

    @contextmanager
    def use(self, stream: Any) -> Iterator[None]:
        # At its end, a stream's context goes back to the thread's GPU, the first one, and makes a context there.
        with torch.cuda.device(self.where), torch.cuda.stream(stream):
            yield

    def pinned(self, nbytes: int) -> Tensor:
        with torch.cuda.device(self.where):  # else a thread's first call makes a context on the first GPU
            return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)

    def pinned_whole(self, nbytes: int) -> Tensor:
        free, _ = host_memory()
        try:
            memory = np.frombuffer(private_memory(nbytes, HUGE), dtype=np.uint8)
            with torch.cuda.device(self.where):
                error = torch.cuda.cudart().cudaHostRegister(memory.ctypes.data, nbytes, 0)  # type: ignore[no-untyped-call]
            if int(error) != 0:
                raise MemoryError(f"{error}")
        except (MemoryError, OSError, OverflowError, ValueError) as error:
            raise KVMemoryError(
                f"{nbytes} bytes of host memory, of {free} that are free, cannot be pinned for contexts longer than "
                f"the KV pool: {error}; raise kv_memory, or lower max_model_len",
                param="kv_host_memory",
            ) from error
        tensor = torch.from_numpy(memory)
        weakref.finalize(tensor.untyped_storage(), _unpin, memory, self.where)
        return tensor

    def copy(self, source: Tensor, target: Tensor) -> None:
        target.copy_(source, non_blocking=True)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.where)


def _unpin(memory: NDArray[np.uint8], where: torch.device) -> None:
    with torch.cuda.device(where):
        torch.cuda.cudart().cudaHostUnregister(memory.ctypes.data)  # type: ignore[no-untyped-call]
