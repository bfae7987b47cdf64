"""Dense attention in fp64, one query at a time: slow and obviously right. Tests compare every backend with it."""

from __future__ import annotations

import torch
from torch import Tensor


def reference_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    positions: Tensor,
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    key_start: int = 0,
    key_end: int | None = None,
) -> tuple[Tensor, Tensor]:
    """One sequence: query [tokens, heads, head_dim] at `positions` [tokens]; key, value [keys, kv_heads, head_dim],
    where index i is position i. Masks as in `AttentionBackend.attend`.

    Returns fp64 output [tokens, heads, head_dim] and log-sum-exp [tokens, heads].
    """
    tokens, heads, head_dim = query.shape
    group = heads // key.shape[1]
    output = torch.zeros(tokens, heads, head_dim, dtype=torch.float64)
    lse = torch.full((tokens, heads), -torch.inf, dtype=torch.float64)
    for token, position in enumerate(positions.tolist()):
        first = max(key_start, 0 if window is None else position - window + 1, 0)
        last = position + 1 if key_end is None else min(position + 1, key_end)
        if first >= last:
            continue
        for head in range(heads):
            k, v = key[first:last, head // group].double(), value[first:last, head // group].double()
            scores = k @ query[token, head].double() * scale
            if soft_cap is not None:
                scores = soft_cap * torch.tanh(scores / soft_cap)
            lse[token, head] = torch.logsumexp(scores, 0)
            output[token, head] = torch.softmax(scores, 0) @ v
    return output, lse
