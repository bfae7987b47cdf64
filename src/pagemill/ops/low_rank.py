"""Low-rank additions to linear layers (LoRA), as plain tensors: what adapters are before a device packs them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class LowRankPart:
    """Adds scale * b (a x) to the outputs from `begin` on: a [rank, in_features], b [outputs, rank], of one dtype."""

    a: Tensor
    b: Tensor
    begin: int
    scale: float


def check_parts(parts: Sequence[LowRankPart], in_features: int, out_features: int) -> None:
    """Raises ValueError unless the parts fit a layer of these sizes, in one dtype, and none adds to another's
    outputs."""
    end = 0
    for part in sorted(parts, key=lambda part: part.begin):
        fits = part.a.shape == (part.b.shape[1], in_features) and end <= part.begin
        end = part.begin + len(part.b)
        if not fits or end > out_features or not part.a.dtype == part.b.dtype == parts[0].a.dtype:
            raise ValueError(
                f"a {tuple(part.a.shape)} and b {tuple(part.b.shape)} from output {part.begin} on do not fit a layer "
                f"of {in_features} inputs and {out_features} outputs beside the other parts"
            )
    if not parts:
        raise ValueError("an addition has one part at least")


def pad_to_blocks(matrix: Tensor, rows: int) -> Tensor:
    """Returns [blocks, columns, rows] of a matrix [.., columns], whose last block is filled up with zeros."""
    blocks = -(-len(matrix) // rows)
    padded = torch.zeros(blocks * rows, matrix.shape[1], dtype=matrix.dtype, device=matrix.device)
    padded[: len(matrix)] = matrix
    return padded.view(blocks, rows, -1).transpose(1, 2).contiguous()
