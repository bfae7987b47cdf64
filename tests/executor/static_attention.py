"""TorchAttention that waits for nothing in decode steps, so that a graph can hold it. What rows have in common it reads
by the first one's table, as GPUs' attention does."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from pagemill.attention.interface import JoinedRows
from pagemill.attention.torch_backend import TorchAttention, _Part

CHUNK = 16
"""Keys that rows have in common are multiples of it: a block."""


class StaticAttention(TorchAttention):
    """Attends rows of one query token in one part, as wide as the longest context is said to be. What is not to be
    written is written as the first token is, which is."""

    waits = False

    def joined_rows(self, heads, kv_heads):
        return JoinedRows(3, lambda context_lens, rows: np.full_like(context_lens, CHUNK))

    def attend(self, query, cache, batch, group, *, window=None, **options):
        if batch.common is not None and window is None:
            of_group, size = batch.groups[group], cache.block_shape[1]
            begins = torch.arange(of_group.tables.shape[1], device=query.device) * size
            tables = [of_group.tables[0]]
            for row in range(1, len(of_group.tables)):
                tables.append(torch.where(begins < batch.common[row], tables[-1], of_group.tables[row]))
            groups = [*batch.groups]
            groups[group] = replace(of_group, tables=torch.stack(tables))
            batch = replace(batch, groups=tuple(groups))
        return super().attend(query, cache, batch, group, window=window, **options)

    def _parts(self, batch, heads, head_dim):
        if batch.max_query_len > 1:
            return super()._parts(batch, heads, head_dim)
        rows = torch.arange(len(batch.context_lens), device=batch.positions.device)
        return [_Part(rows, rows.unsqueeze(1), 1, batch.max_context_len)]

    def _tokens_to_write(self, slots):
        places = torch.arange(len(slots), device=slots.device)
        return torch.where(slots >= 0, places, 0)
