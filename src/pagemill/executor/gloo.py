"""GlooExchange: carries activations between processes by torch.distributed's gloo, over TCP on this machine.

It serves where processes cannot share memory as `SharedExchange` wants it, and is the seam for other libraries of
torch.distributed: NCCL between GPUs, gloo between machines.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed
from torch import Tensor

TIMEOUT_S = 300.0
"""A rank that has not come to a collective after so long counts as lost."""
_HOST = "127.0.0.1"
_dist: Any = torch.distributed
"""Its stubs leave out what has no place in the default group."""


def host_meeting() -> Any:
    """Returns a store at which ranks of this machine find one another; its `port` is what the others need.

    It listens on the loopback interface alone: left to itself, a TCPStore listens on all.
    """
    listening = socket.create_server((_HOST, 0))
    port = listening.getsockname()[1]
    return _dist.TCPStore(_HOST, port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach())


def join_meeting(port: int) -> Any:
    return _dist.TCPStore(_HOST, port, is_master=False, wait_for_workers=False)


class GlooExchange:
    """Implements `Exchange`, once it is connected. It has a process group of its own: a caller's default group is left
    alone."""

    native = None

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        self._group: Any = None

    def connect(self, store: Any) -> None:
        """Connects all ranks, which call this at the same time. Raises RuntimeError if one does not come."""
        options = _dist.ProcessGroupGloo._Options()  # noqa: SLF001
        options._devices = [_dist.ProcessGroupGloo.create_device(hostname=_HOST)]  # noqa: SLF001
        options._timeout = timedelta(seconds=TIMEOUT_S)  # noqa: SLF001
        self._group = _dist.ProcessGroupGloo(store, self.rank, self.size, options)

    def all_gather(self, part: Tensor, widths: Sequence[int]) -> Tensor:
        assert self._group is not None
        tokens, widest = part.shape[0], max(widths)
        if min(widths) < widest:  # gloo wants equal parts
            part = torch.nn.functional.pad(part, (0, widest - part.shape[1]))
        every = torch.empty(self.size, tokens, widest, dtype=part.dtype)
        self._group.allgather([[*every]], [part.contiguous()]).wait()
        if min(widths) == widest:
            return every.view(1, -1) if tokens == 1 else every.transpose(0, 1).reshape(tokens, -1)
        return torch.cat([rank[:, :width] for rank, width in zip(every, widths, strict=True)], dim=1)
