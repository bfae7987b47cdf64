"""FlashAttention's two packages in plain torch: their signatures, their rules for arguments, their results' shapes."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from reference import reference_attention

HALVES = (torch.float16, torch.bfloat16)


def check(q, k, v, table, seqlens, page_multiple):
    assert q.dtype in HALVES
    assert k.dtype == v.dtype == q.dtype, "one dtype"
    assert q.stride(-1) == k.stride(-1) == v.stride(-1) == 1, "the last dimension is contiguous"
    assert table.dtype == seqlens.dtype == torch.int32
    assert table.stride(-1) == 1
    assert k.dim() == 4
    assert k.shape[1] % page_multiple == 0, "a page's size"
    assert q.shape[-1] % 8 == 0
    assert q.shape[-1] == k.shape[-1] <= 256
    assert q.shape[-2] % k.shape[2] == 0


def paged(q, k, v, starts, contexts, table, *, scale, causal, window, softcap, tile=128):
    """Attends as the kernels do: what lies in a tile of keys is loaded, through the table, and multiplied by 0 where a
    window hides it; what lies behind the context is neither."""
    assert causal
    assert window[0] == -1 or window[1] == 0
    out = torch.zeros_like(q)
    lse = torch.full((q.shape[1], q.shape[0]), torch.inf)
    for row, context in enumerate(contexts):
        begin, end = starts[row], starts[row + 1]
        if begin == end:
            continue
        first = 0 if window[0] < 0 else max(0, context - (end - begin) - window[0]) // tile * tile
        pages = table[row, first // k.shape[1] : -(-context // k.shape[1])].long()
        assert bool((pages >= 0).all()), "a page that is loaded is named"
        skipped = first // k.shape[1] * k.shape[1]
        keys, values = (cache[pages].flatten(0, 1)[: context - skipped] for cache in (k, v))
        spoiled = 0 * values[first - skipped :].float().sum()
        result, sums = reference_attention(
            q[begin:end], keys, values, torch.arange(context - (end - begin), context) - skipped, scale=scale,
            window=None if window[0] < 0 else window[0] + 1, soft_cap=softcap or None,
        )  # fmt: skip
        out[begin:end] = (result + spoiled).to(q.dtype)
        lse[:, begin:end] = sums.float().T
    return out, lse


def fa2():
    def flash_attn_with_kvcache(
        q, k_cache, v_cache, k=None, v=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None,
        cache_batch_idx=None, cache_leftpad=None, block_table=None, softmax_scale=None, causal=False,
        window_size=(-1, -1), softcap=0.0, rotary_interleaved=True, alibi_slopes=None, num_splits=0,
        return_softmax_lse=False,
    ):  # fmt: skip
        check(q, k_cache, v_cache, block_table, cache_seqlens, 256)
        rows, length = q.shape[:2]
        assert len(block_table) == len(cache_seqlens) == rows
        out, lse = paged(
            q.flatten(0, 1), k_cache, v_cache, [length * row for row in range(rows + 1)], cache_seqlens.tolist(),
            block_table, scale=softmax_scale, causal=causal, window=window_size, softcap=softcap,
        )  # fmt: skip
        out, lse = out.view(q.shape), lse.view(-1, rows, length).transpose(0, 1)
        return (out, lse) if return_softmax_lse else out

    def flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None,
        causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False,
        return_attn_probs=False, block_table=None,
    ):  # fmt: skip
        check(q, k, v, block_table, cu_seqlens_k, 256)
        assert cu_seqlens_q.dtype == torch.int32
        assert cu_seqlens_q.is_contiguous()
        assert cu_seqlens_k.is_contiguous()
        contexts = cu_seqlens_k.diff().tolist()
        assert len(cu_seqlens_q) == len(cu_seqlens_k) == len(block_table) + 1
        assert max_seqlen_q >= int(cu_seqlens_q.diff().max())
        assert max_seqlen_k >= max(contexts)
        assert max_seqlen_q > 1 or len(q) == len(block_table), "with one query, every row has it"
        out, lse = paged(
            q, k, v, cu_seqlens_q.tolist(), contexts, block_table, scale=softmax_scale, causal=causal,
            window=window_size, softcap=softcap,
        )  # fmt: skip
        return (out, lse, None) if return_attn_probs else out

    return SimpleNamespace(
        __version__="2.8.3",
        flash_attn_with_kvcache=flash_attn_with_kvcache,
        flash_attn_varlen_func=flash_attn_varlen_func,
    )


def fa3():
    def flash_attn_with_kvcache(
        q, k_cache, v_cache, k=None, v=None, qv=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None,
        cache_batch_idx=None, cache_leftpad=None, page_table=None, cu_seqlens_q=None, cu_seqlens_k_new=None,
        max_seqlen_q=None, rotary_seqlens=None, q_descale=None, k_descale=None, v_descale=None, softmax_scale=None,
        causal=False, window_size=(-1, -1), attention_chunk=0, softcap=0.0, rotary_interleaved=True,
        scheduler_metadata=None, num_splits=0, pack_gqa=None, sm_margin=0, return_softmax_lse=False,
    ):  # fmt: skip
        check(q, k_cache, v_cache, page_table, cache_seqlens, 1)
        assert q.dim() == 3
        assert cu_seqlens_q.dtype == torch.int32
        assert len(cu_seqlens_q) == len(cache_seqlens) + 1 == len(page_table) + 1
        assert max_seqlen_q >= int(cu_seqlens_q.diff().max())
        out, lse = paged(
            q, k_cache, v_cache, cu_seqlens_q.tolist(), cache_seqlens.tolist(), page_table, scale=softmax_scale,
            causal=causal, window=window_size, softcap=softcap,
        )  # fmt: skip
        return (out, lse, None, None) if return_softmax_lse else out

    return SimpleNamespace(flash_attn_with_kvcache=flash_attn_with_kvcache)
