"""Mixture of experts: each token goes through the few experts that its router chose."""

from __future__ import annotations

import torch
from torch import Tensor

from pagemill.models.spec import Activation, MoESpec
from pagemill.models.weights import Experts, GatedMLP
from pagemill.ops.interface import Ops


def apply_experts(x: Tensor, weights: Experts, spec: MoESpec, activation: Activation, ops: Ops) -> Tensor:
    """x [tokens, hidden] -> [tokens, hidden], dtype of x.

    Routing is fp32. Tokens are grouped by expert, and experts add to their tokens in ascending order in fp32, so that a
    token's result does not depend on which others are there.
    """
    probabilities = torch.softmax(weights.router(x.float()), dim=-1)
    shares, chosen = torch.topk(probabilities, spec.experts_per_token, dim=-1)
    if spec.normalize:
        shares = shares / shares.sum(dim=-1, keepdim=True)
    total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for expert, mlp in enumerate(weights.experts):
        rows, rank = torch.nonzero(chosen == expert, as_tuple=True)
        if rows.numel():
            out = apply_mlp(x[rows], mlp, activation, ops)
            total[rows] += out.float() * shares[rows, rank].unsqueeze(-1)
    return total.to(x.dtype)


def apply_mlp(x: Tensor, mlp: GatedMLP, activation: Activation, ops: Ops) -> Tensor:
    """down(activation(gate(x)) * up(x)); x [tokens, hidden]."""
    return mlp.down(ops.gated(mlp.gate_up(x), activation))
