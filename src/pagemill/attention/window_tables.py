"""Block tables for kernels that load whole tiles of keys, also what lies before a window in its first tile."""

from __future__ import annotations

import torch
from torch import Tensor

from pagemill.attention.interface import AttentionBatch


def window_tables(batch: AttentionBatch, group: int, window: int | None, block_size: int) -> Tensor:
    """Returns tables int32 [rows, entries] in which entries before a row's window, if there is one, name the window's
    first block.

    What lies there is masked, but its values are multiplied by 0: they must be finite, so they must be the row's own.
    Blocks before the window may be given away (-1). With a window longer than a block, its first block is full.
    Does not wait for the device. Raises ValueError for a shorter window.
    """
    tables = batch.groups[group].tables
    if window is None:
        return tables
    if window <= block_size:
        raise ValueError(f"window is {window}; it must be longer than a block of {block_size} tokens")
    query_lens = batch.query_start[1:] - batch.query_start[:-1]
    first_key = (batch.context_lens - query_lens - (window - 1)).clamp_min(0)
    first = first_key.div(block_size, rounding_mode="floor").long()
    entries = torch.arange(tables.shape[1], dtype=torch.int64, device=tables.device)
    index = torch.maximum(entries, first.unsqueeze(1)).clamp_max(tables.shape[1] - 1)
    return tables.gather(1, index).clamp_min(0)
