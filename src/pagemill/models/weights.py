"""A decoder's weights as they lie on the device: packed linears, fp32 norms. Loading fills them, executors read."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from pagemill.ops.interface import Linear


@dataclass(frozen=True, slots=True)
class GatedMLP:
    """gate_up: hidden -> 2 * intermediate, gate rows first; down: intermediate -> hidden."""

    gate_up: Linear
    down: Linear


@dataclass(frozen=True, slots=True)
class Experts:
    """router: hidden -> experts, packed in float32."""

    router: Linear
    experts: tuple[GatedMLP, ...]


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """qkv: hidden -> (heads + 2 * kv_heads) * head_dim, rows of q, then k, then v. Norms fp32, offsets folded in.

    q_norm, k_norm [head_dim] and the post norms [hidden] only where the spec says so.
    """

    input_norm: Tensor
    qkv: Linear
    o: Linear
    pre_mlp_norm: Tensor
    mlp: GatedMLP | Experts
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None
    post_attention_norm: Tensor | None = None
    post_mlp_norm: Tensor | None = None


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    """embedding [vocab, hidden] in the model's dtype; None where it is tied: the rows of lm_head.

    lm_head: hidden -> vocab.
    """

    embedding: Tensor | None
    layers: tuple[LayerWeights, ...]
    final_norm: Tensor
    lm_head: Linear
