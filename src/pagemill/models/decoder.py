"""Defines the one decoder, driven by `DecoderSpec`, and its weights. It runs on any operators and attention."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pagemill.attention.interface import AttentionBackend, AttentionBatch, LayerCache
from pagemill.kvcache.layer_groups import group_layers
from pagemill.models.adapter import AdapterTokens, runs_of
from pagemill.models.latent_attention import HeadWeights, LatentWeights, absorbed_queries, each_head
from pagemill.models.rope import AngleTable
from pagemill.models.routing import choose_experts
from pagemill.models.sharding import ShardedEmbedding
from pagemill.models.spec import Activation, DecoderSpec, LayerSpec, MoESpec
from pagemill.ops.interface import AllowedOutputs, Linear, Ops

OnLayer = Callable[[int], None]
Adapt = Callable[[str, Tensor, Tensor], Tensor]
"""Adds to the outputs of a layer's projection, which is named as in `AdapterLayer`, for its inputs."""
Angles = tuple[Tensor, Tensor]
"""Cosines and sines of a batch's tokens, fp32 [tokens, rotary_dim / 2]."""


@dataclass(frozen=True, slots=True)
class GatedMLP:
    """Holds an MLP. gate_up maps hidden to 2 * intermediate, gate rows first; down maps intermediate to hidden."""

    gate_up: Linear
    down: Linear


@dataclass(frozen=True, slots=True)
class Experts:
    """Holds a mixture of experts. router maps hidden to experts and is packed in float32.

    correction: fp32 [experts], as `choose_experts` takes it. shared: all tokens go through it too. join: adds the
    ranks' parts of the experts' output up; None where these are whole.
    """

    router: Linear
    experts: tuple[GatedMLP, ...]
    correction: Tensor | None = None
    shared: GatedMLP | None = None
    join: Callable[[Tensor], Tensor] | None = field(default=None, kw_only=True)

    def joined(self, output: Tensor) -> Tensor:
        return output if self.join is None else self.join(output)


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """Holds a layer's weights as they lie on the device: packed linear layers, norms in fp32.

    qkv maps hidden to (heads + 2 * kv_heads) * head_dim, rows of q, then k, then v; with `latent`, see there.
    Norms have their offsets added. q_norm and k_norm [head_dim] and the post norms [hidden] are there only if the spec
    says so.
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
    latent: LatentWeights | None = None


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    """Holds all weights of a decoder.

    embedding [vocab, hidden] is in the model's dtype, or None if it is tied: then it is the rows of lm_head, which maps
    hidden to vocab.
    """

    embedding: Tensor | ShardedEmbedding | None
    layers: tuple[LayerWeights, ...]
    final_norm: Tensor
    lm_head: Linear


class LayerCaches(Protocol):
    """Gives a decoder what it uses of the device pool."""

    def layer(self, index: int) -> LayerCache:
        """Returns a layer's cache; the same object as long as the pool lives."""


