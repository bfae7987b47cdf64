"""Runs a decoder's step on NVIDIA GPUs with `TritonOps`: what `Decoder` computes, in fewer kernels.

Sums into the residual and the norm behind them are one kernel, and so are the norms and rotations of all query and key
heads. Places of rounding are those of `Decoder`. Nothing waits for the device, and sizes follow from the batch's: a
CUDA graph may hold the step, once `reach` has seen the longest context.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pagemill.attention.interface import AttentionBatch
from pagemill.models.adapter import AdapterTokens
from pagemill.models.decoder import (
    Adapt,
    Angles,
    Decoder,
    Experts,
    GatedMLP,
    LayerCaches,
    LayerWeights,
    OnLayer,
    apply_mlp,
)
from pagemill.models.latent_attention import HeadWeights, LatentWeights
from pagemill.models.routing import choose_experts
from pagemill.ops.triton_experts import Routing, apply_experts, most_likely, stack
from pagemill.ops.triton_ops import TritonOps


@dataclass(frozen=True, slots=True, kw_only=True)
class StackedExperts(Experts):
    """Holds a mixture whose experts' weights lie in two tensors, one expert behind the other.

    gate_up [experts, 2 * intermediate, hidden], down [experts, hidden, intermediate].
    """

    gate_up: Tensor
    down: Tensor


@dataclass(frozen=True, slots=True)
class StackedHeads(HeadWeights):
    """Holds one projection for each head in one tensor [heads, outputs, inputs]."""

    stacked: Tensor


class GpuDecoder(Decoder):
    """Runs decoders on `TritonOps`. A mixture of experts that are not plain weights (quantized, say) runs expert by
    expert, and waits for the device."""

    ops: TritonOps

    def __post_init__(self) -> None:
        super().__post_init__()
        layers = tuple(
            replace(layer, mlp=_stacked(layer.mlp), latent=_stacked_heads(layer.latent))
            for layer in self.weights.layers
        )
        self.weights = replace(self.weights, layers=layers)
        self.waits = any(type(layer.mlp) is Experts for layer in layers)

    @torch.inference_mode()
    def forward(
        self,
        token_ids: Tensor,
        batch: AttentionBatch,
        pool: LayerCaches,
        on_layer: OnLayer | None = None,
        adapters: Sequence[AdapterTokens] = (),
    ) -> Tensor:
        """Returns what `Decoder.forward` does."""
        layers = self.weights.layers
        x = self._embed(token_ids)
        angles = self._angles_of(batch)
        following = [*(weights.input_norm for weights in layers[1:]), self.weights.final_norm]
        normed = self._norm(x, layers[0].input_norm)
        for index, (layer, weights, next_norm) in enumerate(zip(self.spec.layers, layers, following, strict=True)):
            if on_layer is not None:
                on_layer(index)
            adapt = self._adapting(index, adapters)
            out = self._attend(normed, layer, weights, angles, batch, self._group_of[index], pool.layer(index), adapt)
            normed = self._add(x, out, weights.post_attention_norm, weights.pre_mlp_norm)
            out = self._mlp(normed, weights, adapt)
            normed = self._add(x, out, weights.post_mlp_norm, next_norm)
        return normed

    def _add(self, x: Tensor, out: Tensor, post_norm: Tensor | None, norm: Tensor) -> Tensor:
        """Adds a layer's output to the residual x, in place, and returns the sum's norm."""
        return self.ops.add_rms_norm(x, out, norm, self.spec.norm_eps, self._post(post_norm))

    def _turn(self, heads: Tensor, weights: LayerWeights, angles: Angles | None) -> tuple[Tensor, Tensor, Tensor]:
        if angles is None:
            return super()._turn(heads, weights, angles)
        spec = self.spec
        turned = heads[:, : spec.num_heads + spec.num_kv_heads]
        if spec.qk_norm:
            assert weights.q_norm is not None
            assert weights.k_norm is not None
            self.ops.norm_and_rotate(turned, spec.num_heads, weights.q_norm, weights.k_norm, spec.norm_eps, *angles)
        else:
            self.ops.rotate(turned, *angles)
        q, k, v = torch.split(heads, [spec.num_heads, spec.num_kv_heads, spec.num_kv_heads], dim=1)
        return q, k, v

    def _mlp(self, normed: Tensor, weights: LayerWeights, adapt: Adapt) -> Tensor:
        mlp, moe = weights.mlp, self.spec.moe
        if not isinstance(mlp, StackedExperts):
            return super()._mlp(normed, weights, adapt)
        assert moe is not None
        logits = mlp.router(normed.float())
        if moe.most_likely:
            routing = most_likely(logits, moe.experts_per_token, normalize=moe.normalize)
        else:
            routing = Routing.of(*choose_experts(logits, mlp.correction, moe))
        out = apply_experts(
            normed, routing, mlp.gate_up, mlp.down,
            activation=self.spec.activation, matrix_units=self.ops.has_matrix_units(normed.dtype),
        )  # fmt: skip
        out = mlp.joined(out)
        return out if mlp.shared is None else out + apply_mlp(normed, mlp.shared, self.spec.activation, self.ops)

    def _per_head(self, weights: HeadWeights, x: Tensor) -> Tensor:
        if not isinstance(weights, StackedHeads):
            return super()._per_head(weights, x)
        return torch.bmm(x.transpose(0, 1), weights.stacked.transpose(1, 2)).transpose(0, 1)


def _stacked(mlp: GatedMLP | Experts) -> GatedMLP | Experts:
    """Returns a mixture with its experts' weights stacked, if they can be; else what was given."""
    if not isinstance(mlp, Experts):
        return mlp
    gate_up = stack([expert.gate_up for expert in mlp.experts])
    down = stack([expert.down for expert in mlp.experts])
    if gate_up is None or down is None:
        return mlp
    return StackedExperts(
        mlp.router, mlp.experts, mlp.correction, mlp.shared, gate_up=gate_up, down=down, join=mlp.join
    )


def _stacked_heads(latent: LatentWeights | None) -> LatentWeights | None:
    """Returns latent attention with its heads' projections stacked."""
    if latent is None:
        return None
    both = []
    for heads in (latent.key_up, latent.value_up):
        stacked = stack(heads.linears)
        both.append(heads if stacked is None else StackedHeads(heads.linears, stacked))
    return replace(latent, key_up=both[0], value_up=both[1])
