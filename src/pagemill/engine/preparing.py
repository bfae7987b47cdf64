"""Requests that wait until the executor has what their sampling needs, such as a compiled grammar, beside the steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from typing import Any, TypeAlias

from pagemill.engine.messages import EngineRequest, SequenceOutput, refusals
from pagemill.errors import InvalidRequestError
from pagemill.executor.interface import Executor

Prepared: TypeAlias = "Future[Any] | None"
"""Stands for what the executor makes ready for a request, and keeps while this is held. None: it needs nothing."""


class Preparing:
    """Keeps requests, in the order in which they came, before the scheduler knows them."""

    def __init__(
        self,
        executor: Executor,
        root: Callable[[EngineRequest], bytes],
        schedule: Callable[[EngineRequest, Prepared], None],
    ) -> None:
        """root: returns where the chain of a request's blocks begins. schedule: takes a request that need not wait, and
        what is held for it; raises `InvalidRequestError` children."""
        self._executor = executor
        self._root = root
        self._schedule = schedule
        self._requests: dict[str, tuple[EngineRequest, Future[Any]]] = {}

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._requests

    def __iter__(self) -> Iterator[str]:
        return iter([*self._requests])

    def add(self, request: EngineRequest) -> None:
        """Schedules a request, or keeps it if it has to wait. Raises what scheduling raises, and
        `SamplingParamsError` for what cannot be prepared."""
        needs_none = request.params.structured_outputs is None
        prepared = None if needs_none else self._executor.prepare(request.params, self._root(request))
        if prepared is not None and not prepared.done():
            self._requests[request.request_id] = request, prepared
        else:
            self._pass_on(request, prepared)

    def drop(self, request_ids: Iterable[str]) -> None:
        """Forgets requests; unknown ids are ignored."""
        for request_id in request_ids:
            self._requests.pop(request_id, None)

    def pass_on(self) -> list[SequenceOutput]:
        """Schedules the requests that need wait no longer. Returns the ends of those that are refused."""
        ready = [(request, prepared) for request, prepared in self._requests.values() if prepared.done()]
        self.drop(request.request_id for request, _ in ready)
        refused: list[SequenceOutput] = []
        for request, prepared in ready:
            try:
                self._pass_on(request, prepared)
            except InvalidRequestError as error:  # noqa: PERF203, few wait
                refused += refusals(request, error)
        return refused

    def _pass_on(self, request: EngineRequest, prepared: Prepared) -> None:
        if prepared is not None and (error := prepared.exception()) is not None:
            raise error
        self._schedule(request, prepared)
