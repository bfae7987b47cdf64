"""Paged attention in plain torch: any device. Rows of equal query length are gathered through their tables into one
padded batch, so that a decode step is a few batched matrix products.

The rows' lengths are read back to the host once per step (not per layer).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from pagemill.attention.interface import AttentionBatch, LayerCache

_ELEMENTS = 1 << 26
"""The most gathered key elements, and the most scores, at a time: bounds the scratch memory (256 MiB each)."""

LEAST = 2.0**-100
"""Vectors without an element of this magnitude are stored as zeros: their reciprocal would leave fp32's range."""


class _Part(NamedTuple):
    """Names rows of one query length that are computed together.

    rows int64 [n]; tokens int64 [n, query_len]; query_len; context: the longest context among them.
    """

    rows: Tensor
    tokens: Tensor
    query_len: int
    context: int


class TorchAttention:
    name = f"torch-{torch.__version__}"

    def __init__(self) -> None:
        self._planned: tuple[AttentionBatch, list[_Part]] | None = None
        self._written: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        """The results of `_tokens_to_write` by a step's slots, one tensor per layer group."""

    def write(self, key: Tensor, value: Tensor, cache: LayerCache, slots: Tensor) -> None:
        tokens = self._tokens_to_write(slots)
        if tokens is not None:
            key, value, slots = key[tokens], value[tokens], slots[tokens]
        _, block_size, _ = cache.block_shape
        frames, offsets = slots.div(block_size, rounding_mode="floor"), slots.remainder(block_size)
        if cache.key_scale is not None and cache.value_scale is not None:
            key, cache.key_scale[frames, :, offsets] = quantize(key)
            value, cache.value_scale[frames, :, offsets] = quantize(value)
        key, value = key.to(cache.key.dtype), value.to(cache.value.dtype)
        if cache.pairs:
            cache.key[frames, :, offsets] = key.view(*key.shape[:2], key.shape[2] // 2, 2)
            cache.value[frames, :, offsets // 2, offsets % 2] = value
        else:
            cache.key[frames, :, offsets] = key
            cache.value[frames, :, offsets] = value

    def _tokens_to_write(self, slots: Tensor) -> Tensor | None:
        """Returns indices of the tokens that are written; None: all. Found once per step and group: it waits for the
        device."""
        if slots not in self._written:
            tokens = (slots >= 0).nonzero().squeeze(1)
            self._written[slots] = tokens if len(tokens) < len(slots) else None
        found: Tensor | None = self._written[slots]
        return found

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
        kv_heads, block_size, head_dim = cache.block_shape
        heads = query.shape[1]
        tables = batch.groups[group].tables
        output = torch.zeros_like(query)
        lse = torch.full(query.shape[:2], -torch.inf, dtype=torch.float32, device=query.device) if return_lse else None
        for rows, tokens, query_len, context in self._parts(batch, heads, head_dim):
            frames = tables[rows, : -(-context // block_size)].clamp_min(0).long()
            position = batch.positions[tokens]
            first = torch.zeros_like(position) if window is None else position - (window - 1)
            if key_start is not None:
                first = torch.maximum(first, key_start[rows].unsqueeze(1))
            last = torch.minimum(position, batch.context_lens[rows].unsqueeze(1) - 1)
            if key_end is not None:
                last = torch.minimum(last, key_end[rows].unsqueeze(1) - 1)
            keys = torch.arange(frames.shape[1] * block_size, device=query.device)
            seen = (keys >= first.unsqueeze(-1)) & (keys <= last.unsqueeze(-1))  # [n, query_len, keys]
            count = len(rows)
            key = _flatten(cache.key[frames].float().flatten(4), cache.key_scale, frames)
            value = _flatten(cache.value[frames].float().flatten(3, -2), cache.value_scale, frames)
            # What no query sees may be NaN, and 0 * NaN is NaN.
            value = value.masked_fill(~seen.any(1)[:, None, :, None], 0)
            q = query[tokens].float().view(count, query_len, kv_heads, -1, head_dim).permute(0, 2, 3, 1, 4)
            q = q.reshape(count, kv_heads, -1, head_dim)
            scores = (q @ key.transpose(2, 3) * scale).view(count, kv_heads, -1, query_len, len(keys))
            if soft_cap is not None:
                scores = soft_cap * torch.tanh(scores / soft_cap)
            scores = scores.masked_fill(~seen[:, None, None], -torch.inf)
            part_lse = torch.logsumexp(scores, -1)
            weights = torch.exp(scores - torch.where(part_lse.isneginf(), 0, part_lse).unsqueeze(-1))
            out = weights.view(count, kv_heads, -1, len(keys)) @ value
            out = out.view(count, heads, query_len, head_dim).transpose(1, 2)
            output[tokens] = out.to(output.dtype)
            if lse is not None:
                lse[tokens] = part_lse.view(count, heads, query_len).transpose(1, 2)
        return output, lse

    def _parts(self, batch: AttentionBatch, heads: int, head_dim: int) -> list[_Part]:
        if self._planned is not None and self._planned[0] is batch:
            return self._planned[1]
        starts, contexts = batch.query_start.tolist(), batch.context_lens.tolist()
        lengths: dict[int, list[int]] = {}
        for row, context in enumerate(contexts):
            length = starts[row + 1] - starts[row]
            if length and context:
                lengths.setdefault(length, []).append(row)
        device = batch.positions.device
        parts = []
        for length, rows in lengths.items():
            rows.sort(key=lambda row: int(contexts[row]))  # neighbours of similar length waste the least padding
            while rows:
                context = contexts[rows[-1]]
                fit = max(1, _ELEMENTS // (context * heads * head_dim))
                taken, rows = rows[-fit:], rows[:-fit]
                step = max(1, _ELEMENTS // (context * heads * len(taken)))
                for begin in range(0, length, step):
                    end = min(length, begin + step)
                    tokens = [range(starts[row] + begin, starts[row] + end) for row in taken]
                    ids = torch.tensor([list(t) for t in tokens], dtype=torch.int64)
                    parts.append(_Part(torch.tensor(taken).to(device), ids.to(device), end - begin, context))
        self._planned = (batch, parts)
        return parts


def quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    """Rounds keys or values to int8, symmetrically. Each token's vector of each KV head has a scale of its own, so that
    what a slot holds depends on nothing but its token. Other bits need another name in `kvcache/kv_format.py`.

    x: [..., head_dim]. Returns int8 of the same shape, and fp32 scales [...]: x is about int8 * scale, within
    scale / 2. A vector that is not finite becomes zeros with the scale NaN. The kernels' bits (`write_scaled` in csrc).
    """
    x = x.float()
    largest = x.abs().amax(-1)
    usable = (largest >= LEAST) & (largest < torch.inf)
    most = torch.full_like(largest, 127.0)
    factor = torch.where(usable, most / largest, 0.0)
    scale = torch.where(usable, largest / most, torch.where(largest < LEAST, 0.0, torch.nan))
    return torch.round(torch.where(usable.unsqueeze(-1), x, 0.0) * factor.unsqueeze(-1)).to(torch.int8), scale


def _flatten(gathered: Tensor, scale: Tensor | None, frames: Tensor) -> Tensor:
    """Flattens keys or values of frames [rows, entries], fp32 [rows, entries, kv_heads, block_size, head_dim], times
    their scale as [rows, kv_heads, entries * block_size, head_dim]."""
    if scale is not None:
        gathered *= scale[frames].unsqueeze(-1)
    return gathered.transpose(1, 2).flatten(2, 3)
