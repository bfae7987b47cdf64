"""A conversation of `pagemill chat` with a server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine
from contextlib import AsyncExitStack, suppress
from typing import Any, TypeVar
from urllib.parse import quote

from pagemill.cli.chat_conversation import Conversation, Piece
from pagemill.cli.remote import Remote
from pagemill.errors import ConfigError, NotFoundError, RemoteServerError
from pagemill.sampling.params import SamplingParams

OPENAI_FIELDS = ("max_tokens", "temperature", "top_p", "stop")
"""Sampling parameters that every server knows."""
OTHER_FIELDS = ("top_k", "min_p", "repetition_penalty")
"""Those that only some know: they are sent where they are not as usual."""

T = TypeVar("T")


class ServerConversation(Conversation):
    """Sends what the server does not have yet: with a session the new turn, else all that was said.

    A session has no part of an answer that was stopped: it is sent with the next turn.
    """

    def __init__(
        self, remote: Remote, model: str, name: str | None, system: str | None, params: SamplingParams
    ) -> None:
        super().__init__(name, system)
        self._remote = remote
        self._model = model
        self._sampling = _fields(params)
        self._kept = 0
        """Messages that the session has."""
        self._stopped = asyncio.Event()

    async def say(self, text: str) -> AsyncGenerator[Piece, None]:
        self._stopped.clear()
        turn, content, reasoning, ended = self.turn(text), "", "", False
        body = {"model": self._model, "messages": [*self.messages[self._kept :], *turn], "stream": True}
        if self.name is not None:
            body["session_id"] = self.name
        async with AsyncExitStack() as open_answer:
            answer = self._remote.events("/chat/completions", "POST", body | self._sampling)
            events = await self._unless_stopped(open_answer.enter_async_context(answer))
            while events is not None and (event := await self._unless_stopped(_next(events))) is not None:
                piece = _piece(event)
                content, reasoning = content + piece.content, reasoning + piece.reasoning
                ended = ended or piece.finish_reason is not None
                yield piece
        if not ended and not self._stopped.is_set():
            raise RemoteServerError(f"{self._remote.url} ended the answer before its end; ask again")
        if not ended:
            yield Piece(finish_reason="abort")
        if ended or content or reasoning:
            thoughts = {"reasoning_content": reasoning} if reasoning else {}
            self.messages = [*self.messages, *turn, {"role": "assistant", "content": content, **thoughts}]
        if ended and self.name is not None:
            self._kept = len(self.messages)

    def stop(self) -> None:
        self._stopped.set()

    async def _unless_stopped(self, work: Coroutine[Any, Any, T]) -> T | None:
        """Returns what comes; None if the answer is stopped first."""
        coming, stopped = asyncio.ensure_future(work), asyncio.ensure_future(self._stopped.wait())
        try:
            await asyncio.wait({coming, stopped}, return_when=asyncio.FIRST_COMPLETED)
            return coming.result() if coming.done() else None
        finally:
            for task in (coming, stopped):
                task.cancel()
            await asyncio.gather(coming, stopped, return_exceptions=True)

    async def _load(self) -> tuple[list[dict[str, Any]], int] | None:
        try:
            await self._remote.ask("/sessions")
        except NotFoundError:
            raise ConfigError(
                f"the server at {self._remote.url} keeps no sessions, for it is not pagemill; leave --session out",
                param="session",
            ) from None
        try:
            card = await self._remote.ask(self._path)
        except NotFoundError:
            return None
        if card["messages"] is None:
            raise ConfigError(
                f"session {self.name!r} was begun with a prompt, and goes on with prompts; take another name",
                param="session",
            )
        self._kept = len(card["messages"])
        return card["messages"], card["num_tokens"]

    async def _forget(self) -> None:
        if self.name is not None:
            with suppress(NotFoundError):
                await self._remote.ask(self._path, "DELETE")
        self._kept = 0

    async def _fork(self, name: str) -> None:
        await self._remote.ask(f"{self._path}/fork", "POST", {"session_id": name})

    @property
    def _path(self) -> str:
        return f"/sessions/{quote(self.name or '', safe='')}"


async def first_model(remote: Remote) -> str:
    """Returns the name of the first model that a server has."""
    models = await remote.models()
    if not models:
        raise RemoteServerError(f"{remote.url} names no model; give one: pagemill chat MODEL --url {remote.url}")
    return models[0]


async def _next(events: AsyncGenerator[Any, None]) -> Any:
    return await anext(events, None)


def _piece(event: dict[str, Any]) -> Piece:
    choice = (event.get("choices") or [{}])[0]
    delta = choice.get("delta") or {}
    reasoning = delta.get("reasoning_content") or delta.get("reasoning") or ""
    return Piece(delta.get("content") or "", reasoning, choice.get("finish_reason"))


def _fields(params: SamplingParams) -> dict[str, Any]:
    usual = SamplingParams()
    given = {name: getattr(params, name) for name in OPENAI_FIELDS if getattr(params, name) not in (None, [])}
    others = {name: getattr(params, name) for name in OTHER_FIELDS}
    return given | {name: value for name, value in others.items() if value != getattr(usual, name)}
