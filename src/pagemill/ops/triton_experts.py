"""Mixtures of experts on NVIDIA GPUs without waiting for the device: tokens are sorted by expert there, and one kernel
multiplies all experts' tokens, as in MegaBlocks (Gale et al., MLSys 2023). An expert's weights are read where they lie,
and only if a token has chosen it.

Bits of a token's result depend on the token, and on how many tokens there are as far as tiles do (`expert_tile`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
import triton
from torch import Tensor

from pagemill.ops.interface import Linear
from pagemill.ops.quantized import check_contiguous
from pagemill.ops.torch_ops import TorchLinear
from pagemill.ops.triton_expert_kernels import arrange, combine, multiply_experts, route
from pagemill.triton_launch import launcher

COUNTED = 8192
"""Assignments that are sorted by counting at most; torch's sort takes several launches."""
COMBINED = 1024
"""Elements of a token that a program combines."""


@dataclass(frozen=True, slots=True)
class ExpertTile:
    """Says how a product is cut: rows, outputs and inputs at a time, warps, and stages of loads under way."""

    rows: int
    outputs: int
    inputs: int
    warps: int
    stages: int


def expert_tile(rows: int, gated: bool, matrix_units: bool) -> ExpertTile:
    """Returns the tile for so many rows of an expert, on average.

    gated: two products share the rows. matrix_units: the GPU's multiply the dtype.
    """
    if not matrix_units:
        return ExpertTile(16, 32, 32, 4, 1)
    if rows <= 16:  # all the time goes into reading weights
        return ExpertTile(16, 32 if gated else 64, 128, 4, 4)
    if rows <= 64:
        return ExpertTile(64, 32 if gated else 64, 64, 4, 4)
    return ExpertTile(128, 64 if gated else 128, 64, 8, 3)


def stack(linears: Sequence[Linear]) -> Tensor | None:
    """Returns the weights of layers of one shape as one tensor [layers, out_features, in_features], whose parts the
    layers keep in the place of their own. None for layers that are not plain weights: quantized, in parts, or biased.

    At no time is more than one weight held twice beside the tensor.
    """
    plain = [linear for linear in linears if isinstance(linear, TorchLinear) and linear.bias is None]
    if len(plain) < len(linears):
        return None
    first = plain[0].weight
    stacked = torch.empty(len(plain), *first.shape, dtype=first.dtype, device=first.device)
    for part, linear in zip(stacked, plain, strict=True):
        linear.weight = part.copy_(linear.weight)
    return stacked


class Routing(NamedTuple):
    """Says which experts each token goes through, in ascending order, int32 [tokens, chosen], and how much each counts,
    fp32 [tokens, chosen]; both contiguous."""

    experts: Tensor
    shares: Tensor

    @classmethod
    def of(cls, shares: Tensor, experts: Tensor) -> Routing:
        """Returns what these say, [tokens, chosen] each, in any order."""
        ascending, order = torch.sort(experts, dim=-1)
        return cls(ascending.int(), shares.gather(1, order))


def most_likely(logits: Tensor, chosen: int, *, normalize: bool) -> Routing:
    """Returns each token's `chosen` most likely experts with their probabilities.

    logits: fp32 [tokens, experts], contiguous. normalize: the shares are made to sum to 1.
    """
    tokens, experts = logits.shape
    if logits.dtype != torch.float32 or not logits.is_contiguous() or chosen > experts:
        raise ValueError(
            f"logits must be contiguous float32 [tokens, {chosen} or more experts], not {logits.dtype} {logits.shape}"
        )
    assigned = torch.empty(tokens, chosen, dtype=torch.int32, device=logits.device)
    shares = torch.empty(tokens, chosen, dtype=torch.float32, device=logits.device)
    if tokens:
        routing = launcher(
            route, EXPERTS=experts, PLACES=triton.next_power_of_2(experts), CHOSEN=chosen, NORMALIZE=normalize,
            num_warps=1,
        )  # fmt: skip
        routing((tokens, 1, 1), logits, assigned, shares)
    return Routing(assigned, shares)


