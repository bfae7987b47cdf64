"""The one attention operation, and what it needs to know of a step. Every backend implements `AttentionBackend`."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


class _LayerTensors(NamedTuple):
    key: Tensor
    value: Tensor
    key_scale: Tensor | None = None
    value_scale: Tensor | None = None


class LayerCache(_LayerTensors):
    """Holds one layer's keys and values in the device pool, as views [frames, kv_heads, block_size, elements of a
    head]. Values may be narrower than keys, if they are the first numbers of these (`values_in_keys`). Where n lie side
    by side (see `KVLayout`), keys are [frames, kv_heads, block_size, elements / n, n] and values
    [frames, kv_heads, block_size / n, n, elements].

    Strides are the layout's: any order of dimensions in memory is allowed, also a different one for K and V.
    int8 elements are multiples of their token's scale, fp32 [frames, kv_heads, block_size]. uint8 elements are two
    numbers of 4 bits, whose scales and lows are int32 [frames, kv_heads, groups x block_size]. Neighbouring tokens'
    scales lie side by side; see `attention/quantize.py`. Other dtypes, those of 8-bit floating point too, have none.

    What follows from the tensors is found once: each step asks for it.
    """

    @cached_property
    def beside(self) -> int:
        """Elements that lie side by side."""
        return self.key.shape[-1] if self.key.dim() == 5 else 1

    @cached_property
    def block_shape(self) -> tuple[int, int, int]:
        """(kv_heads, block_size, head_dim), the last of keys."""
        packed = 2 if self.key.dtype == torch.uint8 else 1
        return self.key.shape[1], self.key.shape[2], math.prod(self.key.shape[3:]) * packed

    @cached_property
    def value_dim(self) -> int:
        """Numbers of a value."""
        return self.value.shape[-1] * (2 if self.value.dtype == torch.uint8 else 1)

    @cached_property
    def values_in_keys(self) -> bool:
        """True if a value is the first numbers of its key, stored once."""
        return self.value.data_ptr() == self.key.data_ptr()

    @cached_property
    def elements(self) -> tuple[Tensor, Tensor]:
        """Keys and values; floating point of 8 bits as bytes."""
        key, value = (each.view(torch.uint8) if each.dtype in _FLOAT8 else each for each in (self.key, self.value))
        return key, value

    @cached_property
    def strides(self) -> tuple[int, ...]:
        """Strides of keys, of values, and of both's scales the first two, or 0."""
        scales = (0, 0) if self.key_scale is None else self.key_scale.stride()[:2]
        value_scales = (0, 0) if self.value_scale is None else self.value_scale.stride()[:2]
        return (*self.key.stride(), *self.value.stride(), *scales, *value_scales)


_FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)


@dataclass(frozen=True, slots=True)
class GroupBatch:
    """Holds one layer group's part of a step.

    tables int32 [rows, entries]  frame numbers; entry i holds positions i*block_size ..; -1 where nothing is held
    slots  int64 [tokens]         where each new token's K/V go: frame * block_size + offset; -1: do not write;
                                  not changed after the first `write`
    remainders  the same for the remainders of these layers' keys and values, or None
    precise     a query adds them to the keys and values of its own position and of the `precise` - 1 before it
    """

    tables: Tensor
    slots: Tensor
    remainders: GroupBatch | None = None
    precise: int = 0


def join_remainders(groups: Sequence[GroupBatch], remainders: int, precise: int) -> tuple[GroupBatch, ...]:
    """Makes the last `remainders` groups, which hold remainders of as many first ones, parts of these."""
    if not remainders:
        return tuple(groups)
    pairs = zip(groups, groups[-remainders:], strict=False)
    return (
        *(replace(group, remainders=rest, precise=precise) for group, rest in pairs),
        *groups[remainders:-remainders],
    )


