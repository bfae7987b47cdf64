"""AsyncControls: what `AsyncLLM` asks of its engine, and tells it, beside requests."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from pagemill.engine.kv_map import KVMap
from pagemill.engine.messages import EngineReady, PinInfo
from pagemill.engine.stats import EngineStats
from pagemill.frontend.frontend import Frontend
from pagemill.frontend.input_processor import Prompt, size_of
from pagemill.namespace import Namespace
from pagemill.tenant_limits import DEFAULT_TENANT, TenantLimits
from pagemill.text.tokenizer import Tokenizer

T = TypeVar("T")


class AsyncControls(ABC):
    """The engine's figures, size, sleep, tenants and pins, all of it between two steps; and its tokenizer."""

    @abstractmethod
    async def _ready(self) -> Frontend:
        """Returns the front end once the model is loaded. Raises what kept it from loading, or why it is gone."""

    async def stats(self) -> EngineStats:
        """Returns a snapshot taken between two steps."""
        return await (await self._ready()).stats()

    async def kv_map(self, *, cache_salt: str = "", tenant: str | None = None, with_tree: bool = True) -> KVMap:
        """Returns what lies where in the KV memory: the block map, block tables, the prefix tree, and `stats`.

        tenant: the one that looks, and sees its own names only; None for all of them. with_tree: the prefix tree is
        what costs most.
        """
        space = None if tenant is None else Namespace(tenant, cache_salt)
        return await (await self._ready()).kv_map(space, with_tree)

    async def resize_kv_memory(self, kv_memory: int | float | str | None) -> EngineReady:
        """See `LLM.resize_kv_memory`; happens between two steps, and requests go on."""
        return await (await self._ready()).resize_kv_memory(kv_memory)

    async def sleep(self, level: int = 1) -> None:
        """See `LLM.sleep`; happens between two steps."""
        await (await self._ready()).sleep.begin(level)

    async def wake_up(self, tags: list[str] | None = None) -> None:
        """See `LLM.wake_up`."""
        await (await self._ready()).sleep.end(tags)

    async def is_sleeping(self) -> bool:
        return (await self._ready()).sleep.asleep

    async def check_health(self) -> None:
        """Returns once the engine has answered. Raises `EngineDeadError`."""
        await self.stats()

    async def get_tokenizer(self) -> Any:
        """Returns transformers' tokenizer for the same files, as vLLM gives it."""
        tokenizer = await self.tokenizer()
        return await asyncio.to_thread(lambda: tokenizer.hf)

    async def reset_prefix_cache(self) -> bool:
        """See `LLM.reset_prefix_cache`; happens between two steps."""
        return await (await self._ready()).reset_prefix_cache()

    async def set_tenant(self, name: str, limits: TenantLimits) -> None:
        """See `LLM.set_tenant`; happens between two steps.

        Raises `ConfigError`, and changes nothing, for what the pool or requests under way do not allow.
        """
        await (await self._ready()).set_tenant(name, limits)

    async def pins(self) -> list[PinInfo]:
        """Returns all pins, in the order in which they came."""
        return await (await self._ready()).pins()

    async def unpin(self, name: str, *, cache_salt: str = "", tenant: str = DEFAULT_TENANT) -> None:
        """See `LLM.unpin`."""
        await (await self._ready()).unpin(name, Namespace(tenant, cache_salt))

    async def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        cache_salt: str = "",
        tenant: str = DEFAULT_TENANT,
        **template: Any,
    ) -> Prompt:
        """Returns a conversation as a prompt for `generate`; see `InputProcessor.render_chat`."""
        frontend, owner = await self._ready(), Namespace(tenant, cache_salt).tenant
        frontend.worker.require_room(owner)
        return await frontend.worker.run_for(
            owner, size_of(messages), frontend.inputs.render_chat, messages, cache_salt=cache_salt, **template
        )

    async def tokenizer(self) -> Tokenizer:
        """Returns the one that this engine uses."""
        return (await self._ready()).inputs.tokenizer

    async def in_tokenizer_thread(
        self, function: Callable[..., T], *args: Any, size: int, tenant: str = DEFAULT_TENANT
    ) -> T:
        """Returns what a function returns that would hold up everybody's events.

        It waits for its tenant's turn among the texts that are tokenized. size: characters or tokens to work on. Raises
        `TooManyWaitingError`.
        """
        worker = (await self._ready()).worker
        worker.require_room(tenant)
        return await worker.run_for(tenant, size, function, *args)
