"""Rows of a packed weight come back as they were packed, whatever the instruction set's format."""

from __future__ import annotations

import pytest
import torch


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("n", "k"), [(1, 1), (33, 7), (100, 33), (64, 64), (161, 130)])
def test_rows(ops, dtype, n, k):
    weight = torch.randn(n, k, generator=torch.Generator().manual_seed(n)).to(dtype)
    ids = torch.tensor([0, n - 1, n // 2, n - 1])
    rows = ops.pack_linear(weight, torch.ones(n)).rows(ids)
    assert rows.dtype == dtype
    assert torch.equal(rows, weight[ids])


@pytest.mark.parametrize("wrong", [-1, 5])
def test_rows_outside(ops, wrong):
    with pytest.raises(IndexError, match=r"not all in 0 \.\. 4"):
        ops.pack_linear(torch.ones(5, 3)).rows(torch.tensor([0, wrong]))
