"""Linear layers on NVIDIA GPUs with weights in bfloat16 or float16: few rows run in `triton_linear_kernels.py`, more in
torch (cuBLAS).

Up to how many rows, says LIMITS; how so many rows are computed, FORMS. Both are data, by compute capability, as
measured by `python -m benchmarks.gpu_products`. Which form computes a row follows from the number of rows; within a
form, a row's bits do not depend on other rows.

Nothing here waits for the device, and a CUDA graph may hold all of it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from pagemill.ops.torch_ops import TorchLinear
from pagemill.ops.triton_early import launch_options
from pagemill.ops.triton_linear_kernels import multiply_few, multiply_one
from pagemill.ops.triton_quantized_kernels import add_parts
from pagemill.triton_launch import launcher

SUMMED = 1024
"""Sums of parts that a program adds."""


class Form(NamedTuple):
    """Says how up to `rows` rows are multiplied: outputs, columns and rows of a tile, warps, stages of loads under way.

    rows: of the tile too; a single row takes no matrix units, and loads its next tile itself, whatever `stages` says.
    programs: columns are cut into at most so many parts that there are no more programs, nor parts of less than two
    tiles. tiles: the memory unit copies tiles (TMA), where it can.
    """

    rows: int
    outputs: int
    columns: int
    warps: int
    stages: int
    programs: int
    tiles: bool = False


class Limit(NamedTuple):
    """Says that layers of at most so many outputs take up to so many rows to Triton."""

    outputs: int
    rows: int


SMALL_FORMS = (Form(1, 4, 1024, 4, 1, 512), Form(16, 64, 128, 4, 4, 512), Form(64, 128, 64, 4, 3, 512))
FORMS = {8: SMALL_FORMS, 9: (Form(1, 4, 1024, 4, 1, 1), Form(32, 64, 256, 4, 4, 1, tiles=True)), 12: SMALL_FORMS}
"""By the first part of the compute capability: higher ones take the highest, lower ones nothing. In ascending order.
Those without LIMITS are run by benchmarks alone, to find them. GPUs of 12 have as little shared memory as some of 8."""
LIMITS: dict[int, tuple[Limit, ...]] = {9: (Limit(1 << 20, 32),)}
"""By the first part of the compute capability, in ascending order of outputs; larger layers take nothing to Triton."""


def forms_of(capability: tuple[int, int]) -> tuple[Form, ...]:
    """Returns the forms of a GPU."""
    return FORMS[max(major for major in FORMS if major <= capability[0])] if capability[0] >= min(FORMS) else ()


def most_rows(capability: tuple[int, int], out_features: int) -> int:
    """Returns how many rows of a layer Triton multiplies at most."""
    limits = LIMITS.get(capability[0], ())
    return next((limit.rows for limit in limits if out_features <= limit.outputs), 0)


def parts_of(form: Form, out_features: int, in_features: int) -> int:
    """Returns into how many parts columns are cut: it does not depend on how many rows there are."""
    programs, tiles = -(-out_features // form.outputs), -(-in_features // form.columns)
    return max(1, min(form.programs // programs, tiles // 2))


def multiply(x: Tensor, weight: Tensor, bias: Tensor | None, form: Form, early: bool = False) -> Tensor:
    """Returns x weight^T + bias [tokens, out_features] for x [tokens, in_features], of one to `form.rows` tokens, and
    the contiguous weight [out_features, in_features], all of one dtype.

    early: begin while the kernel before ends (see `triton_early.py`). The weight must have been there for longer.
    """
    tokens, (outputs, inputs) = len(x), weight.shape
    y = torch.empty(tokens, outputs, dtype=x.dtype, device=x.device)
    tiles = triton.cdiv(inputs, form.columns)
    columns = form.columns * triton.cdiv(tiles, parts_of(form, outputs, inputs))
    count = triton.cdiv(inputs, columns)
    parts = torch.empty(count, tokens, outputs, dtype=torch.float32, device=x.device) if count > 1 else None
    grid = (triton.cdiv(outputs, form.outputs), count)
    options = {"num_warps": form.warps, **launch_options(early)}
    with torch.cuda.device_of(x):  # type: ignore[no-untyped-call]  # kernels start on the current device
        if form.rows == 1:
            start = launcher(multiply_one, BLOCK_N=form.outputs, BLOCK_K=form.columns, **options)
            start((*grid, 1), x, weight, bias, y, parts, outputs, inputs, columns)
        else:
            x_tiles = weight_tiles = None
            if form.tiles and all(_can_be_tiled(each) for each in (x, weight)):
                x_tiles = TensorDescriptor.from_tensor(x, [form.rows, form.columns])
                weight_tiles = TensorDescriptor.from_tensor(weight, [form.outputs, form.columns])
            multiply_few[grid](
                x, x_tiles, weight, weight_tiles, bias, y, parts, tokens, outputs, inputs, columns, x.stride(0),
                BLOCK_N=form.outputs, BLOCK_M=form.rows, BLOCK_K=form.columns, num_stages=form.stages, **options,
            )  # fmt: skip
        if parts is not None:
            sum_parts(parts, bias, y, early)
    return y


def sum_parts(parts: Tensor, bias: Tensor | None, y: Tensor, early: bool = False) -> None:
    """Writes to y [tokens, out_features] the sums of parts fp32 [parts, tokens, out_features], and bias."""
    adding = launcher(add_parts, BLOCK=SUMMED, **launch_options(early))
    adding((-(-y.numel() // SUMMED), 1, 1), parts, bias, y, y.numel(), y.shape[1], len(parts))


def _can_be_tiled(matrix: Tensor) -> bool:
    """Returns True if the memory unit can copy tiles of it: rows begin at multiples of 16 bytes."""
    return matrix.data_ptr() % 16 == 0 and matrix.stride(0) * matrix.itemsize % 16 == 0


class TritonLinear(TorchLinear):
    """Keeps the weight as it is. Up to `few` rows run in Triton, more in torch.

    early: as for `multiply`.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, forms: tuple[Form, ...], few: int, early: bool) -> None:
        super().__init__(weight, bias)
        self._forms, self.few, self._early = forms, few, early

    def __call__(self, x: Tensor) -> Tensor:
        fits = x.dim() == 2 and x.shape[1] == self.weight.shape[1] and x.dtype == self.weight.dtype
        if fits and 0 < len(x) <= self.few and x.stride(1) == 1:
            form = next(form for form in self._forms if len(x) <= form.rows)
            return multiply(x, self.weight, self.bias, form, self._early)
        return super().__call__(x)


def pack(
    weight: Tensor, bias: Tensor | None, capability: tuple[int, int], early: bool = False
) -> TorchLinear | TritonLinear:
    """Returns a layer that takes to Triton the rows that a GPU of this capability multiplies faster so."""
    forms, rows = forms_of(capability), most_rows(capability, len(weight))
    rows = min(rows, max((form.rows for form in forms), default=0))
    if not rows or weight.dtype not in (torch.bfloat16, torch.float16) or not weight.is_contiguous():
        return TorchLinear(weight, bias)
    return TritonLinear(weight, bias, forms, rows, early)