@dataclass(eq=False, repr=False)
class Decoder:
    """Runs one step: token ids in, hidden states out, K/V written to and read from the pool's frames.

    groups: the layer groups that `AttentionBatch.groups` and the pool must follow.
    waits:  True if `forward` waits for the device on the way, so that no CUDA graph can hold it.
    """

    spec: DecoderSpec
    weights: DecoderWeights
    ops: Ops
    attention: AttentionBackend
    dtype: torch.dtype

    def __post_init__(self) -> None:
        spec, self.device = self.spec, self.weights.final_norm.device
        self.groups = group_layers([layer.window for layer in spec.layers])
        self._group_of = [self.groups.place(index)[0] for index in range(len(spec.layers))]
        self.waits = any(layer.moe for layer in spec.layers)
        self._angles = [AngleTable(rope, self.device) for rope in spec.ropes]
        # The reference rounds the scale to the weights' dtype before it multiplies.
        self._embedding_scale = torch.tensor(spec.embedding_scale, dtype=self.dtype, device=self.device)

    @torch.inference_mode()
    def forward(
        self,
        token_ids: Tensor,
        batch: AttentionBatch,
        pool: LayerCaches,
        on_layer: OnLayer | None = None,
        adapters: Sequence[AdapterTokens] = (),
    ) -> Tensor:
        """Returns the hidden states [tokens, hidden] of token_ids int64 [tokens], after the final norm.

        token_ids: in the batch's order.
        on_layer:  called with each layer's number when the layer begins.
        adapters:  those that tokens of the batch have; no token may have two.
        """
        x = self._embed(token_ids)
        angles = self._angles_of(batch)
        for index, (layer, weights) in enumerate(zip(self.spec.layers, self.weights.layers, strict=True)):
            if on_layer is not None:
                on_layer(index)
            adapt = self._adapting(index, adapters)
            normed = self._norm(x, weights.input_norm)
            out = self._attend(normed, layer, weights, angles, batch, self._group_of[index], pool.layer(index), adapt)
            x = x + self._norm(out, self._post(weights.post_attention_norm))
            out = self._mlp(self._norm(x, weights.pre_mlp_norm), weights, adapt)
            x = x + self._norm(out, self._post(weights.post_mlp_norm))
        return self._norm(x, self.weights.final_norm)

    def reach(self, positions: int) -> None:
        """Computes the angles of positions 0 to positions - 1 ahead: `forward` finds them, and leaves them in place."""
        for table in self._angles:
            table.reach(positions)

    @torch.inference_mode()
    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """Returns the logits, float32 [rows, vocab], of hidden [rows, hidden] from `forward`, after the final soft cap.

        out: float32 [rows, vocab], into which narrower logits are widened; fresh memory would cost page faults.
        """
        return self.ops.widen(self.weights.lm_head(hidden), self.spec.final_soft_cap, out)

    def argmax(self, hidden: Tensor, allowed: AllowedOutputs | None = None) -> npt.NDArray[np.int64] | None:
        """Returns each row's argmax, among the allowed tokens, as the sampler finds it in `logits`; None: it has to
        look there itself."""
        return None

    def _embed(self, token_ids: Tensor) -> Tensor:
        """Returns what the first layer takes, [tokens, hidden]."""
        embedding = self.weights.embedding
        x = self.weights.lm_head.rows(token_ids).to(self.dtype) if embedding is None else embedding[token_ids]
        return x * self._embedding_scale if self.spec.embedding_scale != 1.0 else x

    def _angles_of(self, batch: AttentionBatch) -> list[Angles]:
        """Returns the angles of a batch's tokens, by rotary embedding."""
        self.reach(batch.max_context_len)
        return [(table.cos[batch.positions], table.sin[batch.positions]) for table in self._angles]

    def _norm(self, x: Tensor, weight: Tensor | None) -> Tensor:
        """Returns x [tokens, hidden] normed; as it is without a weight."""
        return x if weight is None else self.ops.rms_norm(x, weight, self.spec.norm_eps)

    def _post(self, weight: Tensor | None) -> Tensor | None:
        """Returns the weight of a norm of what is added, if the model has such norms."""
        if not self.spec.post_norms:
            return None
        assert weight is not None
        return weight

    def _attend(
        self,
        normed: Tensor,
        layer: LayerSpec,
        weights: LayerWeights,
        angles: list[Angles],
        batch: AttentionBatch,
        group: int,
        cache: LayerCache,
        adapt: Adapt,
    ) -> Tensor:
        """Returns what a layer's attention gives for its normed input [tokens, hidden]."""
        spec, tokens = self.spec, normed.shape[0]
        joined = adapt("qkv", normed, weights.qkv(normed))
        turns = None if layer.rope is None else angles[layer.rope]
        v: Tensor | None = None
        if weights.latent is None:
            q, k, v = self._turn(joined.view(tokens, -1, spec.head_dim), weights, turns)
        else:
            assert spec.latent is not None
            q, k = absorbed_queries(joined, weights.latent, spec.latent, turns, self.ops, self._per_head)
        of_group = batch.groups[group]
        rest = None if of_group.remainders is None else of_group.remainders.slots
        self.attention.write(k, v, cache, of_group.slots, rest)
        out, _ = self.attention.attend(
            q, cache, batch, group, scale=spec.scale, window=layer.window, soft_cap=spec.attention_soft_cap
        )
        if weights.latent is not None:
            out = self._per_head(weights.latent.value_up, out)
        context = out.reshape(tokens, -1)
        return adapt("o", context, weights.o(context))

    def _turn(self, heads: Tensor, weights: LayerWeights, angles: Angles | None) -> tuple[Tensor, Tensor, Tensor]:
        """Returns q, k and v of heads [tokens, all heads, head_dim], q and k normed and rotated as the model does."""
        spec, ops = self.spec, self.ops
        q, k, v = torch.split(heads, [spec.num_heads, spec.num_kv_heads, spec.num_kv_heads], dim=1)
        if spec.qk_norm:
            assert weights.q_norm is not None
            assert weights.k_norm is not None
            q = ops.rms_norm(q, weights.q_norm, spec.norm_eps)
            k = ops.rms_norm(k, weights.k_norm, spec.norm_eps)
        if angles is not None:
            ops.rotate(q, *angles)
            ops.rotate(k, *angles)
        return q, k, v

    def _per_head(self, weights: HeadWeights, x: Tensor) -> Tensor:
        """Implements `PerHead`."""
        return each_head(weights, x)

    def _adapting(self, layer: int, adapters: Sequence[AdapterTokens]) -> Adapt:
        """Returns what adds the adapters' parts to the outputs y of a layer's projection of x, and returns them."""

        def adapt(place: str, x: Tensor, y: Tensor) -> Tensor:
            if runs := runs_of(adapters, layer, place):
                self.ops.add_low_rank(x, y, runs)
            return y

        return adapt

    def _mlp(self, normed: Tensor, weights: LayerWeights, adapt: Adapt) -> Tensor:
        """Returns what a layer's MLP gives for its normed input [tokens, hidden]."""
        spec = self.spec
        if isinstance(weights.mlp, Experts):
            assert spec.moe is not None
            return _apply_experts(normed, weights.mlp, spec.moe, spec.activation, self.ops)
        return apply_mlp(normed, weights.mlp, spec.activation, self.ops, adapt)


