"""The operators on CPU: the C++ kernels behind `Ops`. Checks here cost O(1) whatever the size; the kernels trust them.

Every row's result is bitwise independent of the other rows and of the number of threads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pagemill import _kernels
from pagemill.ops.interface import AllowedOutputs, LowRankRun
from pagemill.ops.low_rank import LowRankPart, check_parts, pad_to_blocks
from pagemill.ops.quantized import BLOCK, AffineWeight, Float8Weight, QuantizedWeight, check_contiguous

KERNEL_VERSION = 9
"""Raised whenever a kernel's arithmetic changes: stored K/V of other bits must not be found."""

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
ACTIVATIONS = {"silu": 0, "gelu_tanh": 1}
INTEGER_ISAS = ("avx512_vnni", "avx512_bf16", "amx_bf16", "neon_dotprod", "neon_bf16")
"""Kernels for processors that have instructions for dot products of 8-bit integers."""


def kernel_name() -> str:
    return f"cpu-{_kernels.isa()}-{KERNEL_VERSION}"


def dtype_code(tensor: Tensor) -> int:
    """The kernels' number of a tensor's dtype. Raises TypeError for a dtype without kernels."""
    code = DTYPES.get(tensor.dtype)
    if code is None:
        raise TypeError(f"the CPU kernels take float32, bfloat16 and float16, not {tensor.dtype}")
    return code


