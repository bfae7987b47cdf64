"""Times FlashInfer's paged attention over the pool that Triton's is timed over, where FlashInfer is installed."""

from __future__ import annotations

import torch
from benchmarks.on_gpu import captured, median_ms
from torch import Tensor

from pagemill.attention.interface import AttentionBatch, LayerCache
from pagemill.attention.library_backend import imported

WORKSPACE_BYTES = 128 << 20
BACKENDS = ("fa2", "fa3")
"""FlashInfer's own templates, of which it has the second for capability 9.0. The faster one counts."""


def flashinfer_ms(query: Tensor, cache: LayerCache, batch: AttentionBatch, scale: float) -> float | None:
    """Returns the milliseconds of rows of equal length over keys and values of 16 bits: of a decode step in a CUDA
    graph, by the wrapper for decoding, on matrix units; or of prompts. Plans are made before. None where FlashInfer is
    not installed, and for narrower caches."""
    module = imported("flashinfer")
    if module is None or cache.key.itemsize != 2:
        return None
    decodes, workspace = batch.max_query_len == 1, torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=query.device)
    tables, (kv_heads, block_size, head_dim) = batch.groups[0].tables, cache.block_shape
    rows, pages = tables.shape
    page_start = torch.arange(0, rows * pages + 1, pages, dtype=torch.int32, device=query.device)
    last_page = batch.context_lens - (pages - 1) * block_size
    sizes = query.shape[1], kv_heads, head_dim, block_size
    types = {"q_data_type": query.dtype, "kv_data_type": cache.key.dtype, "sm_scale": scale}
    times = []
    for backend in BACKENDS if torch.cuda.get_device_capability() == (9, 0) else BACKENDS[:1]:
        if decodes:
            wrapper = module.BatchDecodeWithPagedKVCacheWrapper(
                workspace, "HND", use_tensor_cores=True, backend=backend
            )
            wrapper.plan(page_start, tables.flatten(), last_page, *sizes, **types)
        else:
            wrapper = module.BatchPrefillWithPagedKVCacheWrapper(workspace, "HND", backend=backend)
            wrapper.plan(batch.query_start, page_start, tables.flatten(), last_page, *sizes, causal=True, **types)

        def attend(run=wrapper.run) -> object:  # type: ignore[no-untyped-def]  # FlashInfer's
            return run(query, (cache.key, cache.value))

        times.append(median_ms(captured(attend) if decodes else attend))
    return min(times)
