"""Routing: which experts a token goes through, and how much each counts."""

from __future__ import annotations

import torch
from torch import Tensor

from pagemill.models.spec import MoESpec


def choose_experts(logits: Tensor, correction: Tensor | None, spec: MoESpec) -> tuple[Tensor, Tensor]:
    """Returns the shares of each token's experts, fp32 [tokens, experts_per_token], and which these are, int64.

    logits: fp32 [tokens, num_experts]. correction: fp32 [num_experts], added to shares where experts are chosen
    (DeepSeek-V3, 2024, section 2.1.2). A token's result does not depend on other tokens.
    """
    shares = _sigmoid(logits) if spec.sigmoid else torch.softmax(logits, dim=-1)
    wanted = shares if correction is None else shares + correction
    if spec.groups > spec.kept_groups:
        wanted = wanted.masked_fill(~_in_best_groups(wanted, spec), -torch.inf)
    if wanted is shares:
        shares, chosen = torch.topk(shares, spec.experts_per_token, dim=-1)
    else:
        chosen = torch.topk(wanted, spec.experts_per_token, dim=-1).indices
        shares = shares.gather(1, chosen)
    if spec.normalize:
        shares = shares / shares.sum(dim=-1, keepdim=True)
    return shares if spec.scale == 1.0 else shares * spec.scale, chosen


def _sigmoid(x: Tensor) -> Tensor:
    """Returns the sigmoid as a softmax over (x, 0): torch computes that row by row, but elements of `torch.sigmoid`
    on CPU by vectors, with other bits in what is left at the end."""
    return torch.softmax(torch.stack((x, torch.zeros_like(x)), dim=-1), dim=-1)[..., 0]


def _in_best_groups(wanted: Tensor, spec: MoESpec) -> Tensor:
    """Returns which experts are in their token's best groups, bool [tokens, num_experts]."""
    groups = wanted.view(len(wanted), spec.groups, -1)
    best = torch.topk(groups, spec.group_best, dim=-1).values.sum(dim=-1)
    kept = torch.topk(best, spec.kept_groups, dim=-1).indices
    there = torch.zeros_like(best, dtype=torch.bool).scatter_(1, kept, True)
    return there.unsqueeze(-1).expand(groups.shape).reshape(wanted.shape)
