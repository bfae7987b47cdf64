"""What operators demand of the tensors that they are given."""

from __future__ import annotations

import torch
from torch import Tensor


def check_contiguous(name: str, tensor: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """Raises ValueError unless `tensor` is contiguous, of `dtype` and `shape`."""
    if tensor.dtype != dtype or tensor.shape != shape or not tensor.is_contiguous():
        raise ValueError(f"{name} must be contiguous {dtype} {shape}, not {tensor.dtype} {tuple(tensor.shape)}")
