"""Paged attention by FlashInfer (Ye et al., MLSys 2025): its wrapper for prompts and decoding over pages.

A wrapper is planned once per step on the host, which shares the work out among the GPU's processors; every layer runs
by that plan. The pool is read as it lies: heads before tokens ("HND").
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from pagemill.attention.interface import AttentionBatch, HostLengths, LayerCache
from pagemill.attention.library_backend import AttentionLibrary, Options, imported, starts_of
from pagemill.attention.support import HALF_FORMATS, HALVES, Support
from pagemill.attention.window_tables import window_tables

FLASHINFER_SUPPORT = Support(
    HALVES, HALF_FORMATS, head_dims=(64, 128, 256), unequal_widths=False, same_format=True, least_capability=(8, 0)
)
WORKSPACE_BYTES = 128 << 20
"""The library advises so many bytes of scratch. Wrappers share them: they run one after the other."""
LN_2 = math.log(2)


class FlashInfer:
    """Calls FlashInfer's `BatchPrefillWithPagedKVCacheWrapper`, which takes rows of one query too.

    A step's plan lies in its wrapper's own pinned memory until the GPU has copied it. As a step is planned while the
    one before may not have begun, two wrappers take turns.
    """

    support = FLASHINFER_SUPPORT
    plans_on_host = True

    def __init__(self, module: Any) -> None:
        self.name = f"flashinfer-{module.__version__}"
        self._make = module.BatchPrefillWithPagedKVCacheWrapper
        self._workspace: Tensor | None = None
        self._wrappers: dict[tuple[int, Options], list[Any]] = {}

    def plan(self, query: Tensor, cache: LayerCache, batch: AttentionBatch, group: int, options: Options) -> Any:
        assert batch.host is not None, "this library plans on the host"
        (kv_heads, block_size, head_dim), (query_lens, context_lens) = cache.block_shape, _with_queries(batch.host)
        pages = (context_lens + block_size - 1) // block_size
        page_start = starts_of(pages)
        tables = window_tables(batch, group, options.window, block_size)
        wrapper = self._wrapper(group, options, query.device)
        wrapper.plan(
            starts_of(query_lens), page_start, _pages(batch, tables, block_size, int(page_start[-1])),
            context_lens - (pages - 1) * block_size, query.shape[1], kv_heads, head_dim, block_size, causal=True,
            sm_scale=options.scale, window_left=-1 if options.window is None else options.window - 1,
            logits_soft_cap=options.soft_cap, q_data_type=query.dtype, kv_data_type=cache.key.dtype,
        )  # fmt: skip
        return wrapper

    def attend(
        self, query: Tensor, cache: LayerCache, plan: Any, options: Options, return_lse: bool
    ) -> tuple[Tensor, Tensor | None]:
        result = plan.run(query.contiguous(), (cache.key, cache.value), return_lse=return_lse)
        return (result[0], result[1] * LN_2) if return_lse else (result, None)  # its sums are of powers of 2

    def _wrapper(self, group: int, options: Options, device: torch.device) -> Any:
        if self._workspace is None:
            self._workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        turns = self._wrappers.setdefault((group, options), [])
        if len(turns) < 2:
            turns.append(self._make(self._workspace, "HND"))
        else:
            turns.append(turns.pop(0))
        return turns[-1]


def flashinfer_libraries() -> list[AttentionLibrary[Any]]:
    """Returns FlashInfer, if it is installed."""
    module = imported("flashinfer")
    return [] if module is None else [FlashInfer(module)]


def _with_queries(host: HostLengths) -> tuple[Tensor, Tensor]:
    """Returns the lengths of the rows that have a query."""
    there = host.query > 0
    return host.query[there], host.context[there]


def _pages(batch: AttentionBatch, tables: Tensor, block_size: int, total: int) -> Tensor:
    """Returns the frames of all rows that have a query, one row after the other, int32 [total]. Does not wait for the
    device."""
    query_lens = batch.query_start[1:] - batch.query_start[:-1]
    counts = torch.where(query_lens > 0, (batch.context_lens + block_size - 1) // block_size, 0)
    ends = counts.cumsum(0)
    places = torch.arange(total, dtype=torch.int64, device=tables.device)
    rows = torch.searchsorted(ends, places, right=True)
    return tables[rows, places - (ends - counts)[rows]]
