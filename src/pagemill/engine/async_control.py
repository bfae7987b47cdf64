"""AsyncControl: what an `AsyncLLM` asks its engine between two steps, beside requests."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import deque
from typing import Any

from pagemill.engine.client import EngineClient
from pagemill.engine.input_processor import InputProcessor
from pagemill.engine.messages import (
    BlocksRequest,
    EngineReady,
    EngineStats,
    KVBlocks,
    PinInfo,
    PinList,
    PinsRequest,
    ResizePool,
    SequenceInfo,
    SequenceList,
    SequencesRequest,
    SetTenant,
    StatsRequest,
    ToEngine,
    Unpin,
)
from pagemill.errors import PagemillError
from pagemill.namespace import Namespace
from pagemill.sessions.store import SessionStore
from pagemill.tenant_limits import DEFAULT_TENANT, TenantLimits, read_limits


class AsyncControl(ABC):
    """Questions and the engine's answers, which come in the order of the questions.

    All methods raise what the engine refuses with, or `EngineDeadError`.
    """

    def __init__(self, client: EngineClient, sessions: SessionStore) -> None:
        self._client = client
        self._sessions = sessions
        self._asked: deque[asyncio.Future[Any]] = deque()

    @abstractmethod
    async def _inputs(self) -> InputProcessor:
        """Once the engine is loaded, what knows its limits."""

    async def pins(self) -> list[PinInfo]:
        """All pins, in the order in which they came."""
        return await self._ask_pins(PinsRequest())

    async def unpin(self, name: str, *, cache_salt: str = "", tenant: str = DEFAULT_TENANT) -> None:
        """As `LLM.unpin`."""
        await self._ask_pins(Unpin(name, tenant, cache_salt))

    async def stats(self) -> EngineStats:
        """A snapshot taken between two steps."""
        stats: EngineStats = await self._ask(StatsRequest())
        return stats

    async def resize_kv_memory(self, kv_memory: int | float | str | None) -> EngineReady:
        """As `LLM.resize_kv_memory`, between two steps; requests go on."""
        return await self._ask_ready(ResizePool(kv_memory))

    async def set_tenant(self, name: str, limits: TenantLimits) -> None:
        """Makes a tenant known, or changes its limits, between two steps.

        Raises `ConfigError`, and changes nothing, for what the pool or requests under way do not allow.
        """
        limits = read_limits({name: limits})[name]
        await self._ask_ready(SetTenant(name, limits))
        self._sessions.set_limit(name, limits.max_sessions)

    async def _sequences(self) -> dict[str, list[SequenceInfo]]:
        """Those that have not finished, by the engine's id of their request."""
        answer: SequenceList = await self._ask(SequencesRequest())
        found: dict[str, list[SequenceInfo]] = {}
        for sequence in answer.sequences:
            found.setdefault(sequence.request_id, []).append(sequence)
        return found

    async def _kv_blocks(self, token_ids: list[int], space: Namespace) -> dict[str, int]:
        """By tier, those that a prompt would find that goes on behind these tokens."""
        answer: KVBlocks = await self._ask(BlocksRequest(token_ids, *space))
        return answer.by_tier

    async def _ask_pins(self, message: PinsRequest | Unpin) -> list[PinInfo]:
        answer: PinList = await self._ask(message)
        (await self._inputs()).ready = answer.ready
        return answer.pins

    async def _ask_ready(self, message: ResizePool | SetTenant) -> EngineReady:
        inputs = await self._inputs()
        inputs.ready = await self._ask(message)
        return inputs.ready

    async def _ask(self, message: ToEngine) -> Any:
        """The engine's answer."""
        await self._inputs()
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._asked.append(answer)
        self._client.send(message)
        return await answer

    def _answered(self, answer: object) -> None:
        asked = self._asked.popleft()
        if asked.done():  # who asked has gone
            return
        if isinstance(answer, PagemillError):
            asked.set_exception(answer)
        else:
            asked.set_result(answer)