def apply_experts(
    x: Tensor,
    routing: Routing,
    gate_up: Tensor,
    down: Tensor,
    *,
    activation: Literal["silu", "gelu_tanh"],
    matrix_units: bool,
) -> Tensor:
    """Returns the sum of what each token's experts give, times their shares, [tokens, hidden], in the dtype of x.

    x [tokens, hidden], gate_up [experts, 2 * size, hidden] and down [experts, hidden, size] are contiguous and of one
    dtype. matrix_units: the GPU has matrix units for the dtype, and Triton takes them.
    """
    (tokens, hidden), experts, size = x.shape, gate_up.shape[0], down.shape[2]
    chosen = routing.experts.shape[1]
    if gate_up.shape != (experts, 2 * size, hidden) or down.shape != (experts, hidden, size) or chosen > experts:
        raise ValueError(
            f"x {tuple(x.shape)}, gate_up {tuple(gate_up.shape)}, down {tuple(down.shape)} and {chosen} chosen experts "
            "do not fit each other"
        )
    for name, tensor, dtype in (("x", x, x.dtype), ("gate_up", gate_up, x.dtype), ("down", down, x.dtype)):
        if tensor.dtype != dtype or not tensor.is_contiguous():
            raise ValueError(f"{name} must be contiguous {dtype}, not {tensor.dtype} with strides {tensor.stride()}")
    check_contiguous("experts", routing.experts, torch.int32, (tokens, chosen))
    check_contiguous("shares", routing.shares, torch.float32, (tokens, chosen))
    y = torch.empty_like(x)
    if not tokens:
        return y
    rows, places = tokens * chosen, triton.next_power_of_2(experts)
    inner = torch.empty(rows, size, dtype=x.dtype, device=x.device)
    parts = torch.empty(rows, hidden, dtype=x.dtype, device=x.device)

    def multiply(source: Tensor, weight: Tensor, target: Tensor, gated: bool) -> None:
        tile, outputs = expert_tile(-(-rows // experts), gated, matrix_units), target.shape[1]
        tiles = rows // tile.rows + min(experts, rows)  # every expert's last tile may be part of one
        multiplying = launcher(
            multiply_experts,
            INNER=source.shape[1], OUTER=outputs, EXPERTS=experts, PLACES=places, CHOSEN=chosen,
            GATED=gated, GELU=activation == "gelu_tanh",
            BLOCK_M=tile.rows, BLOCK_N=tile.outputs, BLOCK_K=tile.inputs,
            num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip
        grid = (tiles, -(-outputs // tile.outputs), 1)
        multiplying(grid, source, weight, target, order, begins, source.stride(0))

    order, begins = _sort(routing.experts.view(-1), experts)
    multiply(x, gate_up, inner, gated=True)
    multiply(inner, down, parts, gated=False)
    combining = launcher(combine, SIZE=hidden, CHOSEN=chosen, BLOCK=COMBINED, enable_fp_fusion=False)
    combining((tokens, -(-hidden // COMBINED), 1), parts, routing.shares, y)
    return y


def _sort(assigned: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """Returns the order of assignments by expert, int64, and where each expert's begin in it, int32 [experts + 1]."""
    rows = len(assigned)
    if rows > COUNTED:
        ascending, order = torch.sort(assigned, stable=True)
        bounds = torch.arange(experts + 1, dtype=torch.int32, device=assigned.device)
        return order, torch.searchsorted(ascending, bounds, out_int32=True)
    order = torch.empty(rows, dtype=torch.int64, device=assigned.device)
    begins = torch.empty(experts + 1, dtype=torch.int32, device=assigned.device)
    block = 32
    arranging = launcher(arrange, EXPERTS=experts, BLOCK=block, CHUNK=128)
    arranging((-(-(rows + experts + 1) // block), 1, 1), assigned, order, begins, rows)
    return order, begins
