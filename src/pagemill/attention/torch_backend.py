"""Paged attention in plain torch: any device. Rows of equal query length are gathered through their tables into one
padded batch, so that a decode step is a few batched matrix products.

The rows' lengths are read back to the host once per step (not per layer).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from pagemill.attention.interface import AttentionBatch, JoinedRows, LayerCache
from pagemill.attention.quantize import (
    dequantize,
    narrow,
    quantize_as,
    quantize_int4,
    remainder_of,
    rotate,
    rotated_together,
)

_ELEMENTS = 1 << 26
"""The most gathered key elements, and the most scores, at a time: bounds the scratch memory (256 MiB each)."""


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
    kv_formats: tuple[str, ...] | None = None
    waits = True

    def __init__(self) -> None:
        self._planned: tuple[AttentionBatch, list[_Part]] | None = None
        self._written: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        """The results of `_tokens_to_write` by a step's slots, one tensor per layer group."""

    def write(
        self, key: Tensor, value: Tensor | None, cache: LayerCache, slots: Tensor, remainder_slots: Tensor | None = None
    ) -> None:
        tokens = self._tokens_to_write(slots)
        value = key[..., : cache.value_dim] if value is None else value
        if tokens is not None:
            key, value, slots = key[tokens], value[tokens], slots[tokens]
            remainder_slots = None if remainder_slots is None else remainder_slots[tokens]
        if cache.key_scale is None or cache.value_scale is None:
            _place(narrow(key, cache.key.dtype), narrow(value, cache.value.dtype), cache, slots)
            return
        _, block_size, _ = cache.block_shape
        key_groups, value_groups = (each.shape[2] // block_size for each in (cache.key_scale, cache.value_scale))
        stored_key, key_scales = quantize_as(cache.key.dtype, key, key_groups, is_key=True)
        stored_value, value_scales = quantize_as(cache.value.dtype, value, value_groups, is_key=False)
        _place(stored_key, stored_value, cache, slots, key_scales, value_scales)
        if remainder_slots is not None:
            key = remainder_of(key, stored_key, key_scales, is_key=True)
            value = remainder_of(value, stored_value, value_scales, is_key=False)
            stored_key, key_scales = quantize_int4(key, key.shape[-1] // key_groups)
            stored_value, value_scales = quantize_int4(value, value.shape[-1] // value_groups)
            there = remainder_slots >= 0
            new = (each[there] for each in (stored_key, stored_value, remainder_slots, key_scales, value_scales))
            stored_key, stored_value, remainder_slots, key_scales, value_scales = new
            _place(stored_key, stored_value, cache, remainder_slots, key_scales, value_scales)

    def _tokens_to_write(self, slots: Tensor) -> Tensor | None:
        """Returns indices of the tokens that are written; None: all. Found once per step and group: it waits for the
        device."""
        if slots not in self._written:
            tokens = (slots >= 0).nonzero().squeeze(1)
            self._written[slots] = tokens if len(tokens) < len(slots) else None
        found: Tensor | None = self._written[slots]
        return found

    def joined_rows(self, heads: int, kv_heads: int) -> JoinedRows | None:
        return None

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
        heads, rotated = query.shape[1], cache.key.dtype == torch.uint8
        of_group = batch.groups[group]
        output = query.new_zeros(*query.shape[:2], cache.value_dim)
        lse = torch.full(query.shape[:2], -torch.inf, dtype=torch.float32, device=query.device) if return_lse else None
        for rows, tokens, query_len, context in self._parts(batch, heads, head_dim):
            tables = of_group.tables[rows, : -(-context // block_size)]
            position = batch.positions[tokens]
            first = torch.zeros_like(position) if window is None else position - (window - 1)
            if key_start is not None:
                first = torch.maximum(first, key_start[rows].unsqueeze(1))
            last = torch.minimum(position, batch.context_lens[rows].unsqueeze(1) - 1)
            if key_end is not None:
                last = torch.minimum(last, key_end[rows].unsqueeze(1) - 1)
            keys = torch.arange(tables.shape[1] * block_size, dtype=torch.int64, device=query.device)
            seen = (keys >= first.unsqueeze(-1)) & (keys <= last.unsqueeze(-1))  # [n, query_len, keys]
            count, frames = len(rows), _frames_of(tables, seen)
            key = _widen(cache.key[frames].flatten(4), cache.key_scale, frames)
            value = _widen(cache.value[frames].flatten(3, -2), cache.value_scale, frames)
            # What no query sees may be NaN, and 0 * NaN is NaN.
            value = value.masked_fill(~seen.any(1)[:, None, :, None], 0)
            q = rotate(query[tokens]) / rotated_together(head_dim) if rotated else query[tokens].float()
            q = q.view(count, query_len, kv_heads, -1, head_dim).permute(0, 2, 3, 1, 4)
            q = q.reshape(count, kv_heads, -1, head_dim)
            scores = (q @ key.transpose(2, 3)).view(count, kv_heads, -1, query_len, len(keys))
            if of_group.remainders is not None:
                precise = seen & (keys > (position - of_group.precise).unsqueeze(-1))
                rest = _frames_of(of_group.remainders.tables[rows, : tables.shape[1]], precise)
                more = _widen(cache.key[rest].flatten(4), cache.key_scale, rest)
                more_values = _widen(cache.value[rest].flatten(3, -2), cache.value_scale, rest)
                more_values = more_values.masked_fill(~precise.any(1)[:, None, :, None], 0)
                added = (q @ more.transpose(2, 3)).view(scores.shape)
                scores = scores + added.masked_fill(~precise[:, None, None], 0)
            scores = scores * scale
            if soft_cap is not None:
                scores = soft_cap * torch.tanh(scores / soft_cap)
            scores = scores.masked_fill(~seen[:, None, None], -torch.inf)
            part_lse = torch.logsumexp(scores, -1)
            weights = torch.exp(scores - torch.where(part_lse.isneginf(), 0, part_lse).unsqueeze(-1))
            out = weights.view(count, kv_heads, -1, len(keys)) @ value
            if of_group.remainders is not None:
                latest = weights.masked_fill(~precise[:, None, None], 0)
                out = out + latest.view(count, kv_heads, -1, len(keys)) @ more_values
            out = out.view(count, heads, query_len, cache.value_dim).transpose(1, 2)
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
                    ids = torch.tensor([list(t) for t in tokens], dtype=torch.int64, device="cpu")
                    parts.append(
                        _Part(
                            torch.tensor(taken, dtype=torch.int64, device="cpu").to(device),
                            ids.to(device),
                            end - begin,
                            context,
                        )
                    )
        self._planned = (batch, parts)
        return parts


def _place(
    key: Tensor,
    value: Tensor,
    cache: LayerCache,
    slots: Tensor,
    key_scales: Tensor | None = None,
    value_scales: Tensor | None = None,
) -> None:
    """Puts elements [tokens, kv_heads, elements] and their scales [tokens, kv_heads, groups] into their slots."""
    _, block_size, _ = cache.block_shape
    frames, offsets = slots.div(block_size, rounding_mode="floor"), slots.remainder(block_size)
    for scales, new in ((cache.key_scale, key_scales), (cache.value_scale, value_scales)):
        if scales is not None and new is not None:
            scales.view(*scales.shape[:2], -1, block_size)[frames, :, :, offsets] = new
    if (beside := cache.beside) > 1:
        cache.key[frames, :, offsets] = key.reshape(*key.shape[:2], key.shape[2] // beside, beside)
        cache.value[frames, :, offsets // beside, offsets % beside] = value
    else:
        cache.key[frames, :, offsets] = key
        cache.value[frames, :, offsets] = value


def _frames_of(tables: Tensor, seen: Tensor) -> Tensor:
    """Returns the frames that tables [rows, entries] name, or 0, which is always there, where no query sees a key of
    them (seen [rows, queries, keys]): those may have gone."""
    return torch.where(seen.any(1).view(*tables.shape, -1).any(2), tables, 0).long()


def _widen(gathered: Tensor, scales: Tensor | None, frames: Tensor) -> Tensor:
    """Widens keys or values of frames [rows, entries], [rows, entries, kv_heads, block_size, elements], to fp32
    [rows, kv_heads, entries * block_size, head_dim]."""
    if scales is None:
        wide = gathered.float()
    else:
        of_frames = scales[frames].view(*gathered.shape[:3], -1, gathered.shape[3])
        wide = dequantize(gathered, of_frames.transpose(-1, -2))
    return wide.transpose(1, 2).flatten(2, 3)
