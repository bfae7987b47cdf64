"""SharedExchange: carries activations between processes of one machine through memory that they share (Linux).

A collective takes a few microseconds where cores are free, a hundred times less than through gloo's sockets, and the
kernels do it themselves between two operators (csrc/exchange.h).
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from pagemill import _kernels
from pagemill.models.sharding import NativeExchange

TIMEOUT_S = 300.0
"""A rank that has not come to a collective after so long counts as lost."""
_PLACE_BYTES = 4 << 20
"""Bytes that one rank exchanges at once; more takes several turns."""
_BYTES = 4096 + 2 * _PLACE_BYTES


def make_memory() -> int:
    """Returns the descriptor of memory for the ranks of one model, all zeros."""
    descriptor = os.memfd_create("pagemill-exchange")
    os.ftruncate(descriptor, _BYTES)
    return descriptor


class SharedExchange:
    """Implements `Exchange`. descriptor: of the memory, which is closed. check: raises RuntimeError if a rank is lost;
    called while this one waits for others."""

    def __init__(self, rank: int, size: int, descriptor: int, check: Callable[[], None] | None = None) -> None:
        self.rank = rank
        self.size = size
        self._check = check
        self._memory = mmap.mmap(descriptor, _BYTES)
        os.close(descriptor)
        address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self.native = NativeExchange(_kernels.Exchange(address, _BYTES, rank, size), self._idle)

    def all_gather(self, part: Tensor, widths: Sequence[int]) -> Tensor:
        part = part.contiguous()
        whole = torch.empty(part.shape[0], sum(widths), dtype=part.dtype, device="cpu")
        in_bytes = [width * part.element_size() for width in widths]
        self.native.exchange.gather(part.data_ptr(), whole.data_ptr(), in_bytes, len(part), self._idle)
        return whole

    def _idle(self, waited_s: float) -> None:
        if self._check is not None:
            self._check()
        if waited_s > TIMEOUT_S:
            raise RuntimeError(f"rank {self.rank} has waited {waited_s:.0f} s for the others")
