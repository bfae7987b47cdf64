"""Session and AsyncSession: one conversation of an `LLM` or an `AsyncLLM`, which goes on where its last turn ended."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Any

from pagemill.frontend.frontend import Frontend
from pagemill.frontend.input_processor import size_of
from pagemill.frontend.outputs import RequestOutput
from pagemill.frontend.request_state import RequestState, ResponseTurn
from pagemill.frontend.request_stream import RequestStream
from pagemill.frontend.worker import immediately
from pagemill.lora_request import LoRARequest
from pagemill.namespace import Namespace
from pagemill.sampling.params import SamplingParams
from pagemill.sessions.record import SessionRecord


class Session:
    """A name for a conversation. It begins with its first turn; a turn that fails leaves no trace.

    Raises `SessionBusyError`, `SessionLimitError`, `SessionNotFoundError` and `InvalidRequestError` children.
    """

    def __init__(
        self, frontend: Frontend, run: Callable[[list[RequestState]], list[RequestOutput]], name: str, space: Namespace
    ) -> None:
        """run: runs prepared requests to their end."""
        self.name = name
        self.space = space
        self._frontend = frontend
        self._run = run

    def generate(
        self,
        prompt: str | Sequence[int],
        sampling_params: SamplingParams | None = None,
        *,
        priority: int = 0,
        lora_request: LoRARequest | None = None,
    ) -> RequestOutput:
        """Goes on with a text or token ids behind all that the session has. A failed request has its `error`.

        A session whose first turn had a LoRA adapter goes on with that one.
        """
        return self._turn(prompt, sampling_params, priority=priority, lora_request=lora_request)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        sampling_params: SamplingParams | None = None,
        *,
        priority: int = 0,
        lora_request: LoRARequest | None = None,
        **template: Any,
    ) -> RequestOutput:
        """Answers the new turn's messages alone; those before are the session's. `template` goes to the template."""
        return self._turn(messages, sampling_params, template=template, priority=priority, lora_request=lora_request)

    @property
    def record(self) -> SessionRecord:
        """The session as it is now."""
        return self._frontend.turns.store.get(self.name, self.space)

    @property
    def token_ids(self) -> list[int]:
        """Prompts and answers of all turns, as the model saw and produced them."""
        return self.record.token_ids

    @property
    def messages(self) -> list[dict[str, Any]] | None:
        """The conversation so far; None for a session of plain prompts."""
        return self.record.messages

    @property
    def kv_blocks(self) -> dict[str, int]:
        """The KV blocks that its next turn would find, by the highest tier that has them: "device" (the pool), and, as
        far as there are such tiers, "host" and "disk". What is missing of it would be computed again."""
        return immediately(self._frontend.kv_blocks(self.record))

    def fork(self, name: str) -> Session:
        """Returns another session that begins as this one is now. They share all blocks that they have in common."""
        self._frontend.turns.store.fork(self.name, self.space, name)
        return Session(self._frontend, self._run, name, self.space)

    def delete(self) -> None:
        """Forgets the conversation; its blocks are evicted like any others that nobody asks for."""
        self._frontend.turns.store.delete(self.name, self.space)

    def _turn(self, content: Any, params: SamplingParams | None, **how: Any) -> RequestOutput:
        frontend = self._frontend
        request = immediately(frontend.prepare_turn(self.name, self.space, content, params, **how))
        try:
            (output,) = self._run([request])
            if request.error is None:
                immediately(frontend.commit_turn(request))
        finally:
            frontend.end_turn(request)
        return output


class AsyncSession:
    """A name for a conversation. It begins with its first turn.

    Raises `SessionBusyError`, `SessionLimitError`, `SessionNotFoundError`, and what `AsyncLLM.submit` raises.
    """

    def __init__(self, loaded: Callable[[], Awaitable[Frontend]], name: str, space: Namespace) -> None:
        """loaded: returns the front end once the engine is loaded."""
        self.name = name
        self.space = space
        self._loaded = loaded

    async def generate(
        self, prompt: str | Sequence[int], sampling_params: SamplingParams | None = None, **how: Any
    ) -> AsyncIterator[RequestOutput]:
        """Yields what `submit` returns. Leaving the iterator aborts the request, and the turn leaves no trace."""
        with contextlib.closing(await self.submit(prompt, sampling_params, **how)) as stream:
            async for output in stream:
                yield output

    async def chat(
        self, messages: Sequence[Mapping[str, Any]], sampling_params: SamplingParams | None = None, **how: Any
    ) -> AsyncIterator[RequestOutput]:
        """Yields what `submit_chat` returns. Leaving the iterator aborts the request, and the turn leaves no trace."""
        with contextlib.closing(await self.submit_chat(messages, sampling_params, **how)) as stream:
            async for output in stream:
                yield output

    async def submit(
        self,
        prompt: str | Sequence[int],
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        lora_request: LoRARequest | None = None,
    ) -> RequestStream:
        """Goes on with a text or token ids behind all that the session has. Returns the answer, once it is under
        way."""
        return await self._start(prompt, sampling_params, request_id, priority=priority, lora_request=lora_request)

    async def submit_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        max_tool_calls: int | None = None,
        calls_only: bool = False,
        on_prompt: Callable[[str, Sequence[Mapping[str, Any]] | None], None] | None = None,
        response: ResponseTurn | None = None,
        lora_request: LoRARequest | None = None,
        **template: Any,
    ) -> RequestStream:
        """Answers the new turn's messages alone; those before are the session's. `template` goes to the template.

        max_tool_calls: the session keeps so many of the answer's calls; None for all. calls_only,
        on_prompt: see `SessionTurns.begin`. response: makes it a response.
        """
        how: dict[str, Any] = {"priority": priority, "max_tool_calls": max_tool_calls, "response": response}
        how |= {"calls_only": calls_only, "on_prompt": on_prompt, "template": template, "lora_request": lora_request}
        return await self._start(messages, sampling_params, request_id, **how)

    async def count_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        response: ResponseTurn,
        encode: Callable[[str], list[int]],
        **template: Any,
    ) -> int:
        """Returns how many tokens the prompt of a response would have, which is never computed. Takes and raises what
        `SessionTurns.count` does, and raises `TooManyWaitingError`."""
        frontend, tenant = await self._loaded(), self.space.tenant
        frontend.worker.require_room(tenant)
        asked = (self.name, self.space, messages, response, encode, template)
        return await frontend.worker.run_for(tenant, size_of(messages), frontend.turns.count, *asked)

    async def record(self) -> SessionRecord:
        """Returns the session as it is now."""
        frontend = await self._loaded()
        return await frontend.worker.run(frontend.turns.store.get, self.name, self.space)

    async def kv_blocks(self) -> dict[str, int]:
        """See `Session.kv_blocks`."""
        frontend = await self._loaded()
        return await frontend.kv_blocks(await self.record())

    async def fork(self, name: str) -> AsyncSession:
        """Returns another session that begins as this one is now. They share all blocks that they have in common."""
        frontend = await self._loaded()
        await frontend.worker.run(frontend.turns.store.fork, self.name, self.space, name)
        return AsyncSession(self._loaded, name, self.space)

    async def delete(self) -> None:
        """Forgets the conversation; its blocks are evicted like any others that nobody asks for."""
        frontend = await self._loaded()
        await frontend.worker.run(frontend.turns.store.delete, self.name, self.space)

    async def _start(self, *turn: Any, **how: Any) -> RequestStream:
        frontend = await self._loaded()
        return RequestStream(frontend, await frontend.prepare_turn(self.name, self.space, *turn, **how))
