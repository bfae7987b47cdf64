"""Torch's attention gathers no frame of which no query sees a key: it may have no memory any more."""

from __future__ import annotations

import pytest
import torch

from attention.paged_case import PagedCase
from pagemill.attention.torch_backend import TorchAttention


@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("dtype", [torch.float32, "int4_mixed"])
def test_stale_entries_of_tables_are_not_followed(window, dtype) -> None:
    """A gather of them would end in an IndexError here, and on a GPU in an illegal address."""
    case, backend = PagedCase([(90, 3), (17, 3), (40, 3)], dtype=dtype), TorchAttention()
    case.write_all(backend)
    query, batch = case.whole()
    expected, _ = backend.attend(query, case.cache, batch, 0, scale=0.1, window=window)
    gone, group = case.pool.capacity + 7, batch.groups[0]
    for row, (context, length) in enumerate(case.rows):
        first = 0 if window is None else max(0, context - length - window + 1) // case.block_size
        group.tables[row, -(-context // case.block_size) :] = gone
        group.tables[row, :first] = gone
        if group.remainders is not None:
            group.remainders.tables[row, -(-context // case.block_size) :] = gone
    output, _ = backend.attend(query, case.cache, batch, 0, scale=0.1, window=window)
    assert torch.equal(output, expected)
