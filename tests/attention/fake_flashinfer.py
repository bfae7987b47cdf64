"""FlashInfer's wrapper in plain torch: its signatures, its rules for arguments, its results' shapes."""

from __future__ import annotations

import math
from types import SimpleNamespace

import torch
from fake_flash_attn import HALVES, paged


class BatchPrefillWithPagedKVCacheWrapper:
    """Keeps one plan, as the library's does."""

    def __init__(self, float_workspace_buffer, kv_layout="NHD"):
        assert float_workspace_buffer.dtype == torch.uint8
        assert kv_layout == "HND"

    def plan(
        self, qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, num_qo_heads, num_kv_heads,
        head_dim_qk, page_size, head_dim_vo=None, custom_mask=None, packed_custom_mask=None, causal=False,
        pos_encoding_mode="NONE", use_fp16_qk_reduction=False, sm_scale=None, window_left=-1, logits_soft_cap=None,
        rope_scale=None, rope_theta=None, q_data_type="float16", kv_data_type=None,
    ):  # fmt: skip
        for lengths in (qo_indptr, paged_kv_indptr, paged_kv_last_page_len):
            assert lengths.device.type == "cpu", "anything else is copied to the host, which waits"
            assert lengths.dtype == torch.int32
        assert paged_kv_indices.dtype == torch.int32
        assert len(paged_kv_indices) == paged_kv_indptr[-1]
        assert len(qo_indptr) == len(paged_kv_indptr) == len(paged_kv_last_page_len) + 1
        assert bool((qo_indptr.diff() > 0).all())
        assert bool(((paged_kv_last_page_len > 0) & (paged_kv_last_page_len <= page_size)).all())
        assert num_qo_heads % num_kv_heads == 0
        assert head_dim_qk in (64, 128, 256)
        assert q_data_type in HALVES
        assert kv_data_type == q_data_type
        assert causal
        contexts = (paged_kv_indptr.diff() - 1) * page_size + paged_kv_last_page_len
        table = torch.full((len(contexts), int(paged_kv_indptr.diff().max())), -1)
        for row, begin in enumerate(paged_kv_indptr[:-1].tolist()):
            pages = paged_kv_indices[begin : paged_kv_indptr[row + 1]]
            table[row, : len(pages)] = pages
        self.planned = (qo_indptr.tolist(), contexts.tolist(), table)
        self.shape = (num_qo_heads, num_kv_heads, page_size, head_dim_qk)
        self.options = {"scale": sm_scale, "window": (window_left, 0), "softcap": logits_soft_cap or 0.0}

    def run(self, q, paged_kv_cache, return_lse=False):
        key, value = paged_kv_cache
        heads, kv_heads, page_size, head_dim = self.shape
        assert q.is_contiguous()
        assert q.shape == (self.planned[0][-1], heads, head_dim)
        assert key.shape[1:] == value.shape[1:] == (kv_heads, page_size, head_dim)
        assert key.stride() == value.stride(), "other kernels take other strides"
        key, value = key.transpose(1, 2), value.transpose(1, 2)
        out, lse = paged(q, key, value, *self.planned, causal=True, **self.options)
        return (out, lse.T / math.log(2)) if return_lse else out


def flashinfer():
    wrapper = BatchPrefillWithPagedKVCacheWrapper
    return SimpleNamespace(__version__="0.7.2", BatchPrefillWithPagedKVCacheWrapper=wrapper)
