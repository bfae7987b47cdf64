"""EngineClient: all that the front end knows of an engine, wherever that runs; and the client of one in this thread."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, NoReturn, Protocol, TypeVar

from pagemill.config import EngineConfig
from pagemill.engine.messages import EngineReady, EngineRequest
from pagemill.engine.queries import Query
from pagemill.errors import EngineDeadError, EngineRestartingError, PagemillError

if TYPE_CHECKING:
    from pagemill.engine.core import EngineCore
    from pagemill.frontend.frontend import Frontend

A = TypeVar("A")


class EngineClient(Protocol):
    """One loaded engine. Every method raises `EngineDeadError`, or why the engine died, once it is gone."""

    @property
    def facts(self) -> EngineReady:
        """Returns the engine's present facts. The front end keeps no other copy."""

    @property
    def max_num_seqs(self) -> int:
        """Returns how many sequences run at once, over all engines behind this client."""

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


class ServedEngine(EngineClient, Protocol):
    """An engine beside this process, which may die, and in whose place another may come."""

    ended: PagemillError | None
    """Why nothing can be asked of this engine any more; None while it can."""
    interrupted: EngineRestartingError | None
    """Why nothing can be asked for a while; None while it can."""

    @property
    def pid(self) -> int:
        """Process id of the engine."""

    async def load(self, on_progress: Callable[[int, int], None]) -> None:
        """Waits until the engine is loaded. Raises what kept it from that."""

    def end(self, error: PagemillError) -> None:
        """Answers every question with this error, now and from now on."""

    async def close(self, *, now: bool = False) -> None:
        """Ends the engine: after its current step, or `now` (nothing it holds needs saving). May be called twice."""


class EngineKeeper(Protocol):
    """Takes what an engine sends, and sees to it that one runs."""

    num_restarts: int
    """Engines that were started in the place of one that had died."""

    async def run(self, frontend: Frontend) -> NoReturn:
        """Takes everything that the engine sends. Raises why it has ended, for good."""


class InlineClient:
    """An `EngineClient` in this process, whose steps its user runs. None of its coroutines ever waits for an event.

    Raises what keeps the model from loading.
    """

    def __init__(self, config: EngineConfig, progress: Callable[[int, int], None]) -> None:
        from pagemill.engine.core import EngineCore  # and torch, which an engine in a process needs only there

        self._core: EngineCore | None = EngineCore(config, progress)
        self.lock = threading.RLock()
        """Held by whoever runs steps, or asks between them."""

    @property
    def core(self) -> EngineCore:
        """The engine itself. Raises `EngineDeadError` after `close`."""
        if self._core is None:
            raise EngineDeadError("this LLM is closed; make a new one")
        return self._core

    @property
    def facts(self) -> EngineReady:
        return self.core.ready

    @property
    def max_num_seqs(self) -> int:
        return self.facts.max_num_seqs

    def submit(self, request: EngineRequest) -> None:
        self.core.add_request(request)

    def abort(self, request_ids: list[str]) -> None:
        self.core.abort(request_ids)

    def finish(self, sequences: list[tuple[str, int]]) -> None:
        self.core.finish(sequences)

    async def ask(self, query: Query[A]) -> A:
        """Returns the engine's answer; while another thread generates, once that has all its answers."""
        with self.lock:
            return query.answer(self.core)

    async def close(self) -> None:
        with self.lock:
            if self._core is not None:
                self._core.close()
                self._core = None
                gc.collect()  # its parts know each other: else weights and pool stay until the next collection
