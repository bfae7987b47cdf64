"""Runs a backend over copies of what tests made on CPU: on another device, and nothing side by side."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from pagemill.attention.interface import AttentionBackend, AttentionBatch, GroupBatch, LayerCache


class Elsewhere:
    """Implements `AttentionBackend` by one on `device`: inputs go there, results and written slots come back."""

    def __init__(self, backend: AttentionBackend, device: str) -> None:
        self.name = backend.name
        self.backend = backend
        self.device = device

    def write(
        self, key: Tensor, value: Tensor | None, cache: LayerCache, slots: Tensor, remainder_slots: Tensor | None = None
    ) -> None:
        there = self.cache(cache)
        rest = None if remainder_slots is None else self.send(remainder_slots)
        sent = None if value is None else self.send(value)
        self.backend.write(self.send(key), sent, there, self.send(slots), rest)
        for here, written in zip(cache, there, strict=True):
            if here is not None:
                here.copy_(written.reshape(here.shape))

    def attend(self, query: Tensor, cache: LayerCache, batch: AttentionBatch, group: int, **options):
        there = replace(
            batch,
            query_start=self.send(batch.query_start),
            context_lens=self.send(batch.context_lens),
            positions=self.send(batch.positions),
            groups=(self.group(batch.groups[group]),),
            common=None if batch.common is None else self.send(batch.common),
        )
        sent = {name: self.send(option) if isinstance(option, Tensor) else option for name, option in options.items()}
        output, lse = self.backend.attend(self.send(query), self.cache(cache), there, 0, **sent)
        return output.cpu(), None if lse is None else lse.cpu()

    def joined_rows(self, heads: int, kv_heads: int):
        return self.backend.joined_rows(heads, kv_heads)

    def group(self, group: GroupBatch) -> GroupBatch:
        rest = None if group.remainders is None else self.group(group.remainders)
        return GroupBatch(self.send(group.tables), self.send(group.slots), rest, group.precise)

    def cache(self, cache: LayerCache) -> LayerCache:
        if cache.beside > 1:
            frames, kv_heads, block_size, _, _ = cache.key.shape
            key = cache.key.reshape(frames, kv_heads, block_size, -1)
            value = cache.value.reshape(frames, kv_heads, block_size, -1)
            return LayerCache(
                key.to(self.device),
                value.to(self.device),
                *(None if scale is None else self.send(scale) for scale in cache[2:]),
            )
        if cache.values_in_keys:
            key = self.send(cache.key)
            return LayerCache(key, key[..., : cache.value_dim])
        return LayerCache(*(None if tensor is None else self.send(tensor) for tensor in cache))

    def send(self, tensor: Tensor) -> Tensor:
        """Copies a view with all of its storage, so that strides and what lies between stay."""
        whole = torch.as_strided(tensor, (tensor.untyped_storage().nbytes() // tensor.itemsize,), (1,), 0)
        return torch.as_strided(
            whole.to(self.device, copy=True), tensor.shape, tensor.stride(), tensor.storage_offset()
        )
