"""Holds a decoder's weights as they lie on the device: packed linear layers, norms in fp32."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from pagemill.ops.interface import Linear


@dataclass(frozen=True, slots=True)
class GatedMLP:
    """gate_up maps hidden to 2 * intermediate, gate rows first; down maps intermediate to hidden."""

    gate_up: Linear
    down: Linear


@dataclass(frozen=True, slots=True)
class Experts:
    """router maps hidden to experts and is packed in float32."""

    router: Linear
    experts: tuple[GatedMLP, ...]


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """qkv maps hidden to (heads + 2 * kv_heads) * head_dim, rows of q, then k, then v.

    Norms are fp32, with their offsets added. q_norm and k_norm [head_dim] and the post norms [hidden] are there only if
    the spec says so.
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
    """embedding [vocab, hidden] is in the model's dtype, or None if it is tied: then it is the rows of lm_head.

    lm_head maps hidden to vocab.
    """

    embedding: Tensor | None
    layers: tuple[LayerWeights, ...]
    final_norm: Tensor
    lm_head: Linear
