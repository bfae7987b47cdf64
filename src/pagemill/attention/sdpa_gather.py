"""Gathers a row's keys and values out of its blocks for torch's own attention, and merges results over parts of the
keys. The kernels are in `triton_gather.py`."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from pagemill.attention.interface import LayerCache
from pagemill.attention.triton_gather import gather_tokens, merge_parts
from pagemill.attention.triton_latent import padded
from pagemill.attention.triton_tiles import READ_AS
from pagemill.triton_launch import TYPES, launcher

TOKENS = 64
"""Tokens of one KV head that a program gathers."""
PAIRS = 16
"""Tokens' heads whose results a program merges."""


class Part(NamedTuple):
    """Holds what queries have attended: output [tokens, heads, head_dim], and log-sum-exp fp32 [tokens, heads]."""

    output: Tensor
    lse: Tensor

    def of(self, first: int, count: int) -> Part:
        """Returns the part of `count` queries."""
        return Part(self.output[first : first + count], self.lse[first : first + count])


class Span(NamedTuple):
    """Names so many keys of a row, from position `begin` on. Those from `end` on do not exist."""

    begin: int
    keys: int
    end: int


def gather(cache: LayerCache, table: Tensor, span: Span, dtype: torch.dtype, native: bool) -> tuple[Tensor, Tensor]:
    """Returns keys and values [keys, kv_heads, head_dim] as `dtype`, zeros where there are none.

    table: int32 [entries], the row's. native: the GPU converts e4m3.
    """
    kv_heads, block_size, head_dim = cache.block_shape
    keys, values = torch.empty(2, span.keys, kv_heads, head_dim, dtype=dtype, device=cache.key.device).unbind()
    gathering = launcher(
        gather_tokens,
        KV_HEADS=kv_heads, HEAD_DIM=head_dim, DIMS=padded(head_dim), BLOCK_SIZE=block_size, TOKENS=TOKENS,
        KEY_AS=READ_AS[cache.key.dtype], VALUE_AS=READ_AS[cache.value.dtype], NATIVE=native, DOT=TYPES[dtype],
    )  # fmt: skip
    gathering(
        (-(-span.keys // TOKENS), kv_heads, 1),
        *cache.elements, cache.key_scale, cache.value_scale, table, keys, values, span.begin,
        min(span.keys, span.end - span.begin), span.keys, *cache.strides,
    )  # fmt: skip
    return keys, values


def merge(a: Part, b: Part, dtype: torch.dtype) -> Part:
    """Merges results over keys of which each query has seen some in both, as `merge_states` does; output as `dtype`."""
    tokens, heads, head_dim = a.output.shape
    output = torch.empty(tokens, heads, head_dim, dtype=dtype, device=a.output.device)
    lse = torch.empty(tokens, heads, dtype=torch.float32, device=a.output.device)
    merging = launcher(merge_parts, HEADS=heads, HEAD_DIM=head_dim, DIMS=padded(head_dim), PAIRS=PAIRS)
    merging(
        (-(-tokens * heads // PAIRS), 1, 1),
        *a, *b, output, lse, tokens * heads, *a.output.stride()[:2], *a.lse.stride(), *b.output.stride()[:2],
        *b.lse.stride(),
    )  # fmt: skip
    return Part(output, lse)
