"""Describes a decoder as plain data. Families differ only in how they fill this in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Activation = Literal["silu", "gelu_tanh"]


@dataclass(frozen=True)
class RopeSpec:
    """Describes the rotary embedding of some layers, with its scaling resolved.

    rotary_dim: leading dimensions of a head that rotate (the head size, unless partial).
    inv_freq:   rotary_dim / 2 inverse frequencies, radians per position.
    factor:     cos and sin are multiplied by it (yarn, longrope); 1.0 otherwise.
    """

    rotary_dim: int
    inv_freq: tuple[float, ...]
    factor: float = 1.0


@dataclass(frozen=True)
class LayerSpec:
    """Describes what one layer keeps and how it attends.

    window: a query at position p sees keys p - window + 1 .. p; None sees all.
    rope:   index into `DecoderSpec.ropes`; None for a layer without positions (SmolLM3).
    moe:    True if the layer has a mixture of experts in the place of one MLP.
    """

    window: int | None
    rope: int | None = 0
    moe: bool = False


@dataclass(frozen=True)
class MoESpec:
    """Describes the mixture of experts of those layers that have one."""

    num_experts: int
    experts_per_token: int
    intermediate_size: int
    normalize: bool
    """True if the chosen experts' weights are made to sum to 1."""


@dataclass(frozen=True)
class DecoderSpec:
    """Describes one decoder-only transformer. Sizes are in elements; `scale` multiplies query·key."""

    family: str
    vocab_size: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    layers: tuple[LayerSpec, ...]
    ropes: tuple[RopeSpec, ...]
    norm_eps: float
    activation: Activation
    scale: float
    max_position: int
    """The longest context the checkpoint declares, scaling included."""
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    post_norms: bool = False
    """Gemma 2/3: norms after attention and after the MLP too, before the residual is added."""
    attention_soft_cap: float | None = None
    final_soft_cap: float | None = None
    embedding_scale: float = 1.0
    tied_embeddings: bool = False
    moe: MoESpec | None = None

    @property
    def layer_products(self) -> int:
        """Returns how many products of a weight all layers take for one token, without attention."""
        hidden, products = self.hidden_size, 0
        for layer in self.layers:
            products += hidden * 2 * self.head_dim * (self.num_heads + self.num_kv_heads)
            if layer.moe and self.moe is not None:
                products += self.moe.experts_per_token * 3 * hidden * self.moe.intermediate_size
            else:
                products += 3 * hidden * self.intermediate_size
        return products

    def attention_share(self, num_keys: int) -> float:
        """Returns the work of attending from one token to `num_keys` keys, as a share of its layers' other work."""
        full = sum(layer.window is None for layer in self.layers)
        return full * 2 * self.num_heads * self.head_dim * num_keys / self.layer_products

    @property
    def products(self) -> int:
        """Returns how many products of a weight one token takes, the head's included, without attention."""
        return self.layer_products + self.hidden_size * self.vocab_size

    def cost_beside(self, other: DecoderSpec) -> float:
        """Returns the work of one token, the head's included, as a multiple of another model's."""
        return self.products / other.products
