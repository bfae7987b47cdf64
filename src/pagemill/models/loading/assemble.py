"""Builds a decoder's weights from a checkpoint, tensor by tensor: read, convert, join, check, pack, let go.

At any time at most one joined matrix exists beside what has been packed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial

import torch
from torch import Tensor

from pagemill.errors import UnsupportedModelError
from pagemill.models.decoder import DecoderWeights, Experts, GatedMLP, LayerWeights
from pagemill.models.latent_attention import HeadWeights, LatentWeights
from pagemill.models.loading.checkpoint import PLAIN_DTYPES, Checkpoint
from pagemill.models.loading.keep import Keep
from pagemill.models.loading.matrices import Pairs, kept_rows
from pagemill.models.loading.pieces import quantize_pieces
from pagemill.models.loading.tensor_reader import Progress, TensorReader
from pagemill.models.names import WeightNames
from pagemill.models.sharding import ShardedEmbedding, Sharding, SummingExchange, SummingLinear
from pagemill.models.spec import DecoderSpec, LatentSpec
from pagemill.ops.interface import Linear, Ops
from pagemill.ops.quantized import AffineWeight, Float8Weight, keep_int4


@dataclass
class Assembler:
    """Carries out one load. Calls `progress(done_bytes, total_bytes)` after each tensor, in stored bytes.

    sharding: what the decoder holds of the model; None for all of it. Everything is read and checked in either case.
    keep: gives parts that need not be made.
    """

    checkpoint: Checkpoint
    spec: DecoderSpec
    names: WeightNames
    ops: Ops
    dtype: torch.dtype
    device: torch.device
    progress: Progress | None
    quantization: str | None
    sharding: Sharding | None
    keep: Keep

    def __post_init__(self) -> None:
        counted = [name for name in self.checkpoint.tensors if not self._ignored(name)]
        self._reader = TensorReader(
            self.checkpoint, self.device, counted, self.progress, stages=self.ops.copies_weights
        )

    def assemble(self) -> DecoderWeights:
        """Returns the decoder's weights.

        Raises CorruptWeightsError if a tensor is missing, not finite or of a wrong shape, UnsupportedModelError if one
        has a dtype that is not supported or is not used.
        """
        spec, names = self.spec, self.names
        embedding: Tensor | ShardedEmbedding | None = None
        if not spec.tied_embeddings:
            embedding = self._embedding(names.embedding)
        self._reader.leave()  # an embedding of its own stays where it is
        # the largest matrix first: its copies are gone before the layers take memory
        lm_head = self._head(names.embedding if spec.tied_embeddings else names.lm_head)
        layers = tuple(self._layer(index) for index in range(len(spec.layers)))
        final_norm = self._norm(names.final_norm, spec.hidden_size)
        if not self.keep.checked:
            self._refuse_unused()
        return DecoderWeights(embedding, layers, final_norm, lm_head)

    def _head(self, name: str) -> Linear:
        vocab_size, sharding = self.spec.vocab_size, self.sharding
        head = self._linear((name,), (vocab_size,), self.spec.hidden_size, keep=self._parts(vocab_size))
        return head if sharding is None else sharding.head(head, vocab_size)

    def _embedding(self, name: str) -> Tensor | ShardedEmbedding:
        vocab_size, sharding = self.spec.vocab_size, self.sharding

        def make() -> Tensor:
            whole = self._reader.matrix((name,), (vocab_size,), self.spec.hidden_size, dtype=self.dtype)
            return whole if sharding is None else whole[sharding.part(vocab_size)].clone()

        part = self.keep.tensor(name, make)
        return part if sharding is None else sharding.embedding(part.__getitem__, vocab_size)

    def _parts(self, *sizes: int) -> list[slice] | None:
        """Returns the rows to keep of joined parts of these sizes; None for all."""
        return None if self.sharding is None else [self.sharding.part(size) for size in sizes]

    def _closing(self, name: str, columns: int, unit: int = 1, bias: bool = False) -> Linear:
        """Returns a layer back to the hidden size: its inputs and its outputs lie on all ranks.

        unit: so many inputs stay together.
        """
        hidden, sharding = self.spec.hidden_size, self.sharding
        if (part := self._summed(name, columns, unit, bias)) is not None:
            return SummingLinear(*part)
        linear = self._linear((name,), (hidden,), columns, bias, keep=self._parts(hidden))
        return linear if sharding is None else sharding.gathering(linear, columns, hidden, unit)

    def _summed(
        self, name: str, columns: int, unit: int = 1, bias: bool = False
    ) -> tuple[SummingExchange, Linear] | None:
        """Returns what adds up, and the rank's part, of a layer back to the hidden size that is cut by its inputs; None
        for one that is not. Weights that are not plain numbers are not: scales belong to several inputs."""
        sharding = self.sharding
        if sharding is None or sharding.sums is None or not self._is_plain((name,)):
            return None
        inputs = sharding.part(columns, unit)
        return sharding.sums, self._linear((name,), (self.spec.hidden_size,), columns, bias, inputs=inputs)

    def _layer(self, index: int) -> LayerWeights:
        spec, names = self.spec, self.names
        prefix = names.layer.format(layer=index)

        def norm(name: str, size: int, present: bool = True) -> Tensor | None:
            return self._norm(prefix + name, size) if present else None

        def names_of(parts: Sequence[str]) -> list[str]:
            return [prefix + part for part in parts]

        mlp: GatedMLP | Experts
        if spec.layers[index].moe:
            mlp = self._experts(prefix)
        else:
            mlp = self._mlp(names_of(names.gate_up), prefix + names.down, spec.intermediate_size)
        qkv, latent = self._projections(prefix)
        head_outputs = spec.head_dim if spec.latent is None else spec.latent.value_dim
        return LayerWeights(
            input_norm=self._norm(prefix + names.input_norm, spec.hidden_size),
            qkv=qkv,
            o=self._closing(prefix + names.o, spec.num_heads * head_outputs, head_outputs, spec.o_bias),
            pre_mlp_norm=self._norm(prefix + names.pre_mlp_norm, spec.hidden_size),
            mlp=mlp,
            q_norm=norm(names.q_norm, spec.head_dim, spec.qk_norm),
            k_norm=norm(names.k_norm, spec.head_dim, spec.qk_norm),
            post_attention_norm=norm(names.post_attention_norm, spec.hidden_size, spec.post_norms),
            post_mlp_norm=norm(names.post_mlp_norm, spec.hidden_size, spec.post_norms),
            latent=latent,
        )

    def _projections(self, prefix: str) -> tuple[Linear, LatentWeights | None]:
        """Returns the joined projections of the hidden state, and what latent attention has beside them."""
        spec, names = self.spec, self.names
        parts = [prefix + part for part in names.qkv]
        if spec.latent is not None:
            return self._latent(spec.latent, prefix, parts)
        queries, keys = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        unpair = [Pairs(spec.num_heads), Pairs(spec.num_kv_heads)] if names.paired_rope else ()
        keep = None if self.sharding is None else self.sharding.qkv(spec)
        return self._linear(parts, (queries, keys, keys), spec.hidden_size, spec.qkv_bias, unpair, keep), None

    def _latent(self, latent: LatentSpec, prefix: str, parts: list[str]) -> tuple[Linear, LatentWeights]:
        spec, names, rank = self.spec, self.names, latent.query_rank
        kept, queries = latent.rank + latent.rope_dim, spec.num_heads * latent.query_dim
        turning: Pairs | None = None
        shared: Pairs | None = None
        if latent.paired:
            turning, shared = Pairs(spec.num_heads, latent.nope_dim), Pairs(1, latent.rank)
        query_norm = query_up = None
        if rank is not None:
            parts = [prefix + names.query_down, *parts[1:]]
            query_norm = self._norm(prefix + names.query_norm, rank)
            query_up = self._linear((prefix + names.query_up,), (queries,), rank, unpair=(turning,))
            turning = None
        down = self._linear(parts, (rank or queries, kept), spec.hidden_size, unpair=(turning, shared))
        latent_norm = self._norm(prefix + names.latent_norm, latent.rank)
        key_up, value_up = self._head_projections(latent, prefix + names.latent_up)
        return down, LatentWeights(latent_norm, key_up, value_up, query_norm, query_up)

    def _head_projections(self, latent: LatentSpec, name: str) -> tuple[HeadWeights, HeadWeights]:
        """Returns what maps queries to latents, the transposed first rows of each head, and latents to values, its
        other rows. They are held in the model's dtype, however they are stored."""
        heads, sizes = self.spec.num_heads, (latent.nope_dim, latent.value_dim)

        @cache
        def whole() -> Tensor:
            matrix = self._reader.matrix((name,), (heads * sum(sizes),), latent.rank, dtype=self._held((name,)))
            return matrix.view(heads, sum(sizes), latent.rank)

        def packed(kind: str, cut: Callable[[Tensor], Tensor]) -> HeadWeights:
            def make(head: int) -> Linear:
                return self.ops.pack_linear(cut(whole()[head]).contiguous(), None, self.dtype)

            return HeadWeights(
                tuple(self.keep.linear(f"{name}.{kind}.{head}", partial(make, head)) for head in range(heads))
            )

        return (
            packed("key", lambda rows: rows[: latent.nope_dim].T),
            packed("value", lambda rows: rows[latent.nope_dim :]),
        )

    def _mlp(self, gate_up: Sequence[str], down: str, size: int) -> GatedMLP:
        return GatedMLP(self._gate_up(gate_up, size), self._closing(down, size, bias=self.spec.mlp_bias))

    def _gate_up(self, names: Sequence[str], size: int) -> Linear:
        hidden, bias = self.spec.hidden_size, self.spec.mlp_bias
        return self._linear(names, (size, size), hidden, bias, keep=self._parts(size, size))

    def _experts(self, prefix: str) -> Experts:
        spec, names = self.spec, self.names
        assert spec.moe is not None
        router = self._router(prefix + names.router, spec.moe.num_experts)
        experts, size, join = [], spec.moe.intermediate_size, None
        downs = [prefix + names.expert_down.format(expert=expert) for expert in range(spec.moe.num_experts)]
        together = all(self._is_plain((down,)) for down in downs)
        for expert, down in enumerate(downs):
            gate_up = [prefix + part.format(expert=expert) for part in names.expert_gate_up]
            if together and (part := self._summed(down, size, bias=spec.mlp_bias)) is not None:
                exchange, of_rank = part
                experts.append(GatedMLP(self._gate_up(gate_up, size), of_rank))
                join = exchange.all_reduce
            else:
                experts.append(self._mlp(gate_up, down, size))
        correction = shared = None
        if spec.moe.correction:
            name = prefix + names.router_correction
            correction = self.keep.tensor(name, partial(self._reader.vector, name, spec.moe.num_experts))
        if spec.moe.shared_size:
            gate_up = [prefix + part for part in names.shared_gate_up]
            shared = self._mlp(gate_up, prefix + names.shared_down, spec.moe.shared_size)
        return Experts(router, tuple(experts), correction, shared, join=join)

    def _router(self, name: str, num_experts: int) -> Linear:
        def make() -> Linear:
            weight = self._reader.matrix((name,), (num_experts,), self.spec.hidden_size, dtype=torch.float32)
            return self.ops.pack_linear(weight)

        return self.keep.linear(name, make)

    def _linear(
        self,
        parts: Sequence[str],
        rows: tuple[int, ...],
        columns: int,
        bias: bool = False,
        unpair: Sequence[Pairs | None] = (),
        keep: Sequence[slice] | None = None,
        inputs: slice | None = None,
    ) -> Linear:
        """Returns the joined parts' rows as a layer.

        keep: by part, the rows that the layer has; None for all.
        inputs: of plain weights, the columns that the layer has, one rank's with the bias; None for all.
        """
        return self.keep.linear("+".join(parts), lambda: self._packed(parts, rows, columns, bias, unpair, keep, inputs))

    def _packed(
        self,
        parts: Sequence[str],
        rows: tuple[int, ...],
        columns: int,
        bias: bool,
        unpair: Sequence[Pairs | None],
        keep: Sequence[slice] | None,
        inputs: slice | None,
    ) -> Linear:
        def kept(*joined: Tensor) -> Iterator[Tensor]:
            return (kept_rows(each, rows, keep) for each in joined)

        offsets = None
        if bias:
            (offsets,) = kept(self._reader.matrix(parts, rows, 0, unpair=unpair, dtype=torch.float32))
        if self._stays_float8(parts):
            *numbers, group = self._reader.float8(parts, rows, columns, unpair)
            values, scale = (part.to(self.device) for part in kept(*numbers))
            return self.ops.pack_float8(Float8Weight(values.view(torch.float8_e4m3fn), scale, group), offsets)
        bits, affine = self._bits(parts), self._kept_bits(parts)
        if affine is not None and (bits is None or self._keeps_narrow()):
            integers = self._reader.integers(parts, rows, columns, unpair)
            values, scale, low = (part.to(self.device) for part in kept(*integers))
            return self.ops.pack_affine(AffineWeight(values, scale, low, affine), offsets)
        if bits is None:
            (weight,) = kept(self._reader.matrix(parts, rows, columns, unpair=unpair, dtype=self._held(parts)))
            if inputs is not None:
                assert self.sharding is not None
                weight, offsets = weight[:, inputs].contiguous(), offsets if self.sharding.exchange.rank == 0 else None
            elif len(weight) < sum(rows) and not self.ops.copies_weights:
                weight = weight.clone()  # a view would hold what others have
            return self.ops.pack_linear(weight, offsets, self.dtype)
        if all(map(self.checkpoint.rounds, self._weights(parts))) and self.device.type == "cpu":
            rounded = self._reader.rounded(parts, rows, columns, unpair, bits)
            quantized = rounded.rows(lambda part: kept_rows(part, rows, keep))
            if keep is not None and not self.ops.copies_weights:
                quantized = quantized.rows(Tensor.clone)  # views would hold what others have
        elif bits == 4:
            quantized = keep_int4(*kept(*self._reader.integers(parts, rows, columns, unpair)))
        else:
            (weight,) = kept(self._reader.matrix(parts, rows, columns, unpair=unpair, dtype=self._stored(parts)))
            quantized = quantize_pieces(weight)
        return self.ops.pack_quantized(quantized, offsets, self.dtype)

    def _is_plain(self, parts: Sequence[str]) -> bool:
        """Returns True if a joined matrix is held as plain numbers, without scales."""
        return self._bits(parts) is None and self._kept_bits(parts) is None and not self._stays_float8(parts)

    def _stays_float8(self, parts: Sequence[str]) -> bool:
        return self._keeps_narrow() and all(map(self.checkpoint.stores_float8, self._weights(parts)))

    def _keeps_narrow(self) -> bool:
        """Returns True if weights stay as narrow as they are stored, in a model of any dtype."""
        return self.ops.keeps_narrow and self.quantization != "int8"

    def _held(self, parts: Sequence[str]) -> torch.dtype:
        """Returns the dtype in which a joined matrix that is not quantized is held.

        In a float32 model it is the stored one, if the operators widen it; else it is the model's.
        """
        return self._stored(parts) if self.dtype == torch.float32 and self.ops.widens_weights else self.dtype

    def _stored(self, parts: Sequence[str]) -> torch.dtype:
        """Returns the dtype in which all parts are stored; float32 if they differ, or are no plain numbers."""
        stored = {PLAIN_DTYPES.get(self.checkpoint.tensors[name].dtype) for name in self._weights(parts)}
        return (stored.pop() if len(stored) == 1 else None) or torch.float32

    def _bits(self, parts: Sequence[str]) -> int | None:
        """Returns the bits per value in which a joined matrix is held: the most that a part needs. None: in a dtype."""
        if self.quantization is None:
            return None
        if self.quantization == "int8":
            return 8
        return _bits_for({self.checkpoint.stored_bits(name) for name in self._weights(parts)})

    def _kept_bits(self, parts: Sequence[str]) -> int | None:
        """Returns the bits, 4 or 8, in which a joined matrix can be held without loss; None: in none.

        It can if all parts are stored in integers, in a float32 model, or in any whose operators keep what is narrow.
        """
        if self.dtype != torch.float32 and not self._keeps_narrow():
            return None
        return _bits_for({self.checkpoint.affine_bits(name) for name in self._weights(parts)})

    def _weights(self, parts: Sequence[str]) -> list[str]:
        """Returns the names of those parts' weights that are there; `_expect` refuses the others."""
        return [name for part in parts if (name := f"{part}.weight") in self.checkpoint.tensors]

    def _norm(self, name: str, size: int) -> Tensor:
        def make() -> Tensor:
            weight = self._reader.vector(f"{name}.weight", size)
            return weight + self.names.norm_offset if self.names.norm_offset else weight

        return self.keep.tensor(name, make)

    def _ignored(self, name: str) -> bool:
        spec, names = self.spec, self.names
        tied_head = spec.tied_embeddings and name == f"{names.lm_head}.weight" != f"{names.embedding}.weight"
        behind = range(len(spec.layers), len(spec.layers) + spec.draft_layers)
        drafts = any(name.startswith(names.layer.format(layer=index)) for index in behind)
        return tied_head or drafts or name.endswith(names.ignored)

    def _refuse_unused(self) -> None:
        left = self.checkpoint.tensors.keys() - self._reader.used
        unused = sorted(name for name in left if not self._ignored(name))
        unused = [name for name in unused if not self.checkpoint.adds_nothing(name)]
        if unused:
            raise UnsupportedModelError(
                f"{self.checkpoint.path} has {len(unused)} tensors that a {self.spec.family} decoder does not use, "
                f"first {unused[0]!r}; ignoring them would change the model's answers"
            )


def _bits_for(stored: set[int | None]) -> int | None:
    """Returns the bits, 4 or 8, that hold parts of so many stored bits; None unless all are stored in integers."""
    return None if None in stored or not stored else 4 if stored == {4} else 8
