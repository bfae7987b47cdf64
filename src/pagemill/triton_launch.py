"""Starts Triton's kernels at a few microseconds each.

Triton's own launch binds all arguments by name, asks of each what it specializes on, makes a string of the answers and
looks the compiled kernel up by it. Only kinds of arguments matter there: dtypes, what is None, which pointers are
aligned, and which integers are 1 or multiples of 16. A `Launcher` knows the kernel's constants beforehand, looks up by
these kinds alone, and starts what Triton has compiled for them (`CompiledKernel.__getitem__`). What it has not seen yet
is started by Triton, which compiles it where it must.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.compiler import CompiledKernel

KNOWN = triton.__version__.startswith(("3.6.", "3.7."))
"""True for a Triton of which it is known what it specializes on, and that its compiled kernels take all arguments in
order, pointers as integers. Another one starts all kernels itself."""
TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
"""Triton's names of the dtypes that kernels multiply in."""
Grid = tuple[int, int, int]


class Launcher:
    """Starts a kernel with constants that stay. Make it by `launcher`.

    constants: the kernel's last parameters, and options of its compilation, by name.
    """

    def __init__(self, kernel: Any, **constants: Any) -> None:
        names = [name for name in kernel.arg_names if name in constants]
        if kernel.arg_names[len(kernel.arg_names) - len(names) :] != names:
            raise ValueError(f"{names} are not the last parameters of {kernel.__name__}")
        self.kernel, self.constants = kernel, constants
        self._behind = tuple(constants[name] for name in names)
        self._compiled: dict[tuple[Any, ...], Any] = {}

    def __call__(self, grid: Grid, *arguments: Any) -> None:
        """Starts the kernel on the device of its first argument, a tensor. arguments: all but the constants, tensors,
        Python's numbers and None."""
        device = arguments[0].get_device()
        if device >= 0 and device != torch.cuda.current_device():
            with torch.cuda.device(device):
                return self(grid, *arguments)
        kinds, passed = kinds_of(arguments)
        kinds.append(device)  # a compiled kernel is loaded on one
        key = tuple(kinds)
        compiled = self._compiled.get(key)
        if compiled is not None:
            compiled[grid](*passed, *self._behind)
            return None
        compiled = self.kernel[grid](*arguments, **self.constants)
        if KNOWN and isinstance(compiled, CompiledKernel):  # Triton's interpreter gives nothing back
            self._compiled[key] = compiled
        return None


@lru_cache(maxsize=None, typed=True)
def launcher(kernel: Any, **constants: Any) -> Launcher:
    """Returns what starts a kernel with these constants, the same for the same ones."""
    return Launcher(kernel, **constants)


def kinds_of(arguments: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """Returns the arguments' kinds, and what a compiled kernel takes in their places: addresses of tensors.

    What Triton compiles different code for has different kinds. Raises TypeError for what is no tensor, no number of
    Python's and not None.
    """
    kinds: list[Any] = []
    passed: list[Any] = []
    for argument in arguments:
        if type(argument) is int:
            if -0x80000000 <= argument < 0x80000000:
                kinds.append(1 if argument == 1 else 0 if argument & 15 else 16)
            else:
                kinds.append((argument >> 63, argument & 15 == 0))
            passed.append(argument)
        elif argument is None:
            kinds.append(None)
            passed.append(None)
        elif isinstance(argument, Tensor):
            address = argument.data_ptr()
            kinds.append((argument.dtype,) if address & 15 else argument.dtype)
            passed.append(address)
        elif type(argument) in (float, bool):
            kinds.append(type(argument))
            passed.append(argument)
        else:
            raise TypeError(f"kernels take tensors, Python's numbers and None, not {argument!r}")
    return kinds, passed
