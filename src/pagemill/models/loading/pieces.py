"""Works on large tensors piece by piece on all cores, without barriers between the pieces.

A piece stays in a core's cache between the passes over it. Torch's own threads meet at a barrier behind each operation,
which on a busy machine costs several times the work (measured for 135 million weights: 5 s, compared with 1.3 s on one
thread); here a core that is late only does fewer pieces.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

from pagemill import _kernels
from pagemill.ops.quantized import GROUP, QuantizedWeight, quantize_int8

PIECE_BYTES = 1 << 20
"""About the size of a piece."""

_pool: ContextVar[ThreadPoolExecutor | None] = ContextVar("_pool", default=None)
"""Holds the threads of the load that is under way in this thread."""


@contextmanager
def piece_threads() -> Iterator[None]:
    """Lets `each_piece` use as many threads as the kernels meanwhile, and gives torch one for each of them."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with ThreadPoolExecutor(_kernels.num_threads(), "pagemill-load") as pool:
            token = _pool.set(pool)
            try:
                yield
            finally:
                _pool.reset(token)
    finally:
        torch.set_num_threads(threads)


def each_piece(length: int, step: int, work: Callable[[int, int], None]) -> None:
    """Calls work(begin, end) for neighbouring pieces of 0 .. length, in any order, and raises what the first raises.

    Without `piece_threads`, and for a single piece, the caller does the work.
    """
    pieces = [(begin, min(begin + step, length)) for begin in range(0, length, step)]
    pool = _pool.get()
    if len(pieces) < 2 or pool is None:
        for begin, end in pieces:
            work(begin, end)
        return
    for _ in pool.map(lambda piece: work(*piece), pieces):
        pass


def quantize_pieces(weight: Tensor) -> QuantizedWeight:
    """Returns a finite matrix in 8 bits, as `quantize_int8` does, without holding it in float32 as a whole."""
    rows, columns = weight.shape
    values = torch.empty(rows, columns, dtype=torch.int8, device=weight.device)
    scales = torch.empty(rows, -(-columns // GROUP), dtype=torch.bfloat16, device=weight.device)
    if weight.device.type == "cpu":
        _kernels.quantize_int8(weight.contiguous(), values, scales)
        return QuantizedWeight(values, scales)

    def fill(begin: int, end: int) -> None:
        piece = quantize_int8(weight[begin:end].float())
        values[begin:end], scales[begin:end] = piece.values, piece.scales

    each_piece(rows, max(1, PIECE_BYTES // 4 // columns), fill)
    return QuantizedWeight(values, scales)
