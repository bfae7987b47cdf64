"""Checks of what attention is given, for backends whose kernels take addresses and strides."""

from __future__ import annotations

import torch
from torch import Tensor

from pagemill.attention.interface import AttentionBatch, LayerCache
from pagemill.ops.quantized import check_contiguous


def check_write(
    key: Tensor, value: Tensor | None, cache: LayerCache, slots: Tensor, remainder_slots: Tensor | None = None
) -> None:
    """Raises ValueError for shapes, strides and dtypes that `AttentionBackend.write` does not take, TypeError where key
    and value have different dtypes."""
    tokens, (kv_heads, _, head_dim) = slots.shape[0], cache.block_shape
    if (value is None) != cache.values_in_keys:
        raise ValueError("a value is given where, and only where, the cache's values do not lie in its keys")
    for name, given, dim in (("key", key, head_dim), ("value", value, cache.value_dim)):
        expected = (tokens, kv_heads, dim)
        if given is not None and (given.shape != expected or given.stride(2) != 1):
            raise ValueError(f"{name} is {tuple(given.shape)}; it must be {expected}, last dimension contiguous")
    if value is not None and value.dtype != key.dtype:
        raise TypeError(f"key is {key.dtype} and value {value.dtype}; they must be equal")
    check_contiguous("slots", slots, torch.int64, (tokens,))
    if remainder_slots is not None:
        check_contiguous("remainder_slots", remainder_slots, torch.int64, (tokens,))


def check_attend(
    query: Tensor,
    cache: LayerCache,
    batch: AttentionBatch,
    group: int,
    key_start: Tensor | None,
    key_end: Tensor | None,
) -> None:
    """Raises ValueError for shapes, strides and dtypes that `AttentionBackend.attend` does not take."""
    tokens, heads, head_dim = query.shape
    of_group, rows = batch.groups[group], batch.context_lens.shape[0]
    kv_heads, _, cached_dim = cache.block_shape
    if head_dim != cached_dim or heads % kv_heads or query.stride(2) != 1:
        raise ValueError(
            f"query is {tuple(query.shape)}; heads must be a multiple of {kv_heads}, head_dim must be {cached_dim} "
            "and contiguous"
        )
    remainders = () if of_group.remainders is None else (of_group.remainders.tables,)
    for tables in (of_group.tables, *remainders):
        if tables.dtype != torch.int32 or tables.shape[0] < rows or tables.stride(1) != 1:
            raise ValueError(
                f"tables must be int32 [{rows}, entries], entries side by side, not {tables.dtype} "
                f"{tuple(tables.shape)} with strides {tables.stride()}"
            )
    check_contiguous("query_start", batch.query_start, torch.int32, (rows + 1,))
    check_contiguous("context_lens", batch.context_lens, torch.int32, (rows,))
    check_contiguous("positions", batch.positions, torch.int64, (tokens,))
    if batch.common is not None:
        check_contiguous("common", batch.common, torch.int32, (rows,))
    for name, limit in (("key_start", key_start), ("key_end", key_end)):
        if limit is not None:
            check_contiguous(name, limit, torch.int32, (rows,))
