"""InlineClient: an engine in this process and thread. None of its coroutines ever waits."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from pagemill.config import EngineConfig
from pagemill.engine.core import EngineCore
from pagemill.engine.messages import EngineReady, EngineRequest, SequenceOutput
from pagemill.engine.queries import Query
from pagemill.errors import EngineDeadError

A = TypeVar("A")


class InlineClient:
    """An `EngineClient` whose steps its user runs. Raises what keeps the model from loading."""

    def __init__(self, config: EngineConfig, progress: Callable[[int, int], None]) -> None:
        self._core: EngineCore | None = EngineCore(config, progress)

    @property
    def core(self) -> EngineCore:
        """The engine itself. Raises `EngineDeadError` after `close`."""
        if self._core is None:
            raise EngineDeadError("this LLM is closed; make a new one")
        return self._core

    @property
    def facts(self) -> EngineReady:
        return self.core.ready

    def submit(self, request: EngineRequest) -> None:
        self.core.add_request(request)

    def abort(self, request_ids: list[str]) -> None:
        self.core.abort(request_ids)

    def finish(self, sequences: list[tuple[str, int]]) -> None:
        self.core.finish(sequences)

    async def ask(self, query: Query[A]) -> A:
        return query.answer(self.core)

    def has_work(self) -> bool:
        """Returns whether a request has not ended."""
        return self.core.has_work()

    def step(self) -> list[SequenceOutput]:
        """Runs one step and returns what it has brought."""
        return self.core.step()

    async def close(self) -> None:
        if self._core is not None:
            self._core.close()
            self._core = None
