"""Has Triton interpret kernels where there is no GPU, and mends its interpreter. Import it before triton."""

from __future__ import annotations

import importlib.util
import os

import numpy as np
import pytest
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CAPABILITY = torch.cuda.get_device_capability() if DEVICE == "cuda" else (8, 0)
"""The compute capability that tests give to `TritonAttention`: this GPU's, so that its own tiles run."""


def multiply_rows_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gives the interpreter products in which a row's place changes no bit, as on a GPU: with some BLAS it does."""

    def product(a: np.ndarray, b: np.ndarray, dtype: np.dtype) -> np.ndarray:
        return np.einsum("...ij,...jk->...ik", a.astype(dtype), b.astype(dtype))

    if DEVICE == "cpu":
        monkeypatch.setattr(np, "matmul", product)


def mend() -> None:
    """Mends Triton 3.7: bfloat16, held in uint16, is multiplied as integers and rounded towards zero; and every call of
    a function looks through the whole language for what to replace, which takes a third of the time."""
    import triton.language as tl
    from triton.runtime import interpreter

    builder, function = interpreter.InterpreterBuilder, interpreter.InterpretedFunction
    dot, cast, call = builder.create_dot, builder.cast_impl, function.__call__
    called = set()

    def widen(tensor):
        if tensor.dtype.scalar != tl.bfloat16:
            return tensor
        return interpreter.TensorHandle((tensor.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    def dot_and_mend(self, a, b, *others):
        return dot(self, widen(a), widen(b), *others)

    def cast_and_mend(self, source, target):
        if target.scalar != tl.bfloat16:
            return cast(self, widen(source), target)
        rounded = torch.tensor(widen(source).data).bfloat16().view(torch.int16).numpy().view(np.uint16)
        return interpreter.TensorHandle(rounded, tl.bfloat16)

    def call_and_mend(self, *arguments, **options):
        if self.fn in called:
            return self.rewrite()(*arguments, **options)
        called.add(self.fn)
        return call(self, *arguments, **options)

    builder.create_dot, builder.cast_impl, function.__call__ = dot_and_mend, cast_and_mend, call_and_mend


if DEVICE == "cpu" and importlib.util.find_spec("triton"):
    os.environ["TRITON_INTERPRET"] = "1"
    mend()
