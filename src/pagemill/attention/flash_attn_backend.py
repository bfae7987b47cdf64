"""FlashAttention: paged attention by the libraries flash-attn 2.8 (FA2) and FlashAttention-3 (FA3).

Both read the block-major pool as it lies: they take any strides of pages, tokens and heads, so a view with tokens
before heads does. What they do not take goes to another backend, which writes keys and values as well.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from pagemill.attention.checks import check_attend
from pagemill.attention.interface import AttentionBackend, AttentionBatch, LayerCache
from pagemill.attention.support import Support
from pagemill.attention.window_tables import window_tables

_HALVES = (torch.float16, torch.bfloat16)
_FORMATS = ("float16", "bfloat16")

FA2_SUPPORT = Support(
    _HALVES,
    _FORMATS,
    (256,),
    range(8, 257, 8),
    unequal_widths=False,
    same_format=True,
    least_capability=(8, 0),
)
"""Its pages are multiples of 256 tokens."""
FA3_SUPPORT = Support(
    _HALVES,
    _FORMATS,
    (8, 16, 32),
    range(8, 257, 8),
    unequal_widths=False,
    same_format=True,
    least_capability=(9, 0),
    most_capability=(9, 0),
)
"""Pages of whole tiles of keys would be read whole, also what lies behind the context, which may be NaN."""


class Rows(NamedTuple):
    """Holds what a library needs of a step's rows. tables int32 [rows, entries]. cu_seqlens_k int32 [rows + 1]."""

    batch: AttentionBatch
    tables: Tensor
    cu_seqlens_k: Tensor


class FlashAttnLibrary(Protocol):
    """Calls one version of the library. query [tokens, heads, head_dim]; key, value [pages, tokens, kv_heads, dim]."""

    name: str
    support: Support

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        rows: Rows,
        options: dict[str, Any],
        return_lse: bool,
    ) -> tuple[Tensor, Tensor | None]:
        """Returns the output, and on request the log-sum-exp fp32 [tokens, heads]."""


class Fa2:
    """Calls flash-attn 2.8: `flash_attn_with_kvcache` where every row has one query, else `flash_attn_varlen_func`."""

    support = FA2_SUPPORT

    def __init__(self, module: Any) -> None:
        self.name = f"flash_attn-{module.__version__}"
        self._decode: Callable[..., Any] = module.flash_attn_with_kvcache
        self._varlen: Callable[..., Any] = module.flash_attn_varlen_func

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, rows: Rows, options: dict[str, Any], return_lse: bool
    ) -> tuple[Tensor, Tensor | None]:
        batch, tables, cu_seqlens_k = rows
        if batch.max_query_len == 1 and len(query) == len(tables):
            result = self._decode(
                query.unsqueeze(1), key, value, cache_seqlens=batch.context_lens, block_table=tables,
                return_softmax_lse=return_lse, **options,
            )  # fmt: skip
            return (result[0].squeeze(1), result[1].squeeze(2)) if return_lse else (result.squeeze(1), None)
        result = self._varlen(
            query, key, value, batch.query_start, cu_seqlens_k,
            # With 1 it takes every row to have a query; rows without one may stand beside.
            max(2, batch.max_query_len),
            batch.max_context_len, block_table=tables, return_attn_probs=return_lse, **options,
        )  # fmt: skip
        return (result[0], result[1].transpose(0, 1)) if return_lse else (result, None)


class Fa3:
    """Calls FlashAttention-3's `flash_attn_with_kvcache`, whose queries may lie one row after the other."""

    support = FA3_SUPPORT

    def __init__(self, module: Any) -> None:
        self.name = f"flash_attn_3-{getattr(module, '__version__', '3')}"
        self._attend: Callable[..., Any] = module.flash_attn_with_kvcache

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, rows: Rows, options: dict[str, Any], return_lse: bool
    ) -> tuple[Tensor, Tensor | None]:
        batch = rows.batch
        result = self._attend(
            query, key, value, cache_seqlens=batch.context_lens, page_table=rows.tables,
            cu_seqlens_q=batch.query_start, max_seqlen_q=batch.max_query_len, return_softmax_lse=return_lse, **options,
        )  # fmt: skip
        return (result[0], result[1].transpose(0, 1)) if return_lse else (result, None)


def flash_attn_libraries() -> list[FlashAttnLibrary]:
    """Returns the versions that are installed, the newest first."""
    found: list[FlashAttnLibrary] = []
    if (module := _imported("flash_attn_interface")) is not None:
        found.append(Fa3(module))
    if (module := _imported("flash_attn")) is not None:
        found.append(Fa2(module))
    return found


def _imported(name: str) -> Any | None:
    try:
        return importlib.import_module(name)
    except ImportError:  # not installed, or made for another torch
        return None


class FlashAttention:
    """Implements `AttentionBackend` by a version of the library.

    rest: writes, and attends where the library does not: keys of a range, windows of a block or less, heads and
    dtypes that it does not take.
    """

    kv_formats: tuple[str, ...] | None = _FORMATS

    def __init__(self, library: FlashAttnLibrary, rest: AttentionBackend) -> None:
        self.name = f"{library.name}+{rest.name}"
        self.waits = rest.waits
        self._library = library
        self._rest = rest
        self._planned: tuple[AttentionBatch, dict[tuple[int, int | None], Rows]] | None = None

    def write(
        self, key: Tensor, value: Tensor | None, cache: LayerCache, slots: Tensor, remainder_slots: Tensor | None = None
    ) -> None:
        self._rest.write(key, value, cache, slots, remainder_slots)

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
        if key_start is not None or key_end is not None or not self._takes(query, cache, window):
            return self._rest.attend(
                query, cache, batch, group, scale=scale, window=window, soft_cap=soft_cap, key_start=key_start,
                key_end=key_end, return_lse=return_lse,
            )  # fmt: skip
        check_attend(query, cache, batch, group, key_start, key_end)
        options = {
            "softmax_scale": scale,
            "causal": True,
            "window_size": (-1, -1) if window is None else (window - 1, 0),
            "softcap": soft_cap or 0.0,
        }
        rows = self._rows(batch, group, window, cache.block_shape[1])
        with torch.cuda.device_of(query):  # type: ignore[no-untyped-call]  # kernels start on the current device
            key, value = cache.key.transpose(1, 2), cache.value.transpose(1, 2)
            return self._library.attend(query, key, value, rows, options, return_lse)

    def _takes(self, query: Tensor, cache: LayerCache, window: int | None) -> bool:
        support, (_, block_size, head_dim) = self._library.support, cache.block_shape
        return (
            len(query) > 0
            and cache.beside == 1
            and query.dtype == cache.key.dtype == cache.value.dtype
            and (support.dtypes is None or query.dtype in support.dtypes)
            and (support.block_sizes is None or block_size in support.block_sizes)
            and (support.head_dims is None or head_dim in support.head_dims)
            and cache.value_dim == head_dim
            and (window is None or window > block_size)
        )

    def _rows(self, batch: AttentionBatch, group: int, window: int | None, block_size: int) -> Rows:
        """Returns what was made for the step's layers before, if it was."""
        if self._planned is None or self._planned[0] is not batch:
            self._planned = (batch, {})
        planned = self._planned[1]
        if (group, window) not in planned:
            tables = batch.groups[group].tables if window is None else window_tables(batch, group, window, block_size)
            sums = torch.nn.functional.pad(batch.context_lens.cumsum(0, dtype=torch.int32), (1, 0))
            planned[group, window] = Rows(batch, tables, sums)
        return planned[group, window]