def _apply_experts(x: Tensor, weights: Experts, spec: MoESpec, activation: Activation, ops: Ops) -> Tensor:
    """Returns the experts' output [tokens, hidden] for x [tokens, hidden], in the dtype of x.

    Routing is in fp32. Tokens are grouped by expert. The experts add to their tokens in ascending order, in fp32, so
    that a token's result does not depend on the other tokens. What all tokens go through is added to their rounded sum.
    """
    shares, chosen = choose_experts(weights.router(x.float()), weights.correction, spec)
    total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for expert, mlp in enumerate(weights.experts):
        rows, rank = torch.nonzero(chosen == expert, as_tuple=True)
        if rows.numel():
            out = apply_mlp(x[rows], mlp, activation, ops)
            total[rows] += out.float() * shares[rows, rank].unsqueeze(-1)
    out = weights.joined(total.to(x.dtype))
    return out if weights.shared is None else out + apply_mlp(x, weights.shared, activation, ops)


def _no_adapter(place: str, x: Tensor, y: Tensor) -> Tensor:
    return y


def apply_mlp(x: Tensor, mlp: GatedMLP, activation: Activation, ops: Ops, adapt: Adapt = _no_adapter) -> Tensor:
    """Returns down(activation(gate(x)) * up(x)) for x [tokens, hidden]."""
    gated = ops.gated(adapt("gate_up", x, mlp.gate_up(x)), activation)
    return adapt("down", gated, mlp.down(gated))


DecoderMaker = Callable[[DecoderSpec, DecoderWeights, Any, Any, torch.dtype], Decoder]
"""Makes a decoder of a model's description, its weights, operators and attention that belong together, and dtype."""
