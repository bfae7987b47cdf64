"""Linear layers on NVIDIA GPUs that compute with narrow weights as they lie, by `triton_quantized_kernels.py`.

Activations stay as they are. Products are exact, their sums are in float32, and nothing is rounded but these: an output
differs from the exact one by what additions in float32 lose. How a row is computed follows from the number of rows
alone: one row, up to 16, up to 64, or more (`forms_of`). Between forms last bits differ; within one, other rows change
none.

Nothing here waits for the device, and a CUDA graph may hold all of it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from pagemill.ops.packed_weight import PackedWeight, pack_affine, pack_float8, pack_quantized
from pagemill.ops.quantized import AffineWeight, Float8Weight, QuantizedWeight
from pagemill.ops.triton_linear import sum_parts
from pagemill.ops.triton_ops import TritonOps
from pagemill.ops.triton_quantized_kernels import multiply_row, multiply_rows
from pagemill.triton_launch import TYPES, launcher

KERNEL_VERSION = 2
"""Raised whenever the kernels' arithmetic, forms, tiles or parts change: stored K/V of other bits must not be found."""
MAGIC = 0x4B000000
ROW_OUTPUTS, ROW_CHUNKS, ROW_WARPS = 4, 128, 4
"""A program that multiplies one row has so many outputs, whose codes are loaded together, chunks of 16 bytes of each
at a time, and warps."""
PROGRAMS, MOST_PARTS = 512, 16
"""Columns are cut into parts until so many programs share the work, or there are so many parts."""


class Form(NamedTuple):
    """Says how up to `rows` rows are multiplied: outputs and rows of a tile, warps, stages of loads under way.

    parts: True if columns are cut so that few tiles fill the GPU.
    """

    rows: int | None
    outputs: int
    tokens: int
    warps: int
    stages: int
    parts: bool


FORMS = (Form(16, 64, 16, 4, 4, True), Form(64, 64, 64, 4, 3, True), Form(None, 128, 64, 8, 3, False))
SCALAR_FORMS = (Form(16, 32, 16, 4, 1, True), Form(None, 32, 16, 4, 1, False))
"""Where products take no matrix units, every operand takes a register."""
HOPPER_FORMS = (Form(16, 32, 16, 4, 4, True), Form(64, 32, 64, 4, 3, True), Form(None, 64, 64, 2, 3, False))
HOPPER_COLUMNS = 32
"""Products that take so many columns at a time have tiles of x whose rows have 64 bytes in shared memory: those of 8
bits in groups of 32, and of halves of 64. Triton 3.6 and 3.7 multiply such tiles wrongly by Hopper's own instructions,
for which HOPPER_FORMS have too few outputs or warps."""


def forms_of(capability: tuple[int, int], dtype: torch.dtype, columns: int) -> tuple[Form, ...]:
    """Returns the forms of products with x of a dtype, so many columns at a time."""
    if capability < (8, 0) or dtype == torch.float32:  # Triton takes no matrix units
        return SCALAR_FORMS
    return HOPPER_FORMS if capability[0] == 9 and columns == HOPPER_COLUMNS else FORMS


def form_of(tokens: int, forms: tuple[Form, ...]) -> Form:
    """Returns the form of so many rows, two at least."""
    return next(form for form in forms if form.rows is None or tokens <= form.rows)


