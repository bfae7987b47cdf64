"""Dense attention in fp64 and by definition, head by head: obviously right. Tests compare every backend with it."""

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
    precise: int = 0,
    remainders: tuple[Tensor, Tensor] | None = None,
    steps: tuple[Tensor, Tensor, float] | None = None,
) -> tuple[Tensor, Tensor]:
    """One sequence: query [tokens, heads, head_dim] at `positions` [tokens]; key [keys, kv_heads, head_dim], value
    [keys, kv_heads, value_dim], where index i is position i. Masks as in `AttentionBackend.attend`. remainders: of key
    and value, which a query adds to those of its `precise` latest positions. steps: of values [keys, kv_heads] that are
    integers, what one of them is, the middle that they count from, and the share of weights that may be lost, if these
    become bytes (`changed_by_bytes`).

    Returns fp64 output [tokens, heads, value_dim] and log-sum-exp [tokens, heads].
    """
    heads, group = query.shape[1], query.shape[1] // key.shape[1]
    index, position = torch.arange(len(key)), positions.unsqueeze(1)
    seen = (index <= position) & (index >= key_start)
    if window is not None:
        seen &= index > position - window
    if key_end is not None:
        seen &= index < key_end
    latest = index > position - precise
    output = torch.zeros(*query.shape[:2], value.shape[2], dtype=torch.float64)
    lse = torch.full(query.shape[:2], -torch.inf, dtype=torch.float64)
    for head in range(heads):
        k, v = key[:, head // group].double(), value[:, head // group].double()
        scores = query[:, head].double() @ k.T * scale
        if remainders is not None:
            more_k, more_v = (each[:, head // group].double() for each in remainders)
            scores += latest * (query[:, head].double() @ more_k.T * scale)
        if soft_cap is not None:
            scores = soft_cap * torch.tanh(scores / soft_cap)
        scores = scores.masked_fill(~seen, -torch.inf)
        lse[:, head] = torch.logsumexp(scores, 1)
        weights = torch.softmax(scores, 1).nan_to_num(0)  # NaN: a query that sees no key
        output[:, head] = weights @ v
        if remainders is not None:
            output[:, head] += (latest * weights) @ more_v
        if steps is not None:
            step, middle = (each[:, head // group].double() for each in steps[:2])
            output[:, head] += changed_by_bytes(weights, step, latest & seen, steps[2]) @ (v - middle.unsqueeze(1))
    return output, lse


def changed_by_bytes(weights: Tensor, step: Tensor, latest: Tensor, loss: float) -> Tensor:
    """Returns by how much weights [tokens, keys] change where they become bytes: times a value's step [keys], each is
    rounded to whole 255ths of the greatest one in its partition of 256 keys, if a query adds no remainders there, and
    if the sum of all changes by no more than the share `loss`."""
    change = torch.zeros_like(weights)
    for begin in range(0, len(step), 256):
        part = slice(begin, begin + 256)
        scaled = weights[:, part] * step[part]
        unit = scaled.amax(1, keepdim=True) / 255
        rounded = torch.round(scaled / unit) * unit
        lost = (scaled.sum(1, keepdim=True) - rounded.sum(1, keepdim=True)).abs()
        in_one = ~latest[:, part].any(1, keepdim=True) & (lost <= scaled.sum(1, keepdim=True) * loss)
        change[:, part] = torch.where(in_one, (rounded - scaled) / step[part], 0.0).nan_to_num(0.0)
    return change
