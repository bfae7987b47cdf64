"""Instruction set and threads of the CPU kernels, for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from pagemill import _kernels


@contextmanager
def kernels_of(isa: str, threads: int) -> Iterator[None]:
    before = _kernels.isa(), _kernels.num_threads()
    _kernels.use_isa(isa)
    _kernels.set_num_threads(threads)
    try:
        yield
    finally:
        _kernels.use_isa(before[0])
        _kernels.set_num_threads(before[1])