def parts_of(form: Form, out_features: int, units: int) -> int:
    """Returns into how many parts columns are cut: it does not depend on how many rows there are."""
    if not form.parts:
        return 1
    return max(1, min(MOST_PARTS, PROGRAMS // -(-out_features // form.outputs), units // 4))


class NarrowLinear:
    """A linear layer whose weight stays as narrow as it was stored.

    bias: fp32. dtype: of `rows`. capability: the GPU's.
    """

    def __init__(
        self, weight: PackedWeight, bias: Tensor | None, dtype: torch.dtype, capability: tuple[int, int]
    ) -> None:
        self.weight, self.dtype = weight, dtype
        self.bias = None if bias is None else bias.to(weight.codes.device, torch.float32)
        self.out_features, self.in_features = len(weight.codes), weight.columns
        self.nbytes = weight.nbytes + (0 if self.bias is None else self.bias.nbytes)
        self._capability = capability
        self._pointers = _pointers(weight, self.bias)
        self._sizes = weight.codes.shape[1] // 16, weight.scale.fine.shape[1]
        """Chunks of 16 bytes, and scales, of a row."""
        self._constants = _constants(weight)

    def __call__(self, x: Tensor) -> Tensor:
        if x.dim() != 2 or x.shape[1] != self.in_features or x.dtype not in TYPES:
            raise ValueError(
                f"x is {x.dtype} {tuple(x.shape)}; it must be [tokens, {self.in_features}] of float32, bfloat16 or "
                "float16"
            )
        x = x if x.stride(1) == 1 else x.contiguous()
        y = torch.empty(x.shape[0], self.out_features, dtype=x.dtype, device=x.device)
        if len(x) == 1:
            self._multiply_row(x, y)
        elif len(x):
            self._multiply_rows(x, y)
        return y

    def rows(self, ids: Tensor) -> Tensor:
        return self.weight.dense(ids).to(self.dtype)

    def _multiply_row(self, x: Tensor, y: Tensor) -> None:
        multiplying = launcher(
            multiply_row, **self._constants, BLOCK_N=ROW_OUTPUTS, BLOCK_C=ROW_CHUNKS, num_warps=ROW_WARPS
        )
        grid = (-(-self.out_features // ROW_OUTPUTS), 1, 1)
        multiplying(grid, x, *self._pointers, y, self.out_features, self.in_features, *self._sizes, MAGIC)

    def _multiply_rows(self, x: Tensor, y: Tensor) -> None:
        tokens, weight = len(x), self.weight
        in_byte = 1 if weight.kind in ("int8", "float8") else 2
        form = form_of(tokens, forms_of(self._capability, x.dtype, weight.unit // in_byte))
        chunks, groups = self._sizes
        units = chunks * 16 * in_byte // weight.unit
        of_part = -(-units // parts_of(form, self.out_features, units))
        count = -(-units // of_part)
        parts = torch.empty(count, *y.shape, dtype=torch.float32, device=x.device) if count > 1 else None
        multiplying = launcher(
            multiply_rows, **self._constants, BLOCK_N=form.outputs, BLOCK_M=form.tokens, DOT=TYPES[x.dtype],
            num_warps=form.warps, num_stages=form.stages,
        )  # fmt: skip
        multiplying(
            (-(-self.out_features // form.outputs), -(-tokens // form.tokens), count),
            x, *self._pointers, y, parts, tokens, self.out_features, self.in_features, chunks, groups, units, of_part,
            x.stride(0), MAGIC,
        )  # fmt: skip
        if parts is not None:
            sum_parts(parts, self.bias, y)


def _pointers(weight: PackedWeight, bias: Tensor | None) -> tuple[Tensor | None, ...]:
    low = (None, None) if weight.low is None else (weight.low.fine, weight.low.coarse)
    return weight.codes, weight.top, weight.scale.fine, weight.scale.coarse, weight.zero, *low, bias


def _constants(weight: PackedWeight) -> dict[str, object]:
    scale, low = weight.scale, weight.low
    coarse = next((each.coarse for each in (scale, low) if each is not None and each.coarse is not None), None)
    return {
        "KIND": weight.kind,
        "UNIT": weight.unit,
        "GROUP": weight.group,
        "PER_COARSE": 1 if coarse is None else scale.fine.shape[1] // coarse.shape[1],
        "ORIGIN": weight.origin,
    }


class TritonQuantizedOps(TritonOps):
    """Implements `Ops` as TritonOps does, and keeps narrow weights as they are. capability, early: of TritonOps."""

    keeps_narrow = True

    def __init__(self, capability: tuple[int, int], early: bool = False) -> None:
        super().__init__(capability, early)
        self.name += f"-{capability[0]}.{capability[1]}-{KERNEL_VERSION}"

    def pack_affine(self, weight: AffineWeight, bias: Tensor | None = None) -> NarrowLinear:
        return NarrowLinear(pack_affine(weight), bias, torch.float32, self._capability)

    def pack_float8(self, weight: Float8Weight, bias: Tensor | None = None) -> NarrowLinear:
        return NarrowLinear(pack_float8(weight), bias, torch.float32, self._capability)

    def pack_quantized(self, weight: QuantizedWeight, bias: Tensor | None, dtype: torch.dtype) -> NarrowLinear:
        return NarrowLinear(pack_quantized(weight), bias, dtype, self._capability)