class CpuLinear:
    """A weight in panels; the original is not kept. See `csrc/isa/linear.h` and `csrc/isa/quantized.h`.

    dtype: of `rows`.
    """

    def __init__(self, packed: _kernels.Linear, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self.packed = packed
        self.nbytes = packed.nbytes
        self.out_features, self.in_features = shape
        self.dtype = dtype

    @classmethod
    def of_parts(cls, numbers: Sequence[Any], arrays: Sequence[npt.NDArray[np.uint8] | None]) -> CpuLinear:
        """Returns the layer that has given these `parts`; it lies where the arrays do, aligned to 64 bytes.

        Raises TypeError or ValueError unless they have the sizes that these kernels ask for.
        """
        n, k, format, type, exponents = numbers
        panels, scales, bias, patches = arrays
        if panels is None:
            raise ValueError("a layer has panels")
        packed = _kernels.Linear(n, k, format, type, exponents, panels, scales, bias, patches)
        return cls(packed, (n, k), next(dtype for dtype, code in DTYPES.items() if code == type))

    def parts(self) -> tuple[list[Any], list[npt.NDArray[np.uint8] | None]]:
        """Returns the layer as numbers and as arrays, which lie where it does."""
        n, k, format, type, exponents, panels, scales, bias, patches = self.packed.parts()
        return [n, k, format, type, exponents], [panels, scales, bias, patches]

    def __call__(self, x: Tensor) -> Tensor:
        self._check(x)
        y = torch.empty(x.shape[0], self.out_features, dtype=x.dtype, device="cpu")
        self.packed(x.data_ptr(), x.stride(0), y.data_ptr(), self.out_features, dtype_code(x), x.shape[0])
        return y

    def argmax(self, x: Tensor, allowed: AllowedOutputs | None = None) -> npt.NDArray[np.int64]:
        """x [tokens, in_features] -> [tokens]: the first of each row's largest outputs; no output is written.

        allowed: the outputs that count.
        Negative where a row has none: what `SamplingKernels.choose` gives for the outputs, widened to float32, where
        those that do not count are -inf.
        """
        self._check(x)
        ids = np.empty(x.shape[0], np.int64)
        bits, rows = (None, None) if allowed is None else allowed
        self.packed.argmax(x.data_ptr(), x.stride(0), dtype_code(x), ids, bits, rows)
        return ids

    def _check(self, x: Tensor) -> None:
        if x.shape[1] != self.in_features or x.stride(1) != 1:
            raise ValueError(f"x is {tuple(x.shape)}; it must be [tokens, {self.in_features}] with contiguous rows")

    def rows(self, ids: Tensor) -> Tensor:
        check_contiguous("ids", ids, torch.int64, (ids.numel(),))
        if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < self.out_features:
            raise IndexError(f"ids {ids.tolist()} are not all in 0 .. {self.out_features - 1}")
        y = torch.empty(ids.numel(), self.in_features, dtype=self.dtype, device="cpu")
        self.packed.rows(ids.numpy(), y.data_ptr())
        return y


class CpuLowRank:
    """An addition in blocks and panels, which the kernels read in order. See `csrc/isa/low_rank.h`."""

    RANKS, OUTPUTS = 16, 64
    """Of a block, and of a panel."""

    def __init__(self, parts: Sequence[LowRankPart], in_features: int, out_features: int) -> None:
        check_parts(parts, in_features, out_features)
        self.in_features, self.out_features = in_features, out_features
        self._packed = [(pad_to_blocks(part.a, self.RANKS), pad_to_blocks(part.b, self.OUTPUTS)) for part in parts]
        self.nbytes = sum(a.nbytes + b.nbytes for a, b in self._packed)
        self.native = _kernels.LowRank(
            out_features,
            in_features,
            [(a, b, part.begin, len(part.b), part.scale) for part, (a, b) in zip(parts, self._packed, strict=True)],
        )


class CpuOps:
    copies_weights = True
    keeps_narrow = False
    widens_weights = True

    def __init__(self) -> None:
        self.name = kernel_name()
        self.multiplies_integers = _kernels.isa() in INTEGER_ISAS

    def pack_linear(self, weight: Tensor, bias: Tensor | None = None, dtype: torch.dtype | None = None) -> CpuLinear:
        weight = weight.contiguous()
        bias = None if bias is None else bias.float().contiguous()
        packed = _kernels.Linear(weight, bias, DTYPES[dtype] if dtype else dtype_code(weight))
        return CpuLinear(packed, tuple(weight.shape), weight.dtype)

    def pack_affine(self, weight: AffineWeight, bias: Tensor | None = None) -> CpuLinear:
        packed = _kernels.Linear(weight.values, weight.scale, weight.low, bias, weight.bits)
        return CpuLinear(packed, tuple(weight.values.shape), torch.float32)

    def pack_float8(self, weight: Float8Weight, bias: Tensor | None = None) -> CpuLinear:
        return self.pack_linear(weight.dense(), bias)

    def pack_quantized(self, weight: QuantizedWeight, bias: Tensor | None, dtype: torch.dtype) -> CpuLinear:
        columns = weight.values.shape[1]
        if weight.slopes is not None and columns % BLOCK:
            raise ValueError(f"4-bit weights have {columns} columns; they must be a multiple of {BLOCK}")
        packed = _kernels.Linear(weight.values, weight.slopes, weight.offsets, weight.scales, bias, DTYPES[dtype])
        return CpuLinear(packed, tuple(weight.values.shape), dtype)

    def pack_low_rank(self, parts: Sequence[LowRankPart], in_features: int, out_features: int) -> CpuLowRank:
        return CpuLowRank(parts, in_features, out_features)

    def add_low_rank(self, x: Tensor, y: Tensor, runs: Sequence[LowRankRun]) -> None:
        native = []
        for addition, tokens in runs:
            if not isinstance(addition, CpuLowRank):
                raise TypeError(f"{addition!r} must be packed by CpuOps")
            shapes = (x.shape[0], addition.in_features), (x.shape[0], addition.out_features)
            if (x.shape, y.shape) != shapes or x.dtype != y.dtype or x.stride(1) != 1 or y.stride(1) != 1:
                raise ValueError(f"x {tuple(x.shape)} and y {tuple(y.shape)} must be {shapes}, with contiguous rows")
            native.append((addition.native, tokens.numpy()))
        _kernels.add_low_rank(native, x.shape[0], x.data_ptr(), x.stride(0), y.data_ptr(), y.stride(0), dtype_code(x))

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        shape, size = x.shape, x.shape[-1]
        check_contiguous("weight", weight, torch.float32, (size,))
        if x.dim() > 3 or x.stride(-1) != 1:
            x = x.reshape(-1, size).contiguous()
        y = torch.empty(shape, dtype=x.dtype, device="cpu")
        outer, inner = x.shape[0], x.shape[1] if x.dim() == 3 else 1
        strides = x.stride(0), x.stride(1) if x.dim() == 3 else 0
        _kernels.rms_norm(
            x.data_ptr(), *strides, weight.data_ptr(), eps, y.data_ptr(), dtype_code(x), outer, inner, size
        )
        return y

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> None:
        tokens, heads, size = x.shape
        half = cos.shape[1]
        check_contiguous("cos", cos, torch.float32, (tokens, half))
        check_contiguous("sin", sin, torch.float32, (tokens, half))
        if 2 * half > size or x.stride(2) != 1:
            raise ValueError(
                f"x is {tuple(x.shape)}; its contiguous last dimension must hold the {2 * half} that rotate"
            )
        _kernels.rotate(
            x.data_ptr(), x.stride(0), x.stride(1), dtype_code(x), cos.data_ptr(), sin.data_ptr(), tokens, heads, half
        )

    def widen(self, x: Tensor, soft_cap: float | None = None, out: Tensor | None = None) -> Tensor:
        if x.dtype == torch.float32:
            if soft_cap is None:
                return x
            out = x
        elif out is None:
            out = torch.empty(x.shape, dtype=torch.float32, device="cpu")
        check_contiguous("x", x, x.dtype, tuple(x.shape))
        check_contiguous("out", out, torch.float32, tuple(x.shape))
        _kernels.widen(x.data_ptr(), dtype_code(x), soft_cap or 0.0, out.data_ptr(), x.numel())
        return out

    def gated(self, x: Tensor, activation: Literal["silu", "gelu_tanh"]) -> Tensor:
        rows, columns = x.shape
        if columns % 2 or x.stride(1) != 1:
            raise ValueError(f"x is {tuple(x.shape)}; it must be [tokens, 2 n] with contiguous rows")
        y = torch.empty(rows, columns // 2, dtype=x.dtype, device="cpu")
        _kernels.gated(
            x.data_ptr(), x.stride(0), y.data_ptr(), dtype_code(x), ACTIVATIONS[activation], rows, columns // 2
        )
        return y
