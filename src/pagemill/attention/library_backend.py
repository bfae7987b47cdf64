"""LibraryAttention: paged attention by a library for GPUs, and by another backend where the library lacks something."""

from __future__ import annotations

import logging
from importlib import import_module
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from pagemill.attention.checks import check_attend
from pagemill.attention.interface import AttentionBackend, AttentionBatch, JoinedRows, LayerCache
from pagemill.attention.support import AttentionNeeds, Support

logger = logging.getLogger(__name__)

Plan = TypeVar("Plan")


class Options(NamedTuple):
    """States how a layer attends; see `AttentionBackend.attend`."""

    scale: float
    window: int | None
    soft_cap: float | None


class AttentionLibrary(Protocol[Plan]):
    """Calls one version of a library.

    support: what it takes. plans_on_host: whether its plans need `AttentionBatch.host`.
    """

    name: str
    support: Support
    plans_on_host: bool

    def plan(self, query: Tensor, cache: LayerCache, batch: AttentionBatch, group: int, options: Options) -> Plan:
        """Returns what the library needs of a step, made once for all layers of a group that attend alike."""

    def attend(
        self, query: Tensor, cache: LayerCache, plan: Plan, options: Options, return_lse: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Returns the output, and on request the log-sum-exp fp32 [tokens, heads]."""


class LibraryAttention(Generic[Plan]):
    """Implements `AttentionBackend` by a library.

    rest: writes, and attends where the library does not: keys of a range, windows of a block or less, heads and dtypes
    that it does not take, and captured steps if it plans on the host.
    """

    def __init__(self, library: AttentionLibrary[Plan], rest: AttentionBackend) -> None:
        self.name = f"{library.name}+{rest.name}"
        self.kv_formats = library.support.kv_formats
        self.waits = rest.waits
        self._library = library
        self._rest = rest
        self._planned: tuple[AttentionBatch, dict[tuple[int, Options], Plan | None]] | None = None

    def write(
        self, key: Tensor, value: Tensor | None, cache: LayerCache, slots: Tensor, remainder_slots: Tensor | None = None
    ) -> None:
        self._rest.write(key, value, cache, slots, remainder_slots)

    def joined_rows(self, heads: int, kv_heads: int) -> JoinedRows | None:
        return self._rest.joined_rows(heads, kv_heads)

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
        options = Options(scale, window, soft_cap)
        ranged = key_start is not None or key_end is not None
        with torch.cuda.device_of(query):  # type: ignore[no-untyped-call]  # kernels start on the current device
            plan = None if ranged else self._plan(query, cache, batch, group, options)
            if plan is not None:
                check_attend(query, cache, batch, group, key_start, key_end)
                return self._library.attend(query, cache, plan, options, return_lse)
        return self._rest.attend(
            query, cache, batch, group, scale=scale, window=window, soft_cap=soft_cap, key_start=key_start,
            key_end=key_end, return_lse=return_lse,
        )  # fmt: skip

    def _plan(
        self, query: Tensor, cache: LayerCache, batch: AttentionBatch, group: int, options: Options
    ) -> Plan | None:
        """Returns the plan of the step's layers that attend alike; None where the library does not take them."""
        if self._planned is None or self._planned[0] is not batch:
            self._planned = (batch, {})
        planned = self._planned[1]
        if (group, options) not in planned:
            takes = self._takes(query, cache, batch, options)
            planned[group, options] = self._library.plan(query, cache, batch, group, options) if takes else None
        return planned[group, options]

    def _takes(self, query: Tensor, cache: LayerCache, batch: AttentionBatch, options: Options) -> bool:
        support, (kv_heads, block_size, head_dim) = self._library.support, cache.block_shape
        if not len(query) or cache.beside != 1 or cache.key_scale is not None or cache.key.dtype != cache.value.dtype:
            return False
        if options.window is not None and options.window <= block_size:
            return False
        if self._library.plans_on_host and batch.host is None:
            return False
        needs = AttentionNeeds(
            query.dtype, str(cache.key.dtype).removeprefix("torch."), block_size, query.shape[1], kv_heads, head_dim,
            (options.window,), options.soft_cap, support.least_capability,
            cache.value_dim if cache.values_in_keys else None,
        )  # fmt: skip
        return support.refusal(needs) is None


def starts_of(lengths: Tensor) -> Tensor:
    """Returns where parts of these lengths begin that lie one after the other, and where they end: int32 [n + 1]."""
    return torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))


def imported(name: str) -> Any | None:
    """Returns a library's module; None where it is not installed, or does not load, which is logged."""
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            logger.warning("%s is not used: %s", name, error)
    except Exception as error:  # made for another torch, or without what it needs of CUDA
        logger.warning("%s is not used: %s", name, error)
    return None
