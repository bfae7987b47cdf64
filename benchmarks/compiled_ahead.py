"""Compiles Triton's kernels in many processes, into the cache on disk, before they are launched.

The processes need no GPU, and must be there before this one uses it: make a `Compilers` first.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import TypeVar

MOST = 32

Case = TypeVar("Case")


class Compilers:
    """Holds a process for each CPU, MOST at most."""

    def __init__(self) -> None:
        self._pool = multiprocessing.get_context("fork").Pool(min(MOST, len(os.sched_getaffinity(0))))

    def compile(
        self, launch: Callable[[Case], object], cases: Iterable[Case], capability: tuple[int, int]
    ) -> tuple[list[Case], float]:
        """Has what `launch` starts for each case, on tensors of the CPU, compiled. launch: a function of a module.

        Returns the cases of which all compile, in their order, and how many seconds that took.
        """
        begin, cases = time.perf_counter(), list(cases)
        done = self._pool.starmap(_compile, [(launch, case, capability) for case in cases], chunksize=1)
        return [case for case, well in zip(cases, done, strict=True) if well], time.perf_counter() - begin

    def end(self) -> None:
        self._pool.terminate()


def _compile(launch: Callable[[Case], object], case: Case, capability: tuple[int, int]) -> bool:
    """Returns True if the kernels compile, and fit into shared memory and registers."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.runtime.jit import JITFunction

    number = 10 * capability[0] + capability[1]
    target = GPUTarget("cuda", number, 32)
    triton.runtime.driver.set_active(
        SimpleNamespace(get_current_device=lambda: 0, get_current_stream=lambda _: 0, get_current_target=lambda: target)
    )
    run = JITFunction.run
    JITFunction.run = lambda self, *arguments, grid, warmup, **settings: run(
        self, *arguments, grid=grid, warmup=True, **settings
    )
    try:
        launch(case)
    except Exception:  # whatever the compiler does not take is left out
        return False
    finally:
        JITFunction.run = run
    return True
