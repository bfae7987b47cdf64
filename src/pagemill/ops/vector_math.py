"""Has MKL choose its kernels for exp, log and the like before several threads call them at once."""

from __future__ import annotations

import torch

_FUNCTIONS = (torch.exp, torch.log, torch.sqrt, torch.sin, torch.cos, torch.tanh)
"""What pagemill uses of the elementwise functions that torch leaves to MKL."""


def settle_vector_math() -> None:
    """Calls each function once, on one element, in this thread. Call it before torch's threads have work.

    MKL 2024.2, which torch 2.13 brings, chooses a function's kernel at its first call. When several threads make that
    call together, one may compute its share with a kernel of low precision (about 1e-5 of the result), that once:
    https://github.com/pytorch/pytorch/issues/188792. Rotary angles are computed at first use and kept, so the bits of a
    whole run would hang on it.
    """
    for dtype in (torch.float32, torch.float64):
        one = torch.ones(1, dtype=dtype)
        for function in _FUNCTIONS:
            function(one)
