"""Paged attention on CPU: the C++ kernel behind `AttentionBackend`. For how rows keep their bits see attention.h."""

from __future__ import annotations

import weakref

import torch
from torch import Tensor

from pagemill import _kernels
from pagemill.attention.checks import check_attend, check_write
from pagemill.attention.interface import AttentionBatch, JoinedRows, LayerCache
from pagemill.ops.cpu_ops import dtype_code, kernel_name


class CpuAttention:
    """Attends by the C++ kernel.

    share_prefixes: rows whose tables begin alike attend those frames together; False, to measure what it saves.
    """

    def __init__(self, *, share_prefixes: bool = True) -> None:
        self.name = kernel_name()
        self.kv_formats: tuple[str, ...] | None = None
        self.waits = False
        self.share_prefixes = share_prefixes
        self._caches: dict[int, tuple[weakref.ref[Tensor], weakref.ref[Tensor], _kernels.Cache]] = {}
        """The kernels' caches by id of the keys, for as long as these live: a pool that nobody uses any more must
        go."""

    def write(
        self, key: Tensor, value: Tensor | None, cache: LayerCache, slots: Tensor, remainder_slots: Tensor | None = None
    ) -> None:
        check_write(key, value, cache, slots, remainder_slots)
        value = key if value is None else value
        self.native(cache).write(
            key.data_ptr(), key.stride(0), key.stride(1), value.data_ptr(), value.stride(0), value.stride(1),
            dtype_code(key), slots.data_ptr(), 0 if remainder_slots is None else remainder_slots.data_ptr(),
            slots.shape[0],
        )  # fmt: skip

    def joined_rows(self, heads: int, kv_heads: int) -> JoinedRows | None:
        return None  # the kernels find them by themselves

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
        check_attend(query, cache, batch, group, key_start, key_end)
        tokens, heads, _ = query.shape
        of_group, rows = batch.groups[group], batch.context_lens.shape[0]
        tables, remainders = of_group.tables, of_group.remainders
        output = torch.empty(query.shape, dtype=query.dtype, device="cpu")
        lse = torch.empty(tokens, heads, dtype=torch.float32, device="cpu") if return_lse else None
        self.native(cache).attend(
            query.data_ptr(), dtype_code(query), query.stride(0), query.stride(1), heads, output.data_ptr(),
            0 if lse is None else lse.data_ptr(), tables.data_ptr(), tables.stride(0), batch.query_start.data_ptr(),
            batch.context_lens.data_ptr(), batch.positions.data_ptr(), 0 if key_start is None else key_start.data_ptr(),
            0 if key_end is None else key_end.data_ptr(), rows, scale, window or 0, soft_cap or 0.0,
            0 if remainders is None else remainders.tables.data_ptr(),
            0 if remainders is None else remainders.tables.stride(0), of_group.precise, self.share_prefixes,
        )  # fmt: skip
        return output[..., : cache.value_dim], lse

    def native(self, cache: LayerCache) -> _kernels.Cache:
        """Returns the cache as the kernels take it, made once."""
        known = self._caches.get(id(cache.key))
        if known is None or known[0]() is not cache.key or known[1]() is not cache.value:
            at = id(cache.key)
            live = weakref.ref(cache.key, lambda _: self._caches.pop(at, None))
            known = self._caches[at] = (live, weakref.ref(cache.value), _native(cache))
        return known[2]


_FLOAT8 = {torch.float8_e4m3fn: 5, torch.float8_e5m2: 6}
"""Numbers of the kernels' dtypes."""


def _native(cache: LayerCache) -> _kernels.Cache:
    if cache.values_in_keys:  # kernels take values as wide as keys; `attend` leaves out what is too much
        cache = LayerCache(cache.key, cache.key)
    float8 = _FLOAT8.get(cache.key.dtype)
    if float8 is None:
        return _kernels.Cache(*cache)
    # Not every torch gives away tensors of these dtypes by DLPack.
    return _kernels.Cache(cache.key.view(torch.uint8), cache.value.view(torch.uint8), None, None, float8)
