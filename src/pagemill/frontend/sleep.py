"""Sleep: an engine that gives its KV pool's memory back until it is woken up."""

from __future__ import annotations

from pagemill.engine.messages import EngineReady
from pagemill.engine.queries import ResizePool
from pagemill.errors import InvalidRequestError, shown
from pagemill.frontend.client import EngineClient


class Sleep:
    """Knows whether an engine sleeps, and how large its pool was before."""

    def __init__(self, client: EngineClient) -> None:
        self._client = client
        self._bytes: int | None = None

    @property
    def asleep(self) -> bool:
        return self._bytes is not None

    def check_awake(self) -> None:
        """Raises `InvalidRequestError` while the engine sleeps."""
        if self.asleep:
            raise InvalidRequestError("this engine sleeps, and has no room for a request; call wake_up() first")

    async def begin(self, level: int) -> None:
        """Gives back what running requests and pins do not need. Raises `InvalidRequestError` for another level."""
        if level != 1 or isinstance(level, bool):
            raise InvalidRequestError(
                f"level is {shown(level)}; pagemill sleeps at level 1 only, which keeps the weights where they are: "
                f"give 1, or close this engine and make a new one when it is needed",
                param="level",
            )
        if not self.asleep:
            size = self._client.facts.kv_memory
            await self._client.ask(ResizePool("used"))
            self._bytes = size

    async def end(self, tags: list[str] | None) -> EngineReady:
        """Takes the memory again. Raises `KVMemoryError`, and sleeps on, where it is gone."""
        if tags is not None:
            raise InvalidRequestError(
                f"tags is {shown(tags)}; pagemill wakes up as a whole; leave it out", param="tags"
            )
        if self._bytes is not None:
            await self._client.ask(ResizePool(self._bytes))
            self._bytes = None
        return self._client.facts
