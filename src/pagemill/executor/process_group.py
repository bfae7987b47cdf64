"""GroupExchange: carries activations between the processes of one machine by torch.distributed.

Between GPUs it goes by NCCL, whose collectives are work on the stream of computations, as kernels are: nothing waits
for them, and a CUDA graph may hold them. Between CPUs it goes by gloo, over TCP, where processes cannot share memory
as `SharedExchange` wants it.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed
from torch import Tensor

TIMEOUT_S = 300.0
"""A rank that has not come to a collective after so long counts as lost."""
ABORT_S = 2.0
_HOST = "127.0.0.1"
_dist: Any = torch.distributed
"""Its stubs leave out what has no place in the default group."""
_NCCL = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",  # else it ends the process of whoever waits too long: rank 0 sees to that
    "NCCL_SOCKET_IFNAME": "lo",  # else it listens on all interfaces
}
"""The environment tells NCCL this, unless it says something else already."""

Transport = Literal["gloo", "nccl"]


def host_meeting() -> Any:
    """Returns a store at which ranks of this machine find one another; its `port` is what the others need.

    It listens on the loopback interface alone: left to itself, a TCPStore listens on all.
    """
    listening = socket.create_server((_HOST, 0))
    port = listening.getsockname()[1]
    return _dist.TCPStore(_HOST, port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach())


def join_meeting(port: int) -> Any:
    return _dist.TCPStore(_HOST, port, is_master=False, wait_for_workers=False)


class GroupExchange:
    """Implements `SummingExchange`, once it is connected. It has a process group of its own: a caller's default group
    is left alone. By NCCL, rank r has the GPU with number r."""

    native = None

    def __init__(self, rank: int, size: int, transport: Transport = "gloo") -> None:
        self.rank = rank
        self.size = size
        self._transport = transport
        self._backend: Any = None
        self._beginning = threading.Lock()
        self._aborting: threading.Thread | None = None
        self._group: Any = None

    def connect(self, store: Any) -> None:
        """Connects all ranks, which call this at the same time. Raises RuntimeError if one does not come."""
        if self._transport == "nccl":
            where, kind, self._backend = torch.device("cuda", self.rank), "NCCL", self._nccl(store)
        else:
            where, kind, self._backend = torch.device("cpu"), "GLOO", self._gloo(store)
        kind = getattr(_dist.ProcessGroup.BackendType, kind)
        group = _dist.ProcessGroup(store, self.rank, self.size)
        group._set_default_backend(kind)  # noqa: SLF001
        self._backend._set_sequence_number_for_group()  # noqa: SLF001
        group._register_backend(where, kind, self._backend)  # noqa: SLF001
        self._group = group
        with _environment():  # the first collective makes the connections
            int(self.all_reduce(torch.zeros(1, dtype=torch.int32, device=where)))

    def all_gather(self, part: Tensor, widths: Sequence[int]) -> Tensor:
        tokens, widest = part.shape[0], max(widths)
        if min(widths) < widest:  # parts have to be equal
            part = torch.nn.functional.pad(part, (0, widest - part.shape[1]))
        every = torch.empty(self.size * tokens, widest, dtype=part.dtype, device=part.device)
        _done(self._group._allgather_base(every, part.contiguous(), _now(_options.AllgatherOptions())))  # noqa: SLF001
        every = every.view(self.size, tokens, widest)
        if min(widths) == widest:
            return every.view(1, -1) if tokens == 1 else every.transpose(0, 1).reshape(tokens, -1)
        return torch.cat([rank[:, :width] for rank, width in zip(every, widths, strict=True)], dim=1)

    def all_reduce(self, part: Tensor) -> Tensor:
        total = part.contiguous()
        _done(self._group.allreduce([total], _now(_options.AllreduceOptions())))
        return total

    def broadcast(self, values: Tensor) -> None:
        _done(self._group.broadcast([values], _now(_options.BroadcastOptions())))

    def abort(self) -> None:
        """Ends the collectives under way, on this side, and all later ones: they raise, or bring nothing. Any thread
        may call it, also one that holds graphs with collectives in them: NCCL ends these at once, but returns only when
        the graphs are gone. So it is waited for no longer than ABORT_S."""
        with self._beginning:
            if self._aborting is None and self._backend is not None:
                self._aborting = threading.Thread(target=self._abort, daemon=True, name="end of the group")
                self._aborting.start()
        if self._aborting is not None:
            self._aborting.join(ABORT_S)

    def _abort(self) -> None:
        with suppress(RuntimeError):  # gloo's may not know how, and ends with its peers
            self._backend.abort()

    def _gloo(self, store: Any) -> Any:
        options = _dist.ProcessGroupGloo._Options()  # noqa: SLF001
        options._devices = [_dist.ProcessGroupGloo.create_device(hostname=_HOST)]  # noqa: SLF001
        options._timeout = timedelta(seconds=TIMEOUT_S)  # noqa: SLF001
        return _dist.ProcessGroupGloo(store, self.rank, self.size, options)

    def _nccl(self, store: Any) -> Any:
        options = _dist.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=TIMEOUT_S)  # noqa: SLF001
        with _environment():
            return _dist.ProcessGroupNCCL(store, self.rank, self.size, options)


_options: Any = torch._C._distributed_c10d  # noqa: SLF001


def _now(options: Any) -> Any:
    """Returns options of a collective that runs on the stream in use; torch 2.7 runs some on one of NCCL's, between
    events."""
    if hasattr(options, "asyncOp"):
        options.asyncOp = False
    return options


def _done(work: Any) -> None:
    """Lets what comes next, on this stream or on the host of CPUs, come behind a collective."""
    if work is not None:
        work.wait()


@contextmanager
def _environment() -> Iterator[None]:
    """Adds `_NCCL` to the environment, for as long as NCCL begins."""
    added = {name: value for name, value in _NCCL.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            del os.environ[name]
