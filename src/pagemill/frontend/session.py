"""Session and AsyncSession: one conversation of an `LLM` or an `AsyncLLM`, which goes on where its last turn ended."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Any

from pagemill.frontend.frontend import Frontend
from pagemill.frontend.output_processor import RequestState
from pagemill.frontend.outputs import RequestOutput
from pagemill.frontend.request_stream import RequestStream
from pagemill.frontend.worker import immediately
from pagemill.namespace import Namespace
from pagemill.sampling.params import SamplingParams
from pagemill.sessions.store import SessionRecord


class Session:
    """A name for a conversation. It begins with its first turn; a turn that fails leaves no trace.

    Raises `SessionBusyError`, `SessionLimitError`, `SessionNotFoundError` and `InvalidRequestError` children.
    """

    def __init__(
        self,
        frontend: Frontend,
        run: Callable[[list[RequestState]], list[RequestOutput]],
        name: str,
        space: Namespace,
    ) -> None:
        """run: runs prepared requests to their end."""
        self.name = name
        self.space = space
        self._frontend = frontend
        self._run = run

    def generate(
        self, prompt: str | Sequence[int], sampling_params: SamplingParams | None = None, *, priority: int = 0
    ) -> RequestOutput:
        """Goes on with a text or token ids behind all that the session has. A failed request has its `error`."""
        return self._turn(self._frontend.turns.begin_prompt, prompt, sampling_params, priority=priority)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        sampling_params: SamplingParams | None = None,
        *,
        priority: int = 0,
        **template: Any,
    ) -> RequestOutput:
        """Answers the new turn's messages alone; those before are the session's. `template` goes to the template."""
        begin = self._frontend.turns.begin_chat
        return self._turn(begin, messages, sampling_params, template=template, priority=priority)

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
        return immediately(self._frontend.kv_blocks(self.token_ids, self.space))

    def fork(self, name: str) -> Session:
        """Returns another session that begins as this one is now. They share all blocks that they have in common."""
        self._frontend.turns.store.fork(self.name, self.space, name)
        return Session(self._frontend, self._run, name, self.space)

    def delete(self) -> None:
        """Forgets the conversation; its blocks are evicted like any others that nobody asks for."""
        self._frontend.turns.store.delete(self.name, self.space)

    def _turn(
        self, begin: Callable[..., RequestState], content: Any, params: SamplingParams | None, **how: Any
    ) -> RequestOutput:
        frontend, params = self._frontend, SamplingParams() if params is None else params
        name = frontend.new_request_id()
        request = immediately(frontend.prepare_turn(begin, self.name, self.space, content, params, name, **how))
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
        """`submit`, read to its end. Leaving the iterator aborts the request, and the turn leaves no trace."""
        async for output in _read(await self.submit(prompt, sampling_params, **how)):
            yield output

    async def chat(
        self, messages: Sequence[Mapping[str, Any]], sampling_params: SamplingParams | None = None, **how: Any
    ) -> AsyncIterator[RequestOutput]:
        """`submit_chat`, read to its end. Leaving the iterator aborts the request, and the turn leaves no trace."""
        async for output in _read(await self.submit_chat(messages, sampling_params, **how)):
            yield output

    async def submit(
        self,
        prompt: str | Sequence[int],
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
    ) -> RequestStream:
        """Goes on with a text or token ids behind all that the session has."""
        frontend = await self._loaded()
        begin = frontend.turns.begin_prompt
        return await self._start(frontend, begin, prompt, sampling_params, request_id, priority=priority)

    async def submit_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        **template: Any,
    ) -> RequestStream:
        """Answers the new turn's messages alone; those before are the session's. `template` goes to the template."""
        frontend = await self._loaded()
        how = {"template": template, "priority": priority}
        return await self._start(frontend, frontend.turns.begin_chat, messages, sampling_params, request_id, **how)

    async def record(self) -> SessionRecord:
        """Returns the session as it is now."""
        frontend = await self._loaded()
        return await frontend.worker.run(frontend.turns.store.get, self.name, self.space)

    async def kv_blocks(self) -> dict[str, int]:
        """See `Session.kv_blocks`."""
        frontend = await self._loaded()
        return await frontend.kv_blocks((await self.record()).token_ids, self.space)

    async def fork(self, name: str) -> AsyncSession:
        """Returns another session that begins as this one is now. They share all blocks that they have in common."""
        frontend = await self._loaded()
        await frontend.worker.run(frontend.turns.store.fork, self.name, self.space, name)
        return AsyncSession(self._loaded, name, self.space)

    async def delete(self) -> None:
        """Forgets the conversation; its blocks are evicted like any others that nobody asks for."""
        frontend = await self._loaded()
        await frontend.worker.run(frontend.turns.store.delete, self.name, self.space)

    async def _start(
        self,
        frontend: Frontend,
        begin: Callable[..., RequestState],
        content: Any,
        params: SamplingParams | None,
        request_id: str | None,
        **how: Any,
    ) -> RequestStream:
        params = SamplingParams() if params is None else params
        name = frontend.new_request_id(request_id)
        request = await frontend.prepare_turn(begin, self.name, self.space, content, params, name, **how)
        return RequestStream(frontend, request)


async def _read(stream: RequestStream) -> AsyncIterator[RequestOutput]:
    try:
        async for output in stream:
            yield output
    finally:
        stream.close()
