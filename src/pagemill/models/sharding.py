"""Sharding: which rows of each weight a rank of a tensor-parallel model holds, and what it gets from the others.

Every projection is cut by its outputs, and activations are gathered before and after those that take in what all ranks
hold a part of. So each output is one chain over all of its inputs, summed by one rank with the kernel that a single
process would use: the bits do not depend on the number of ranks. Megatron-LM (Shoeybi et al., 2019) cuts every second
projection by its inputs instead and adds the ranks' sums up, which takes two collectives in a layer for the four here,
and rounds in another order for every number of ranks. So do GPUs here (`Sharding.sums`), whose libraries choose kernels
by the size of a part in any case.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from pagemill import _kernels
from pagemill.errors import ConfigError
from pagemill.models.spec import DecoderSpec
from pagemill.ops.interface import Linear


class NativeExchange(NamedTuple):
    """Is an exchange as kernels have it. idle: told now and then for how many seconds this rank has waited for others;
    raises RuntimeError if they will not come."""

    exchange: _kernels.Exchange
    idle: Callable[[float], None]


class Exchange(Protocol):
    """Carries activations between `size` ranks, of which this is number `rank`. All call it in the same order."""

    rank: int
    size: int

    @property
    def native(self) -> NativeExchange | None:
        """The same for kernels that exchange by themselves; None where only `all_gather` can."""

    def all_gather(self, part: Tensor, widths: Sequence[int]) -> Tensor:
        """Returns all ranks' parts [tokens, widths[rank]] side by side, [tokens, sum(widths)], in their dtype.

        Raises RuntimeError if a rank is gone, or has not come for too long.
        """


class SummingExchange(Exchange, Protocol):
    """Adds up besides, and hands out what one rank has."""

    def all_reduce(self, part: Tensor) -> Tensor:
        """Returns the sum of all ranks' parts, of one shape and dtype: the same bits on each. It may lie where the
        contiguous part did. Raises as `all_gather` does."""

    def broadcast(self, values: Tensor) -> None:
        """Puts rank 0's contiguous values into those of all others. Raises as `all_gather` does."""


