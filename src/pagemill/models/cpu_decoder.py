"""Runs a decoder's step on CPU as one C++ call (csrc/decoder.h), with the bits that `Decoder` gives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pagemill import _kernels
from pagemill.attention.cpu_backend import CpuAttention
from pagemill.attention.interface import AttentionBatch, GroupBatch
from pagemill.models.adapter import Adapter, AdapterTokens
from pagemill.models.decoder import Decoder, DecoderWeights, GatedMLP, LayerCaches, LayerWeights, OnLayer
from pagemill.models.sharding import GatheringLinear, NativeExchange, ShardedEmbedding, ShardedHead
from pagemill.models.spec import DecoderSpec
from pagemill.ops.cpu_ops import ACTIVATIONS, DTYPES, CpuLinear, CpuLowRank, CpuOps
from pagemill.ops.interface import AllowedOutputs, Linear


def cpu_decoder(
    spec: DecoderSpec, weights: DecoderWeights, ops: CpuOps, attention: CpuAttention, dtype: torch.dtype
) -> Decoder:
    """Returns a decoder that runs as one C++ call if it is dense and keeps keys and values, not latents; else operator
    by operator, with the same bits. One in parts does if they exchange through memory."""
    by_operator = spec.latent is not None or any(layer.moe for layer in spec.layers)
    if isinstance(weights.lm_head, ShardedHead):
        by_operator = by_operator or weights.lm_head.exchange.native is None
    kind = Decoder if by_operator else CpuDecoder
    return kind(spec, weights, ops, attention, dtype)


class CpuDecoder(Decoder):
    """Runs dense decoders whose weights `CpuOps` packed. A step is one call, which checks its arrays."""

    attention: CpuAttention

    def __post_init__(self) -> None:
        super().__post_init__()
        spec, weights = self.spec, self.weights
        self._pool: LayerCaches | None = None
        self._native_caches: list[_kernels.Cache] = []
        self._native_adapters: WeakKeyDictionary[Adapter, _kernels.Adapter] = WeakKeyDictionary()
        head, embedding = weights.lm_head, weights.embedding
        self._exchange: NativeExchange | None = None
        if isinstance(head, ShardedHead):
            self._exchange, head, embedding = head.exchange.native, head.part, None
        assert not isinstance(embedding, ShardedEmbedding)
        self._native = _kernels.Decoder(
            embedding, _packed(head, spec.hidden_size, head.out_features), weights.final_norm,
            spec.num_heads, spec.num_kv_heads, spec.head_dim, DTYPES[self.dtype], spec.norm_eps,
            ACTIVATIONS[spec.activation], spec.scale, spec.attention_soft_cap or 0.0, self._embedding_scale.item(),
        )  # fmt: skip
        for index, layer in enumerate(weights.layers):
            self._add_layer(index, layer)
        if self._exchange is not None:
            self._set_parts()

    def forward(
        self,
        token_ids: Tensor,
        batch: AttentionBatch,
        pool: LayerCaches,
        on_layer: OnLayer | None = None,
        adapters: Sequence[AdapterTokens] = (),
    ) -> Tensor:
        """Returns what `Decoder.forward` does. Raises IndexError for a token id that is not in the vocabulary, and
        ValueError for arrays of other dtypes or shapes."""
        groups = [_native_group(group) for group in batch.groups]
        for table in self._angles:
            table.reach(batch.max_context_len)
        angles = [(table.cos.numpy(), table.sin.numpy()) for table in self._angles]
        output = torch.empty(token_ids.shape[0], self.spec.hidden_size, dtype=self.dtype, device="cpu")
        exchange, embedded = self._exchange, None if self._exchange is None else self._embed(token_ids).contiguous()
        self._native.run(
            token_ids.numpy(), batch.positions.numpy(), batch.max_context_len, batch.query_start.numpy(),
            batch.context_lens.numpy(), groups, angles, self._layers_of(pool), output.data_ptr(), on_layer,
            [(self._native_of(adapter), tokens.numpy()) for adapter, tokens in adapters],
            0 if embedded is None else embedded.data_ptr(), None if exchange is None else exchange.idle,
        )  # fmt: skip
        return output

    def argmax(self, hidden: Tensor, allowed: AllowedOutputs | None = None) -> npt.NDArray[np.int64] | None:
        """Returns each row's argmax, among the allowed tokens, from the head's sums, without writing the logits, or
        None.

        A soft cap is rounded, which may make two logits equal: with one, the logits have to be written.
        """
        head = self.weights.lm_head
        if self.spec.final_soft_cap is not None or not isinstance(head, CpuLinear):
            return None
        return head.argmax(hidden, allowed)

    def operator_seconds(self) -> dict[str, float]:
        """Returns the seconds that `forward` has spent in each operator so far."""
        return self._native.seconds

    def _native_of(self, adapter: Adapter) -> _kernels.Adapter:
        native = self._native_adapters.get(adapter)
        if native is None:
            native = self._native_adapters[adapter] = _kernels.Adapter()
            for index, layer in enumerate(adapter.layers):
                for place, addition in enumerate(layer):
                    if addition is not None:
                        assert isinstance(addition, CpuLowRank)
                        native.set(self._native, index, place, addition.native)
        return native

    def _layers_of(self, pool: LayerCaches) -> list[_kernels.Cache]:
        if pool is not self._pool:
            caches = [pool.layer(index) for index in range(len(self.spec.layers))]
            shape = (self.spec.num_kv_heads, self.spec.head_dim)
            for cache in caches:
                kv_heads, _, head_dim = cache.block_shape
                if (kv_heads, head_dim) != shape:
                    raise ValueError(f"the pool has {kv_heads, head_dim} for {shape} (KV heads, head size)")
            self._native_caches = [self.attention.native(cache) for cache in caches]
            self._pool = pool
        return self._native_caches

    def _set_parts(self) -> None:
        assert self._exchange is not None
        first, *_ = self.weights.layers
        assert isinstance(first.mlp, GatedMLP)
        o, down, size = first.o, first.mlp.down, self.dtype.itemsize
        assert isinstance(o, GatheringLinear)
        assert isinstance(down, GatheringLinear)
        self._native.set_parts(
            self._exchange.exchange, *([size * width for width in part] for part in (o.inputs, o.outputs, down.inputs))
        )

    def _add_layer(self, index: int, weights: LayerWeights) -> None:
        spec, layer = self.spec, self.spec.layers[index]
        hidden, dim = spec.hidden_size, spec.head_dim
        if not isinstance(weights.mlp, GatedMLP):
            raise TypeError(f"layer {index} is a mixture of experts; the C++ executor runs dense layers")
        o, down = weights.o, weights.mlp.down
        queries, intermediate = spec.num_heads * dim, down.in_features
        self._native.add_layer(
            weights.input_norm,
            _packed(weights.qkv, hidden, queries + 2 * spec.num_kv_heads * dim),
            _closing(o, queries, hidden),
            weights.pre_mlp_norm,
            _packed(weights.mlp.gate_up, hidden, 2 * intermediate),
            _closing(down, intermediate, hidden),
            _norm(weights.q_norm, spec.qk_norm),
            _norm(weights.k_norm, spec.qk_norm),
            _norm(weights.post_attention_norm, spec.post_norms),
            _norm(weights.post_mlp_norm, spec.post_norms),
            -1 if layer.rope is None else layer.rope,
            self._group_of[index],
            layer.window or 0,
        )


_Tables: TypeAlias = npt.NDArray[np.int32]
_Slots: TypeAlias = npt.NDArray[np.int64]


def _native_group(group: GroupBatch) -> tuple[_Tables, _Slots, _Tables | None, _Slots | None, int]:
    rest = group.remainders
    if rest is None:
        return group.tables.numpy(), group.slots.numpy(), None, None, 0
    return group.tables.numpy(), group.slots.numpy(), rest.tables.numpy(), rest.slots.numpy(), group.precise


def _norm(weight: Tensor | None, wanted: bool) -> Tensor | None:
    """Returns the weight if the model has this norm. Raises ValueError if it is missing then."""
    if wanted and weight is None:
        raise ValueError("the weight of a norm that the model has is missing")
    return weight if wanted else None


def _closing(linear: Linear, columns: int, rows: int) -> _kernels.Linear:
    """Returns a layer back to the hidden state; of one in parts, this rank's."""
    if not isinstance(linear, GatheringLinear):
        return _packed(linear, columns, rows)
    if (linear.in_features, linear.out_features) != (columns, rows):
        raise TypeError(f"a part of {linear.in_features} to {linear.out_features} features must be of {columns, rows}")
    return _packed(linear.part, sum(linear.inputs), linear.part.out_features)


def _packed(linear: Linear, columns: int, rows: int) -> _kernels.Linear:
    if not isinstance(linear, CpuLinear) or (linear.in_features, linear.out_features) != (columns, rows):
        raise TypeError(f"{linear!r} must be packed by CpuOps and map {columns} to {rows} features")
    return linear.packed
