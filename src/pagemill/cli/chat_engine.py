"""A conversation of `pagemill chat` with an engine of its own."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from pagemill.cli.chat_conversation import Conversation, Piece
from pagemill.errors import InvalidRequestError, SessionNotFoundError
from pagemill.sampling.params import SamplingParams

if TYPE_CHECKING:
    from pagemill.frontend.async_llm import AsyncLLM
    from pagemill.frontend.request_stream import RequestStream

UNNAMED = "chat"
"""The session of a conversation without a name, which the engine keeps in memory."""


class EngineConversation(Conversation):
    """A session of an engine in this process."""

    def __init__(self, llm: AsyncLLM, name: str | None, system: str | None, params: SamplingParams) -> None:
        super().__init__(name, system)
        self._llm = llm
        self._params = params
        self._session = llm.session(name or UNNAMED)
        self._stream: RequestStream | None = None

    async def say(self, text: str) -> AsyncGenerator[Piece, None]:
        answers, params = (await self._llm.tokenizer()).answers, self._params
        if answers.needs_special_tokens(with_tools=False):
            params = replace(params, skip_special_tokens=False)
        self._stream = stream = await self._session.submit_chat(self.turn(text), params)
        reader = answers.reader(None, prompt=stream.request.prompt or "", answer_id=stream.request_id)
        try:
            async for output in stream:
                for new in output.outputs:
                    part = reader.add(new.text)
                    yield Piece(part.content, part.reasoning)
                    if new.finish_reason is not None:
                        rest = reader.finish()
                        yield Piece(rest.content, rest.reasoning, new.finish_reason)
        finally:
            stream.close()
        self.messages = (await self._session.record()).messages or []

    def stop(self) -> None:
        if self._stream is not None:
            self._stream.abort()

    async def _load(self) -> tuple[list[dict[str, Any]], int] | None:
        try:
            record = await self._session.record()
        except SessionNotFoundError:
            return None
        if record.messages is None:
            raise InvalidRequestError(
                f"session {record.name!r} was begun with a prompt, and goes on with prompts; take another name",
                param="session",
            )
        return record.messages, len(record.token_ids)

    async def _forget(self) -> None:
        if self.messages:
            await self._session.delete()

    async def _fork(self, name: str) -> None:
        self._session = await self._session.fork(name)
