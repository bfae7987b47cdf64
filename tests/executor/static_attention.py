"""TorchAttention that waits for nothing in decode steps, so that a graph can hold it, as GPUs' attention does."""

from __future__ import annotations

import torch

from pagemill.attention.torch_backend import TorchAttention, _Part


class StaticAttention(TorchAttention):
    """Attends rows of one query token in one part, as wide as the longest context is said to be. What is not to be
    written is written as the first token is, which is."""

    waits = False

    def _parts(self, batch, heads, head_dim):
        if batch.max_query_len > 1:
            return super()._parts(batch, heads, head_dim)
        rows = torch.arange(len(batch.context_lens), device=batch.positions.device)
        return [_Part(rows, rows.unsqueeze(1), 1, batch.max_context_len)]

    def _tokens_to_write(self, slots):
        places = torch.arange(len(slots), device=slots.device)
        return torch.where(slots >= 0, places, 0)
