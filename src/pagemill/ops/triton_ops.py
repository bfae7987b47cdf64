"""TritonOps: a decoder's operators on NVIDIA GPUs. Matrix products are torch's (cuBLAS), those of few rows those of
`triton_linear.py`; what lies between them runs in the kernels of `triton_kernels.py`, each operator in one.

Nothing here waits for the device, and results have the sizes of inputs: a CUDA graph may hold all of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Literal

import torch
import triton
from torch import Tensor

from pagemill.ops.interface import LowRank, LowRankRun
from pagemill.ops.low_rank import LowRankPart
from pagemill.ops.quantized import check_contiguous
from pagemill.ops.torch_ops import TorchLinear, TorchOps
from pagemill.ops.triton_early import EARLY_CAPABILITY, launch_options
from pagemill.ops.triton_kernels import gate, normalize, turn_heads
from pagemill.ops.triton_linear import pack
from pagemill.ops.triton_low_rank import TritonLowRank
from pagemill.triton_launch import Launcher, launcher

KERNEL_VERSION = 2
"""Raised whenever the kernels' arithmetic changes, or the data of `triton_linear.py`: stored K/V of other bits must
not be found."""
WIDEST = 16384
"""Elements of a row that a program holds in registers at most."""
TILE = 1024
"""Elements that a program takes at least, of several rows if they are short."""


class TritonOps(TorchOps):
    """Implements `Ops` for GPUs that Triton compiles for, and for Triton's interpreter; and more operators, of which
    each is several of `Ops` in one kernel, with the same places of rounding.

    capability: the GPU's. Below 8.0 Triton takes no matrix units. early: kernels begin while the one before ends (see
    `triton_early.py`).

    A row's bits depend on the row alone, but for those of matrix products.
    """

    def __init__(self, capability: tuple[int, int], early: bool = False) -> None:
        self.name = f"{TorchOps.name}+triton-{triton.__version__}-{KERNEL_VERSION}"
        self._major, self._capability = capability[0], capability
        self._early = early and capability >= EARLY_CAPABILITY

    def has_matrix_units(self, dtype: torch.dtype) -> bool:
        """Returns True if Triton's products of this dtype run in matrix units."""
        return self._major >= 8 and dtype != torch.float32

    def pack_linear(self, weight: Tensor, bias: Tensor | None = None, dtype: torch.dtype | None = None) -> TorchLinear:
        return pack(weight, bias, self._capability, self._early)

    def pack_low_rank(self, parts: Sequence[LowRankPart], in_features: int, out_features: int) -> LowRank:
        return TritonLowRank(parts, in_features, out_features)

    def add_low_rank(self, x: Tensor, y: Tensor, runs: Sequence[LowRankRun]) -> None:
        for addition, tokens in runs:
            if not isinstance(addition, TritonLowRank):
                raise TypeError(f"{addition!r} must be packed by TritonOps")
            addition.add(x, y, tokens, self.has_matrix_units(x.dtype))

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Returns what `Ops.rms_norm` says. Raises ValueError for rows of over WIDEST elements."""
        if x.dim() > 3 or x.stride(-1) != 1:
            dense = x.reshape(-1, x.shape[-1]).contiguous()
            return _normalize(dense, None, None, weight, eps, self._early).view(x.shape)
        return _normalize(x, None, None, weight, eps, self._early)

    def add_rms_norm(
        self, x: Tensor, added: Tensor, weight: Tensor, eps: float, added_weight: Tensor | None = None
    ) -> Tensor:
        """Adds `added` to x in place, both contiguous [tokens, size], and returns the sum's rms_norm.

        added_weight: `added` is normed with it first, and rounded.
        """
        check_contiguous("x", x, x.dtype, tuple(x.shape))
        check_contiguous("added", added, x.dtype, tuple(x.shape))
        return _normalize(x, added, added_weight, weight, eps, self._early)

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> None:
        _turn(x, 0, None, None, 0.0, cos, sin, self._early)

    def norm_and_rotate(
        self, x: Tensor, num_queries: int, q_norm: Tensor, k_norm: Tensor, eps: float, cos: Tensor, sin: Tensor
    ) -> None:
        """Norms the heads of x [tokens, heads, head_dim] and rotates them, in place: the first `num_queries` are normed
        with q_norm, the others with k_norm, fp32 [head_dim]."""
        for name, weight in (("q_norm", q_norm), ("k_norm", k_norm)):
            check_contiguous(name, weight, torch.float32, (x.shape[2],))
        _turn(x, num_queries, q_norm, k_norm, eps, cos, sin, self._early)

    def gated(self, x: Tensor, activation: Literal["silu", "gelu_tanh"]) -> Tensor:
        tokens, size = x.shape[0], x.shape[1] // 2
        if x.shape[1] % 2 or x.stride(1) != 1:
            raise ValueError(f"x is {tuple(x.shape)}; it must be [tokens, 2 n] with contiguous rows")
        y = torch.empty(tokens, size, dtype=x.dtype, device=x.device)
        if y.numel():
            _gating(activation == "gelu_tanh", self._early)((tokens, -(-size // TILE), 1), x, y, size, x.stride(0))
        return y


@lru_cache
def _gating(gelu: bool, early: bool) -> Launcher:
    return launcher(gate, GELU=gelu, BLOCK=TILE, enable_fp_fusion=False, **launch_options(early))


def _normalize(
    x: Tensor, added: Tensor | None, added_weight: Tensor | None, weight: Tensor, eps: float, early: bool
) -> Tensor:
    """Returns rms_norm of x [tokens, (heads,) size], to which `added` is added before, if it is given."""
    size = x.shape[-1]
    for name, each in (("weight", weight), ("added_weight", added_weight)):
        if each is not None:
            check_contiguous(name, each, torch.float32, (size,))
    if size > WIDEST:
        raise ValueError(f"rows of {size} elements are normed; the kernel takes {WIDEST} at most, TorchOps any")
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if not y.numel():
        return y
    inner, inner_stride = (x.shape[1], x.stride(1)) if x.dim() == 3 else (1, 0)
    at_once, norming = _norming(size, early)
    rows = y.numel() // size
    norming((-(-rows // at_once), 1, 1), x, added, added_weight, weight, y, rows, inner, x.stride(0), inner_stride, eps)
    return y


@lru_cache
def _norming(size: int, early: bool) -> tuple[int, Launcher]:
    """Returns how many rows of `size` elements a program norms, and what starts the kernel."""
    columns = triton.next_power_of_2(size)
    at_once = max(1, TILE // columns)
    return at_once, launcher(
        normalize, SIZE=size, COLUMNS=columns, ROWS=at_once, num_warps=_warps(columns), enable_fp_fusion=False,
        **launch_options(early),
    )  # fmt: skip


def _warps(columns: int) -> int:
    """Returns how many warps hold a row: 8 to 16 of its elements per thread, and more only where there are no more
    threads."""
    return min(32, max(4, columns // 512))


def _turn(
    x: Tensor,
    num_queries: int,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    early: bool,
) -> None:
    tokens, heads, head_dim = x.shape
    half = cos.shape[1]
    check_contiguous("cos", cos, torch.float32, (tokens, half))
    check_contiguous("sin", sin, torch.float32, (tokens, half))
    if 2 * half > head_dim or x.stride(2) != 1:
        raise ValueError(f"x is {tuple(x.shape)}; its contiguous last dimension must hold the {2 * half} that rotate")
    if not x.numel() or not half:
        return
    at_once, turning = _turning(head_dim, half, early)
    grid = (tokens, -(-heads // at_once), 1)
    turning(grid, x, q_norm, k_norm, cos, sin, heads, num_queries, *x.stride()[:2], eps)


@lru_cache
def _turning(head_dim: int, half: int, early: bool) -> tuple[int, Launcher]:
    """Returns how many heads with `half` pairs of dimensions a program turns, and what starts the kernel."""
    pairs, rest = triton.next_power_of_2(half), head_dim - 2 * half
    at_once = max(1, TILE // (2 * pairs))
    return at_once, launcher(
        turn_heads, HEAD_DIM=head_dim, HALF=half, PAIRS=pairs, REST=triton.next_power_of_2(rest) if rest else 0,
        HEADS=at_once, enable_fp_fusion=False, **launch_options(early),
    )  # fmt: skip
