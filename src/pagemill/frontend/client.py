"""EngineClient: all that the front end knows of an engine, wherever that runs."""

from __future__ import annotations

from typing import Protocol, TypeVar

from pagemill.engine.messages import EngineReady, EngineRequest
from pagemill.engine.queries import Query

A = TypeVar("A")


class EngineClient(Protocol):
    """One loaded engine. Every method raises `EngineDeadError`, or why the engine died, once it is gone."""

    @property
    def facts(self) -> EngineReady:
        """Returns the engine's present facts. The front end keeps no other copy."""

    def submit(self, request: EngineRequest) -> None:
        """Queues a request. Raises `InvalidRequestError` for one that cannot be sent."""

    def abort(self, request_ids: list[str]) -> None:
        """Ends requests; unknown ids are ignored."""

    def finish(self, sequences: list[tuple[str, int]]) -> None:
        """Ends sequences `(request_id, index)` that a stop string has ended; unknown ones are ignored."""

    async def ask(self, query: Query[A]) -> A:
        """Returns the engine's answer, given between two steps. Raises what the engine refuses with."""

    async def close(self) -> None:
        """Ends the engine, which saves what outlives it. May be called twice."""
