"""AsyncSession: one conversation of an `AsyncLLM`, which goes on where its last turn ended."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pagemill.engine.outputs import RequestOutput
from pagemill.engine.session_turns import SessionTurns, Turn
from pagemill.namespace import Namespace
from pagemill.sampling.params import SamplingParams
from pagemill.sessions.store import SessionRecord

if TYPE_CHECKING:
    from pagemill.engine.async_llm import AsyncLLM
    from pagemill.engine.request_stream import RequestStream


class SessionStream:
    """A session's answer as it comes: a `RequestStream` whose last output is given once the session has the turn.

    An answer that was aborted stays as far as it came; one that failed, or whose reader left, leaves no trace.
    """

    def __init__(self, llm: AsyncLLM, stream: RequestStream, turns: SessionTurns, turn: Turn) -> None:
        self._llm = llm
        self._stream = stream
        self._turns = turns
        self._turn = turn

    @property
    def request_id(self) -> str:
        return self._stream.request_id

    @property
    def prompt_token_ids(self) -> list[int]:
        return self._stream.prompt_token_ids

    def __aiter__(self) -> SessionStream:
        return self

    async def __anext__(self) -> RequestOutput:
        output = await anext(self._stream)
        if output.finished:
            (answer,) = self._stream.state.whole().outputs
            params = self._turn.processed.request.params
            await self._llm._tokenize(self._turns.commit, self._turn, answer, params)
        return output

    def close(self) -> None:
        """Aborts the request if it still runs, and gives the session back."""
        self._stream.close()
        self._turns.release(self._turn)

    async def aclose(self) -> None:
        self.close()

    def abort(self) -> None:
        """Ends the iterator with `finish_reason` "abort"; what has come stays in the session."""
        self._llm._release(self._stream)
        self._stream.abort()


class AsyncSession:
    """A name for a conversation. It begins with its first turn.

    Raises `SessionBusyError`, `SessionLimitError`, `SessionNotFoundError`, and what `AsyncLLM.submit` raises.
    """

    def __init__(self, llm: AsyncLLM, name: str, space: Namespace) -> None:
        self.name = name
        self.space = space
        self._llm = llm

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
    ) -> SessionStream:
        """Goes on with a text or token ids behind all that the session has."""
        params = SamplingParams() if sampling_params is None else sampling_params
        turns, request_id = await self._llm._session_turns(), self._llm._new_request_id(request_id)
        return await self._start(
            turns,
            lambda: turns.begin_prompt(self.name, self.space, prompt, params, request_id, priority=priority),
        )

    async def submit_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        **template: Any,
    ) -> SessionStream:
        """Answers the new turn's messages alone; those before are the session's. `template` goes to the template."""
        params = SamplingParams() if sampling_params is None else sampling_params
        turns, request_id = await self._llm._session_turns(), self._llm._new_request_id(request_id)
        return await self._start(
            turns,
            lambda: turns.begin_chat(self.name, self.space, messages, params, request_id, template, priority=priority),
        )

    async def record(self) -> SessionRecord:
        """The session as it is now."""
        turns = await self._llm._session_turns()
        return await self._llm._tokenize(turns.store.get, self.name, self.space)

    async def kv_blocks(self) -> dict[str, int]:
        """As `Session.kv_blocks`."""
        return await self._llm._kv_blocks((await self.record()).token_ids, self.space)

    async def fork(self, name: str) -> AsyncSession:
        """Another session that begins as this one is now. They share all blocks that they have in common."""
        turns = await self._llm._session_turns()
        await self._llm._tokenize(turns.store.fork, self.name, self.space, name)
        return AsyncSession(self._llm, name, self.space)

    async def delete(self) -> None:
        """Forgets the conversation; its blocks are evicted like any others that nobody asks for."""
        turns = await self._llm._session_turns()
        await self._llm._tokenize(turns.store.delete, self.name, self.space)

    async def _start(self, turns: SessionTurns, begin: Callable[[], Turn]) -> SessionStream:
        taken: list[Turn] = []

        def give_back() -> None:
            for turn in taken:
                turns.release(turn)

        try:
            turn = await self._llm._tokenize(lambda: taken.append(begin()) or taken[0])  # type: ignore[func-returns-value]
            return SessionStream(self._llm, self._llm._start(turn.processed), turns, turn)
        except BaseException:
            # Whoever left while the turn was being begun leaves behind it in the same thread, which ends that first.
            with contextlib.suppress(RuntimeError):  # after a shutdown nobody else needs the session
                self._llm._tokenizer_thread.submit(give_back)
            raise


async def _read(stream: SessionStream) -> AsyncIterator[RequestOutput]:
    try:
        async for output in stream:
            yield output
    finally:
        stream.close()
