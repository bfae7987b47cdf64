"""cos and sin of rotary embeddings by position, computed once per position and kept."""

from __future__ import annotations

import torch

from pagemill.models.spec import RopeSpec

_PIECE = 512
"""Positions computed at a time, always the same ones together: a vectorized cos may differ by where an element lies."""


class AngleTable:
    """Grows to the longest context seen.

    cos, sin: fp32 [positions, rotary_dim / 2], contiguous, the attention factor counted in.
    """

    def __init__(self, rope: RopeSpec, device: torch.device) -> None:
        self._inv_freq = torch.tensor(rope.inv_freq, dtype=torch.float32, device=device)
        self._factor = rope.factor
        self.cos = self.sin = torch.empty(0, len(rope.inv_freq), device=device)

    def reach(self, positions: int) -> None:
        """Afterwards positions 0 .. positions - 1 have rows."""
        begin = self.cos.shape[0]
        if begin >= positions:
            return
        cos, sin = [self.cos], [self.sin]
        for first in range(begin, positions, _PIECE):
            piece = torch.arange(first, first + _PIECE, device=self._inv_freq.device)
            angles = piece.unsqueeze(-1).float() * self._inv_freq
            cos.append(torch.cos(angles) * self._factor)
            sin.append(torch.sin(angles) * self._factor)
        self.cos, self.sin = torch.cat(cos), torch.cat(sin)