def cut(size: int, ranks: int) -> list[slice]:
    """Returns the part of 0 .. size - 1 that each rank holds: neighbours, in order, of nearly equal numbers."""
    return [slice(size * rank // ranks, size * (rank + 1) // ranks) for rank in range(ranks)]


def kv_heads_of(spec: DecoderSpec, ranks: int) -> list[slice]:
    """Returns each rank's KV heads; one, which several ranks have, if there are fewer than ranks."""
    kv_heads = spec.num_kv_heads
    firsts = [kv_heads * rank // ranks for rank in range(ranks)]
    return [slice(first, first + max(1, kv_heads // ranks)) for first in firsts]


def check_heads(spec: DecoderSpec, ranks: int) -> None:
    """Raises ConfigError unless so many ranks can share a model's heads: equal numbers of query heads, and either equal
    numbers of KV heads, or one each, the same for several ranks. Latent attention is not shared."""
    if spec.latent is not None:
        raise ConfigError(
            f"tensor_parallel_size is {ranks}, but models with latent attention ({spec.family}) run on one rank only "
            f"so far; leave tensor_parallel_size out, or use replicas",
            param="tensor_parallel_size",
        )
    heads, kv_heads = spec.num_heads, spec.num_kv_heads
    if heads % ranks == 0 and (kv_heads % ranks == 0 or ranks % kv_heads == 0):
        return
    possible = [n for n in range(1, heads + 1) if heads % n == 0 and (kv_heads % n == 0 or n % kv_heads == 0)]
    raise ConfigError(
        f"tensor_parallel_size is {ranks}, but the model has {heads} attention heads and {kv_heads} KV heads: every "
        f"rank needs as many of the first, and as many of the second or one of them; use one of "
        f"{', '.join(map(str, possible))}",
        param="tensor_parallel_size",
    )


@dataclass(frozen=True)
class Sharding:
    """Says what a rank holds of a model whose heads `check_heads` has passed.

    sums: the exchange, where plain projections back to the hidden state are cut by their inputs, and added up; None
        where all are cut by their outputs.
    """

    exchange: Exchange
    sums: SummingExchange | None = None

    def part(self, size: int, unit: int = 1) -> slice:
        """Returns the rank's part of so many outputs, or inputs. unit: so many stay together."""
        part = cut(size // unit, self.exchange.size)[self.exchange.rank]
        return slice(unit * part.start, unit * part.stop)

    def qkv(self, spec: DecoderSpec) -> list[slice]:
        """Returns the rank's rows of q, of k and of v."""
        heads, kv_heads = self.part(spec.num_heads), kv_heads_of(spec, self.exchange.size)[self.exchange.rank]
        return [slice(part.start * spec.head_dim, part.stop * spec.head_dim) for part in (heads, kv_heads, kv_heads)]

    def spec(self, spec: DecoderSpec) -> DecoderSpec:
        """Returns the description of what the rank computes: that of the model, with the rank's heads."""
        heads, kv_heads = self.part(spec.num_heads), kv_heads_of(spec, self.exchange.size)[self.exchange.rank]
        return replace(spec, num_heads=heads.stop - heads.start, num_kv_heads=kv_heads.stop - kv_heads.start)

    def gathering(self, part: Linear, in_features: int, out_features: int, unit: int = 1) -> GatheringLinear:
        """Returns the whole layer of which the rank has a part: it takes the rank's part of its inputs.

        unit: so many inputs stay together.
        """
        return GatheringLinear(self.exchange, part, self.widths(in_features, unit), self.widths(out_features))

    def head(self, part: Linear, vocab_size: int) -> ShardedHead:
        """Returns the head, of whose vocabulary the rank has a part."""
        return ShardedHead(self.exchange, part, vocab_size, self.embedding(part.rows, vocab_size))

    def embedding(self, rows: Rows, vocab_size: int) -> ShardedEmbedding:
        """Returns the embedding, of whose vocabulary the rank has a part; `rows` looks up in it."""
        if self.sums is None:
            return ShardedEmbedding(self.exchange, rows, vocab_size)
        return SummedEmbedding(self.sums, rows, vocab_size)

    def widths(self, size: int, unit: int = 1) -> list[int]:
        """Returns the sizes of all ranks' parts."""
        return [unit * (part.stop - part.start) for part in cut(size // unit, self.exchange.size)]


class GatheringLinear:
    """Implements `Linear` for a layer whose inputs and outputs both lie on all ranks, in parts: two collectives.

    part: gives the rank's part of the outputs of all inputs. inputs, outputs: how many each rank has.
    """

    def __init__(self, exchange: Exchange, part: Linear, inputs: Sequence[int], outputs: Sequence[int]) -> None:
        self.in_features, self.out_features = inputs[exchange.rank], sum(outputs)
        self.exchange, self.part = exchange, part
        self.inputs, self.outputs = inputs, outputs

    def __call__(self, x: Tensor) -> Tensor:
        """Returns [tokens, out_features] for the rank's part of the inputs [tokens, in_features]."""
        whole = self.exchange.all_gather(x, self.inputs)
        return self.exchange.all_gather(self.part(whole), self.outputs)

    def rows(self, ids: Tensor) -> Tensor:
        raise TypeError("a sharded projection has no rows")


class SummingLinear:
    """Implements `Linear` for a layer whose inputs lie on all ranks, in parts: each multiplies its own, and one
    collective adds the products up.

    part: takes the rank's part of the inputs; one rank's adds the bias.
    """

    def __init__(self, exchange: SummingExchange, part: Linear) -> None:
        self.in_features, self.out_features = part.in_features, part.out_features
        self._exchange, self._part = exchange, part

    def __call__(self, x: Tensor) -> Tensor:
        """Returns [tokens, out_features] for the rank's part of the inputs [tokens, in_features]."""
        return self._exchange.all_reduce(self._part(x))

    def rows(self, ids: Tensor) -> Tensor:
        raise TypeError("a sharded projection has no rows")


class ShardedHead:
    """Implements `Linear` for a head that is cut by the vocabulary: one collective for logits, one for rows, which
    `embedding` looks up."""

    def __init__(self, exchange: Exchange, part: Linear, vocab_size: int, embedding: ShardedEmbedding) -> None:
        self.in_features, self.out_features = part.in_features, vocab_size
        self.exchange, self.part = exchange, part
        self._embedding = embedding

    def __call__(self, x: Tensor) -> Tensor:
        parts = cut(self.out_features, self.exchange.size)
        return self.exchange.all_gather(self.part(x), [part.stop - part.start for part in parts])

    def rows(self, ids: Tensor) -> Tensor:
        return self._embedding[ids]


class Rows(Protocol):
    def __call__(self, ids: Tensor, /) -> Tensor: ...


class ShardedEmbedding:
    """Looks tokens up in an embedding that is cut by the vocabulary, by one collective.

    rows: returns rows [n, hidden] of the rank's part, for ids int64 [n] within it.
    """

    def __init__(self, exchange: Exchange, rows: Rows, vocab_size: int) -> None:
        parts = cut(vocab_size, exchange.size)
        self._exchange, self._rows, self._vocab_size = exchange, rows, vocab_size
        self._ends = torch.tensor([part.stop for part in parts], dtype=torch.int64, device="cpu")
        self._mine = parts[exchange.rank]

    def __getitem__(self, ids: Tensor) -> Tensor:
        """Returns the rows of ids int64 [n]. Raises IndexError, before anything is exchanged, for others than the
        vocabulary's."""
        if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < self._vocab_size:
            raise IndexError(f"token ids {ids.tolist()} are not all in 0 .. {self._vocab_size - 1}")
        mine = self._rows(ids.clamp(self._mine.start, self._mine.stop - 1) - self._mine.start)
        hidden = mine.shape[1]
        every = self._exchange.all_gather(mine, [hidden] * self._exchange.size)
        owners = torch.bucketize(ids, self._ends, right=True)
        return every.view(len(ids), -1, hidden)[torch.arange(len(ids), dtype=torch.int64, device="cpu"), owners]


class SummedEmbedding(ShardedEmbedding):
    """Looks tokens up where parts are added up: all but one are zeros. Ids are not looked at by the host: those that
    are not the vocabulary's have zeros."""

    def __init__(self, exchange: SummingExchange, rows: Rows, vocab_size: int) -> None:
        super().__init__(exchange, rows, vocab_size)
        self._sums = exchange

    def __getitem__(self, ids: Tensor) -> Tensor:
        """Returns the rows of ids int64 [n]."""
        mine = (ids >= self._mine.start) & (ids < self._mine.stop)
        rows = self._rows(torch.where(mine, ids - self._mine.start, 0))
        return self._sums.all_reduce(rows.masked_fill(~mine.unsqueeze(1), 0.0))
