"""Paged attention by the libraries flash-attn 2.8 (FA2) and FlashAttention-3 (FA3).

Both read the block-major pool as it lies: they take any strides of pages, tokens and heads, so a view with tokens
before heads does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from pagemill.attention.interface import AttentionBatch, LayerCache
from pagemill.attention.library_backend import AttentionLibrary, Options, imported, starts_of
from pagemill.attention.support import HALF_FORMATS, HALVES, Support
from pagemill.attention.window_tables import window_tables

FA2_SUPPORT = Support(
    HALVES,
    HALF_FORMATS,
    (256,),
    range(8, 257, 8),
    unequal_widths=False,
    same_format=True,
    least_capability=(8, 0),
)
"""Its pages are multiples of 256 tokens."""
FA3_SUPPORT = Support(
    HALVES,
    HALF_FORMATS,
    (8, 16, 32),
    range(8, 257, 8),
    unequal_widths=False,
    same_format=True,
    least_capability=(9, 0),
    most_capability=(9, 0),
)
"""Pages of whole tiles of keys would be read whole, also what lies behind the context, which may be NaN."""


class Rows(NamedTuple):
    """Holds what the libraries need of a step's rows. tables int32 [rows, entries]. cu_seqlens_k int32 [rows + 1]."""

    batch: AttentionBatch
    tables: Tensor
    cu_seqlens_k: Tensor


class _FlashAttn:
    plans_on_host = False

    def plan(self, query: Tensor, cache: LayerCache, batch: AttentionBatch, group: int, options: Options) -> Rows:
        tables = window_tables(batch, group, options.window, cache.block_shape[1])
        return Rows(batch, tables, starts_of(batch.context_lens))


class Fa2(_FlashAttn):
    """Calls flash-attn 2.8: `flash_attn_with_kvcache` where every row has one query, else `flash_attn_varlen_func`."""

    support = FA2_SUPPORT

    def __init__(self, module: Any) -> None:
        self.name = f"flash_attn-{module.__version__}"
        self._decode: Callable[..., Any] = module.flash_attn_with_kvcache
        self._varlen: Callable[..., Any] = module.flash_attn_varlen_func

    def attend(
        self, query: Tensor, cache: LayerCache, plan: Rows, options: Options, return_lse: bool
    ) -> tuple[Tensor, Tensor | None]:
        batch, tables, cu_seqlens_k = plan
        key, value = cache.key.transpose(1, 2), cache.value.transpose(1, 2)
        if batch.max_query_len == 1 and len(query) == len(tables):
            result = self._decode(
                query.unsqueeze(1), key, value, cache_seqlens=batch.context_lens, block_table=tables,
                return_softmax_lse=return_lse, **_keywords(options),
            )  # fmt: skip
            return (result[0].squeeze(1), result[1].squeeze(2)) if return_lse else (result.squeeze(1), None)
        result = self._varlen(
            query, key, value, batch.query_start, cu_seqlens_k,
            # With 1 it takes every row to have a query; rows without one may stand beside.
            max(2, batch.max_query_len),
            batch.max_context_len, block_table=tables, return_attn_probs=return_lse, **_keywords(options),
        )  # fmt: skip
        return (result[0], result[1].transpose(0, 1)) if return_lse else (result, None)


class Fa3(_FlashAttn):
    """Calls FlashAttention-3's `flash_attn_with_kvcache`, whose queries may lie one row after the other."""

    support = FA3_SUPPORT

    def __init__(self, module: Any) -> None:
        self.name = f"flash_attn_3-{getattr(module, '__version__', '3')}"
        self._attend: Callable[..., Any] = module.flash_attn_with_kvcache

    def attend(
        self, query: Tensor, cache: LayerCache, plan: Rows, options: Options, return_lse: bool
    ) -> tuple[Tensor, Tensor | None]:
        batch = plan.batch
        result = self._attend(
            query, cache.key.transpose(1, 2), cache.value.transpose(1, 2), cache_seqlens=batch.context_lens,
            page_table=plan.tables, cu_seqlens_q=batch.query_start, max_seqlen_q=batch.max_query_len,
            return_softmax_lse=return_lse, **_keywords(options),
        )  # fmt: skip
        return (result[0], result[1].transpose(0, 1)) if return_lse else (result, None)


def flash_attn_libraries() -> list[AttentionLibrary[Rows]]:
    """Returns the versions that are installed, the newest first."""
    found: list[AttentionLibrary[Rows]] = []
    if (module := imported("flash_attn_interface")) is not None:
        found.append(Fa3(module))
    if (module := imported("flash_attn")) is not None:
        found.append(Fa2(module))
    return found


def _keywords(options: Options) -> dict[str, Any]:
    return {
        "softmax_scale": options.scale,
        "causal": True,
        "window_size": (-1, -1) if options.window is None else (options.window - 1, 0),
        "softcap": options.soft_cap or 0.0,
    }
