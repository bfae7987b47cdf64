"""Queries: what a front end asks an engine between two steps, and how the engine answers each."""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, TypeVar

import msgspec

from pagemill.engine.kv_map import KVMap
from pagemill.engine.messages import (
    AbortRequests,
    Done,
    EngineReady,
    EngineRequest,
    Failure,
    FinishSequences,
    Held,
    KVBlocks,
    LoadProgress,
    PinList,
    SequenceList,
    Shutdown,
    Start,
    StepOutputs,
)
from pagemill.engine.stats import EngineStats
from pagemill.lora_request import LoRARequest
from pagemill.namespace import Namespace
from pagemill.tenant_limits import TenantLimits

if TYPE_CHECKING:
    from pagemill.engine.core import EngineCore

A = TypeVar("A")


class Query(msgspec.Struct, Generic[A]):
    """A query that is answered by an `A`."""

    def answer(self, core: EngineCore) -> A:
        """Returns the answer. Raises `PagemillError` children where the engine refuses."""
        raise NotImplementedError


class StatsQuery(Query[EngineStats], tag=True):
    """Asks for counters since the start, and the pool's state now."""

    def answer(self, core: EngineCore) -> EngineStats:
        return core.stats()


class ResizePool(Query[EngineReady], tag=True):
    """Gives the KV pool another size, see `EngineCore.resize`."""

    kv_memory: int | float | str | None

    def answer(self, core: EngineCore) -> EngineReady:
        return core.resize(self.kv_memory)


class SetTenant(Query[EngineReady], tag=True):
    """Makes a tenant known, or changes its limits."""

    name: str
    limits: TenantLimits

    def answer(self, core: EngineCore) -> EngineReady:
        return core.set_tenant(self.name, self.limits)


class LoadAdapter(Query[EngineReady], tag=True):
    """Loads a LoRA adapter, unless it is loaded."""

    lora: LoRARequest

    def answer(self, core: EngineCore) -> EngineReady:
        return core.load_adapter(self.lora)


class PinsQuery(Query[PinList], tag=True):
    """Asks for all pins."""

    def answer(self, core: EngineCore) -> PinList:
        return core.pins()


class Unpin(Query[PinList], tag=True):
    """Ends a pin, and asks for those that are left."""

    name: str
    tenant: str
    cache_salt: str

    def answer(self, core: EngineCore) -> PinList:
        return core.unpin(self.name, Namespace(self.tenant, self.cache_salt))


class ResetPrefixCache(Query[Done], tag=True):
    """Makes the engine forget what is cached, see `EngineCore.reset_prefix_cache`."""

    def answer(self, core: EngineCore) -> Done:
        return Done(core.reset_prefix_cache())


class SequencesQuery(Query[SequenceList], tag=True):
    """Asks for all sequences that have not finished."""

    def answer(self, core: EngineCore) -> SequenceList:
        return core.sequences()


class BlocksQuery(Query[KVBlocks], tag=True):
    """Asks where the KV blocks lie that a prompt would find that goes on behind these tokens.

    adapter: the digest of its adapter, which need not be loaded; empty for none.
    """

    token_ids: list[int]
    tenant: str
    cache_salt: str
    adapter: bytes = b""

    def answer(self, core: EngineCore) -> KVBlocks:
        return core.kv_blocks(self)


class KVMapQuery(Query[KVMap], tag=True):
    """Asks what lies where in the KV memory, as one namespace may see it; as an admin may, if `tenant` is None."""

    tenant: str | None
    cache_salt: str
    with_tree: bool

    def answer(self, core: EngineCore) -> KVMap:
        return core.kv_map(self)


class Question(msgspec.Struct, tag=True):
    """A query under a number that is used once."""

    id: int
    query: (
        StatsQuery
        | ResizePool
        | SetTenant
        | LoadAdapter
        | PinsQuery
        | Unpin
        | ResetPrefixCache
        | SequencesQuery
        | BlocksQuery
        | KVMapQuery
    )


class Answer(msgspec.Struct, tag=True):
    """The answer to the `Question` of this number."""

    id: int
    answer: EngineStats | EngineReady | PinList | SequenceList | KVBlocks | KVMap | Done | Failure


ToEngine = Start | EngineRequest | AbortRequests | FinishSequences | Question | Shutdown
FromEngine = StepOutputs | Held | Answer | LoadProgress | EngineReady | Failure
