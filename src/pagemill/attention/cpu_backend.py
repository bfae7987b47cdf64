"""Paged attention on CPU: the C++ kernel behind `AttentionBackend`. For how rows keep their bits see attention.h."""

from __future__ import annotations

import weakref

import torch
from torch import Tensor

from pagemill import _kernels
from pagemill.attention.interface import AttentionBatch, LayerCache
from pagemill.ops.cpu_ops import dtype_code, kernel_name
from pagemill.ops.quantized import check_contiguous


class CpuAttention:
    """Attends by the C++ kernel.

    share_prefixes: rows whose tables begin alike attend those frames together; False, to measure what it saves.
    """

    def __init__(self, *, share_prefixes: bool = True) -> None:
        self.name = kernel_name()
        self.share_prefixes = share_prefixes
        self._caches: dict[int, tuple[weakref.ref[Tensor], weakref.ref[Tensor], _kernels.Cache]] = {}
        """The kernels' caches by id of the keys, for as long as these live: a pool that nobody uses any more must
        go."""

    def write(self, key: Tensor, value: Tensor, cache: LayerCache, slots: Tensor) -> None:
        tokens = slots.shape[0]
        kv_heads, _, head_dim = cache.block_shape
        expected = (tokens, kv_heads, head_dim)
        if key.shape != expected or value.shape != expected or key.stride(2) != 1 or value.stride(2) != 1:
            raise ValueError(
                f"key {tuple(key.shape)} and value {tuple(value.shape)} must be {expected}, last dimension contiguous"
            )
        if value.dtype != key.dtype:
            raise TypeError(f"key is {key.dtype} and value {value.dtype}; they must be equal")
        check_contiguous("slots", slots, torch.int64, (tokens,))
        self.native(cache).write(
            key.data_ptr(), key.stride(0), key.stride(1), value.data_ptr(), value.stride(0), value.stride(1),
            dtype_code(key), slots.data_ptr(), tokens,
        )  # fmt: skip

    def attend(
        self,
        query: Tensor,
        cache: LayerCache,
        batch: AttentionBatch,
        group: int,
        *,
        scale: float,
        window: int | None = None,
        soft_cap: float | None = None,
        key_start: Tensor | None = None,
        key_end: Tensor | None = None,
        return_lse: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        tokens, heads, head_dim = query.shape
        tables = batch.groups[group].tables
        rows = batch.context_lens.shape[0]
        kv_heads, _, cached_dim = cache.block_shape
        if head_dim != cached_dim or heads % kv_heads or query.stride(2) != 1:
            raise ValueError(
                f"query is {tuple(query.shape)}; heads must be a multiple of {kv_heads}, head_dim must be {cached_dim} "
                "and contiguous"
            )
        if tables.dtype != torch.int32 or tables.shape[0] < rows or tables.stride(1) != 1:
            raise ValueError(f"tables must be int32 [{rows}, entries], not {tables.dtype} {tuple(tables.shape)}")
        check_contiguous("query_start", batch.query_start, torch.int32, (rows + 1,))
        check_contiguous("context_lens", batch.context_lens, torch.int32, (rows,))
        check_contiguous("positions", batch.positions, torch.int64, (tokens,))
        for name, limit in (("key_start", key_start), ("key_end", key_end)):
            if limit is not None:
                check_contiguous(name, limit, torch.int32, (rows,))
        output = torch.empty(query.shape, dtype=query.dtype)
        lse = torch.empty(tokens, heads) if return_lse else None
        self.native(cache).attend(
            query.data_ptr(), dtype_code(query), query.stride(0), query.stride(1), heads, output.data_ptr(),
            0 if lse is None else lse.data_ptr(), tables.data_ptr(), tables.stride(0), batch.query_start.data_ptr(),
            batch.context_lens.data_ptr(), batch.positions.data_ptr(), 0 if key_start is None else key_start.data_ptr(),
            0 if key_end is None else key_end.data_ptr(), rows, scale, window or 0, soft_cap or 0.0,
            self.share_prefixes,
        )  # fmt: skip
        return output, lse

    def native(self, cache: LayerCache) -> _kernels.Cache:
        """Returns the cache as the kernels take it, made once."""
        known = self._caches.get(id(cache.key))
        if known is None or known[0]() is not cache.key or known[1]() is not cache.value:
            at = id(cache.key)
            live = weakref.ref(cache.key, lambda _: self._caches.pop(at, None))
            known = self._caches[at] = (live, weakref.ref(cache.value), _kernels.Cache(*cache))
        return known[2]
