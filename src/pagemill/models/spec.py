"""Describes a decoder as plain data. Families differ only in how they fill this in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Activation = Literal["silu", "gelu_tanh"]


@dataclass(frozen=True)
class RopeSpec:
    """Describes the rotary embedding of some layers, with its scaling resolved.

    inv_freq: inverse frequencies, radians per position: half as many as leading dimensions of a head rotate.
    factor:   cos and sin are multiplied by it (yarn, longrope); 1.0 otherwise.
    """

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
    sigmoid: bool = False
    """True if an expert's share is the sigmoid of its logit, which does not depend on the others'; else all shares are
    a softmax."""
    correction: bool = False
    """True if a weight of each expert is added to its share where experts are chosen, and only there."""
    groups: int = 1
    """Experts form so many equal groups, neighbours in order. A token's are of its best `kept_groups`."""
    kept_groups: int = 1
    group_best: int = 1
    """A group is as good as the sum of so many of its best experts."""
    scale: float = 1.0
    """The chosen experts' shares are multiplied by it."""
    shared_size: int = 0
    """Intermediate size of the MLP that all tokens go through beside their experts; 0: there is none."""

    @property
    def most_likely(self) -> bool:
        """Returns True if a token's experts are those of the greatest logits, with their probabilities for shares."""
        return not (self.sigmoid or self.correction or self.groups > self.kept_groups) and self.scale == 1.0


@dataclass(frozen=True)
class LatentSpec:
    """Describes multi-head latent attention (MLA; DeepSeek-V2, 2024, section 2.1), computed in its absorbed form.

    A token keeps a latent of `rank` numbers and a rotated key of `rope_dim`, which all heads share. So there is one KV
    head, whose keys are both, and whose values are the latent. A head's query of `nope_dim` is multiplied by the
    transposed projection that would make its keys of the latent; what it attends, by the one that makes values of
    `value_dim`.

    query_rank: the queries are projections of a latent of this rank; None: of the hidden state.
    paired:     checkpoints hold rotary pairs side by side, not in halves; undone at load.
    norm_eps:   of the norms of latents.
    """

    rank: int
    rope_dim: int
    nope_dim: int
    value_dim: int
    query_rank: int | None = None
    paired: bool = True
    norm_eps: float = 1e-6

    @property
    def query_dim(self) -> int:
        """Numbers of a head's query before it is absorbed."""
        return self.nope_dim + self.rope_dim

    def products(self, hidden: int, heads: int) -> int:
        """Returns how many products of a weight a layer's projections take for one token."""
        queries, of = heads * self.query_dim, self.query_rank or hidden
        down = hidden * (self.rank + self.rope_dim + (self.query_rank or 0))
        return (
            down + of * queries + heads * self.rank * (self.nope_dim + self.value_dim) + heads * self.value_dim * hidden
        )


@dataclass(frozen=True)
class DecoderSpec:
    """Describes one decoder-only transformer. Sizes are in elements; `scale` multiplies query·key.

    head_dim: of queries and keys as they are attended; see `value_dim`.
    """

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
    latent: LatentSpec | None = None
    draft_layers: int = 0
    """Layers that checkpoints hold behind these, which only draft tokens (multi-token prediction). They are left
    out."""

    @property
    def value_dim(self) -> int:
        """Returns the size of a KV head's values as they are attended."""
        return self.head_dim if self.latent is None else self.latent.rank

    @property
    def layer_products(self) -> int:
        """Returns how many products of a weight all layers take for one token, without attention."""
        hidden, products = self.hidden_size, 0
        for layer in self.layers:
            if self.latent is not None:
                products += self.latent.products(hidden, self.num_heads)
            else:
                products += hidden * 2 * self.head_dim * (self.num_heads + self.num_kv_heads)
            if layer.moe and self.moe is not None:
                sizes = self.moe.experts_per_token * self.moe.intermediate_size + self.moe.shared_size
                products += 3 * hidden * sizes
            else:
                products += 3 * hidden * self.intermediate_size
        return products

    def attention_share(self, num_keys: int) -> float:
        """Returns the work of attending from one token to `num_keys` keys, as a share of its layers' other work."""
        full = sum(layer.window is None for layer in self.layers)
        return full * self.num_heads * (self.head_dim + self.value_dim) * num_keys / self.layer_products

    @property
    def products(self) -> int:
        """Returns how many products of a weight one token takes, the head's included, without attention."""
        return self.layer_products + self.hidden_size * self.vocab_size

    def cost_beside(self, other: DecoderSpec) -> float:
        """Returns the work of one token, the head's included, as a multiple of another model's."""
        return self.products / other.products
