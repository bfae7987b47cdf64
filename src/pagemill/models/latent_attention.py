"""Multi-head latent attention (MLA) in its absorbed form: what surrounds attention to latents.

DeepSeek-AI, "DeepSeek-V2" (2024), sections 2.1.2 to 2.1.4. A head's score is q · (U c) with its key U c made of a
token's latent c; absorbed, it is (Uᵀ q) · c. So the latent is attended as it lies in the cache, for all heads at once,
and what comes out, a mixture of latents, is made a value by one more projection. Queries and keys have a rotated part
beside that, which needs no projection.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pagemill.models.spec import LatentSpec
from pagemill.ops.interface import Linear, Ops

PerHead = Callable[["HeadWeights", Tensor], Tensor]
"""Returns each head's projection of its part of x [tokens, heads, inputs], [tokens, heads, outputs]."""


@dataclass(frozen=True, slots=True)
class HeadWeights:
    """Holds one projection for each head, all of one size."""

    linears: tuple[Linear, ...]


@dataclass(frozen=True, slots=True)
class LatentWeights:
    """Holds what a layer has beside `qkv`, which maps hidden to queries or their latent, then to the latent and the
    shared key.

    key_up: maps a head's query to the latents (nope_dim to rank), value_up latents to its values (rank to value_dim).
    latent_norm [rank]; query_norm [query_rank] and query_up, which maps that to all heads' queries, are there only if
    queries have a latent. Rotary pairs lie in halves.
    """

    latent_norm: Tensor
    key_up: HeadWeights
    value_up: HeadWeights
    query_norm: Tensor | None = None
    query_up: Linear | None = None


def each_head(weights: HeadWeights, x: Tensor) -> Tensor:
    """Implements `PerHead` head by head."""
    return torch.stack([linear(x[:, head]) for head, linear in enumerate(weights.linears)], dim=1)


def absorbed_queries(
    joined: Tensor,
    weights: LatentWeights,
    spec: LatentSpec,
    angles: Sequence[Tensor] | None,
    ops: Ops,
    per_head: PerHead,
) -> tuple[Tensor, Tensor]:
    """Returns queries [tokens, heads, rank + rope_dim] and keys [tokens, 1, rank + rope_dim] of what `qkv` gives.

    angles: cosines and sines of the tokens, fp32 [tokens, rope_dim / 2]; None: nothing rotates.
    """
    kept = spec.rank + spec.rope_dim
    queries, latent, shared = torch.split(joined, [joined.shape[1] - kept, spec.rank, spec.rope_dim], dim=1)
    if spec.query_rank is not None:
        assert weights.query_norm is not None
        assert weights.query_up is not None
        queries = weights.query_up(ops.rms_norm(queries, weights.query_norm, spec.norm_eps))
    queries = queries.view(len(joined), -1, spec.query_dim)
    plain, rotated = torch.split(queries, [spec.nope_dim, spec.rope_dim], dim=2)
    if angles is not None:
        cos, sin = angles
        ops.rotate(rotated, cos, sin)
        ops.rotate(shared.unsqueeze(1), cos, sin)
    key = torch.cat((ops.rms_norm(latent, weights.latent_norm, spec.norm_eps), shared), dim=1)
    return torch.cat((per_head(weights.key_up, plain), rotated), dim=2), key.unsqueeze(1)