class HostLengths(NamedTuple):
    """Holds the lengths of a step's rows on the host, int32 [rows]: query tokens, and keys up to the last of them."""

    query: Tensor
    context: Tensor


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """Describes a step's rows, the same for all layers. Query tokens lie one row after the other.

    query_start  int32 [rows + 1]  row r's query tokens are query_start[r] .. query_start[r + 1]
    context_lens int32 [rows]      keys up to and including the row's last query token
    positions    int64 [tokens]    position of each query token in its sequence
    groups       by layer group
    max_query_len, max_context_len: maxima over rows, on the host
    host         lengths on the host; None where they are not known to it, as in a step that is captured once for many
    common       int32 [rows]      first keys that row r has in common with row r - 1: in the same frames, in all groups
                                   without a window, and whole chunks of both; see `JoinedRows`. Only rows of one query
                                   have any. None: no row does
    """

    query_start: Tensor
    context_lens: Tensor
    positions: Tensor
    groups: tuple[GroupBatch, ...]
    max_query_len: int
    max_context_len: int
    host: HostLengths | None = None
    common: Tensor | None = None


class JoinedRows(NamedTuple):
    """States how a backend attends rows together that have keys in common.

    most: rows that it joins; so many in `AttentionBatch.common`, one after the other, have one that is 0.
    chunks: returns the lengths of rows' chunks of keys, int32, for context lengths int32 [n] in a batch of so many
        rows. Only rows with chunks of one length have keys in common.
    """

    most: int
    chunks: Callable[[NDArray[np.int32], int], NDArray[np.int32]]


class AttentionBackend(Protocol):
    """Takes K/V in, and attends, through block tables. What lies beyond a context's length may be NaN; it is never
    used."""

    name: str
    """Part of the numerics id: equal names give equal bits on equal machines."""
    kv_formats: tuple[str, ...] | None
    """Names of the KV formats that it takes; None: all."""
    waits: bool
    """True if `write` or `attend` waits for the device, so that no CUDA graph can hold it."""

    def write(
        self, key: Tensor, value: Tensor | None, cache: LayerCache, slots: Tensor, remainder_slots: Tensor | None = None
    ) -> None:
        """Writes key [tokens, kv_heads, head_dim] and value [tokens, kv_heads, value_dim] to their slots, converted to
        the cache's dtype; and what that leaves out to slots of remainders, if they are given (4-bit caches only).

        value: None where values lie in keys.

        What a slot holds then depends on its own token only.
        """

    def joined_rows(self, heads: int, kv_heads: int) -> JoinedRows | None:
        """Returns how rows with keys in common are attended together, by so many heads; None: each by itself."""

    def attend(
        self,
        query: Tensor,
        cache: LayerCache,
        batch: AttentionBatch,
        group: int,
        *,
        scale: float,
        window: int | None = None,
        soft_cap: float | None = None,
        key_start: Tensor | None = None,
        key_end: Tensor | None = None,
        return_lse: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Attends, causally, from query [tokens, heads, head_dim] (heads a multiple of kv_heads; head h reads kv head
        h // (heads // kv_heads)).

        A query at position p of row r attends to keys max(p - window + 1, key_start[r]) .. min(p, key_end[r] - 1).
        Where the group has remainders, keys and values from p - precise + 1 on are those of the slot plus these.
        soft_cap c: scores become c * tanh(score / c) before the mask. Scores and sums are fp32.
        Returns the output [tokens, heads, value_dim], in the query's dtype, and on request the log-sum-exp fp32
        [tokens, heads] (-inf where nothing was attended; the output is 0 there).
        """


def merge_states(output_a: Tensor, lse_a: Tensor, output_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Merges two partial attentions over disjoint keys (FlashInfer, MLSys 2025, section 2.2).

    Outputs fp32 [tokens, heads, head_dim], log-sum-exps fp32 [tokens, heads]; a state that attended nothing has -inf.
    """
    lse = torch.logaddexp(lse_a, lse_b)
    safe = torch.where(torch.isneginf(lse), torch.zeros_like(lse), lse)
    weight_a = torch.exp(lse_a - safe).unsqueeze(-1)
    weight_b = torch.exp(lse_b - safe).unsqueeze(-1)
    return output_a * weight_a + output_b * weight_b, lse
