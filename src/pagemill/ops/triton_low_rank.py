"""Low-rank additions (LoRA) on NVIDIA GPUs: two kernels for all parts of an addition, as in Punica's and S-LoRA's split
into a product that shrinks and one that expands (Chen et al., MLSys 2024; Sheng et al., MLSys 2024)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton.language as tl
from torch import Tensor
from torch.nn.functional import pad

from pagemill.ops.low_rank import LowRankPart, check_parts
from pagemill.ops.triton_low_rank_kernels import expand, shrink
from pagemill.triton_launch import TYPES, launcher

RANKS = 16
"""Ranks of a block: a product takes no fewer."""
OUTPUTS = 64
TOKENS = 16
INPUTS = 128


class TritonLowRank:
    """Holds an addition's parts one behind the other, with ranks padded by zeros to blocks of RANKS."""

    def __init__(self, parts: Sequence[LowRankPart], in_features: int, out_features: int) -> None:
        check_parts(parts, in_features, out_features)
        device = parts[0].a.device
        downs, ups, scales, blocks = [], [], list[float](), list[tuple[int, ...]]()
        rank_begin = element_begin = 0
        for part in parts:
            outputs, rank = part.b.shape
            ranks = -(-rank // RANKS) * RANKS
            downs.append(pad(part.a, (0, 0, 0, ranks - rank)))
            ups.append(pad(part.b, (0, ranks - rank)).reshape(-1))
            scales += [part.scale] * (ranks // RANKS)
            for at in range(0, outputs, OUTPUTS):
                count = min(OUTPUTS, outputs - at)
                blocks.append((part.begin + at, count, element_begin + at * ranks, rank_begin, ranks))
            rank_begin += ranks
            element_begin += outputs * ranks
        self.in_features, self.out_features = in_features, out_features
        self.a, self.b = torch.cat(downs).contiguous(), torch.cat(ups)
        self.scales = torch.tensor(scales, dtype=torch.float32, device=device)
        self.blocks = torch.tensor(blocks, dtype=torch.int64, device=device)
        self.nbytes = sum(each.nbytes for each in (self.a, self.b, self.scales, self.blocks))

    def add(self, x: Tensor, y: Tensor, tokens: Tensor, matrix_units: bool) -> None:
        """Adds to y [.., out_features] what x [.., in_features] gives for `tokens`, int64, each of them once.

        matrix_units: the GPU has matrix units for the dtype of x, and Triton takes them. Raises ValueError for tensors
        of other shapes or dtypes.
        """
        shapes = (x.shape[0], self.in_features), (x.shape[0], self.out_features)
        if (x.shape, y.shape) != shapes or x.dtype != y.dtype or x.stride(1) != 1 or y.stride(1) != 1:
            raise ValueError(f"x {tuple(x.shape)} and y {tuple(y.shape)} must be {shapes}, with contiguous rows")
        if tokens.dtype != torch.int64 or tokens.dim() != 1 or not tokens.is_contiguous():
            raise ValueError(f"tokens must be contiguous int64 [n], not {tokens.dtype} {tuple(tokens.shape)}")
        count, ranks = len(tokens), len(self.a)
        if not count:
            return
        narrow = matrix_units and x.dtype == self.a.dtype
        low = torch.empty(count, ranks, dtype=torch.float32, device=x.device)
        tiles = -(-count // TOKENS)
        shrinking = launcher(
            shrink, INNER=self.in_features, RANKS=RANKS, BLOCK_M=TOKENS, BLOCK_K=INPUTS if narrow else INPUTS // 4,
            DOT=TYPES[x.dtype] if narrow else tl.float32, num_stages=4 if narrow else 2,
        )  # fmt: skip
        shrinking((tiles, ranks // RANKS, 1), x, tokens, self.a, self.scales, low, count, x.stride(0), ranks)
        expanding = launcher(expand, RANKS=RANKS, BLOCK_M=TOKENS, BLOCK_N=OUTPUTS, num_stages=1)
        expanding((tiles, len(self.blocks), 1), low, tokens, self.b, self.blocks, y, count, ranks, y.stride(0))
