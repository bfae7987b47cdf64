"""What `pagemill chat` talks to: a conversation with an engine of its own, or with a server."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Mapping
from typing import Any, NamedTuple

from pagemill.cli.wording import counted
from pagemill.errors import InvalidRequestError, shown


class Piece(NamedTuple):
    """What is new of an answer. finish_reason: None until its end."""

    content: str = ""
    reasoning: str = ""
    finish_reason: str | None = None


class Conversation(ABC):
    """The turns so far. A turn that failed leaves no trace; an answer that was stopped stays as far as it came.

    name: that of its session; None if it has none, and ends with the chat.
    """

    def __init__(self, name: str | None, system: str | None) -> None:
        self.name = name
        self.messages: list[dict[str, Any]] = []
        self._system = system

    @property
    def system(self) -> str | None:
        """The system message."""
        if not self.messages:
            return self._system
        first = self.messages[0]
        return text_of(first) if first["role"] == "system" else None

    @system.setter
    def system(self, text: str) -> None:
        """Raises `InvalidRequestError` once something has been said."""
        if self.messages:
            raise InvalidRequestError(
                "a system message stands before all that was said; /reset forgets that, then give it", param="system"
            )
        self._system = text

    async def resume(self) -> str:
        """Returns what there is to go on from, in words.

        Raises `InvalidRequestError` if that began with another system message.
        """
        found = await self._load()
        if found is None:
            return f"session {self.name!r} begins"
        self.messages, tokens = found
        turns = counted(sum(message["role"] == "user" for message in self.messages), "turn")
        if self._system not in (None, self.system):
            before = "no system message" if self.system is None else f"the system message {shown(self.system)}"
            raise InvalidRequestError(
                f"session {self.name!r} goes on after {turns}, with {before}, and --system says {shown(self._system)}; "
                f"leave --system out, or begin another session",
                param="system",
            )
        self._system = self.system  # for the turns behind a /reset
        return f"session {self.name!r} goes on after {turns}, {counted(tokens, 'token')}"

    def turn(self, text: str) -> list[dict[str, Any]]:
        """Returns a user's turn, with the system message if it is the first."""
        opening = [] if self.messages or self._system is None else [{"role": "system", "content": self._system}]
        return [*opening, {"role": "user", "content": text}]

    @abstractmethod
    def say(self, text: str) -> AsyncGenerator[Piece, None]:
        """Yields the answer as it comes."""

    @abstractmethod
    def stop(self) -> None:
        """Ends the answer that is under way."""

    async def reset(self) -> None:
        """Forgets all that was said."""
        await self._forget()
        self.messages = []

    async def fork(self, name: str) -> None:
        """Leaves the session as it is, and goes on in another one. They share all blocks that they have in common.

        Raises `InvalidRequestError` where there is no session.
        """
        if self.name is None:
            raise InvalidRequestError(
                "this conversation has no name, so nothing of it is kept; start pagemill chat with --session NAME",
                param="session",
            )
        if not self.messages:
            raise InvalidRequestError("nothing has been said yet; fork after the first answer", param="session")
        await self._fork(name)
        self.name = name

    @abstractmethod
    async def _load(self) -> tuple[list[dict[str, Any]], int] | None:
        """Returns the session's messages and how many tokens they are; None if there is no such session."""

    @abstractmethod
    async def _forget(self) -> None: ...

    @abstractmethod
    async def _fork(self, name: str) -> None: ...


def text_of(message: Mapping[str, Any]) -> str:
    """Returns what a message says: its content may be a text, a list of parts, or nothing beside calls of tools."""
    content = message.get("content")
    if isinstance(content, list):
        return "\n".join(part.get("text") or "" for part in content)
    return content or ""
