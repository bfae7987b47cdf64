"""Requests that wait until the executor has what their sampling needs, such as a compiled grammar, beside the steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from pagemill.engine.messages import EngineRequest, SequenceOutput, refusals
from pagemill.errors import InvalidRequestError
from pagemill.executor.interface import Executor


class Preparing:
    """Keeps requests, in the order in which they came, before the scheduler knows them."""

    def __init__(self, executor: Executor, root: Callable[[EngineRequest], bytes]) -> None:
        """root: returns where the chain of a request's blocks begins."""
        self._executor = executor
        self._root = root
        self._requests: dict[str, EngineRequest] = {}

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._requests

    def __iter__(self) -> Iterator[str]:
        return iter([*self._requests])

    def keep(self, request: EngineRequest) -> bool:
        """Returns whether the request has to wait, and keeps it then. Raises what `Executor.prepare` raises."""
        if request.params.structured_outputs is None:
            return False
        if self._executor.prepare(request.params, self._root(request)):
            return False
        self._requests[request.request_id] = request
        return True

    def drop(self, request_ids: Iterable[str]) -> None:
        """Forgets requests; unknown ids are ignored."""
        for request_id in request_ids:
            self._requests.pop(request_id, None)

    def pass_on(self, schedule: Callable[[EngineRequest], None]) -> list[SequenceOutput]:
        """Schedules the requests that need wait no longer. Returns the ends of those that are refused."""
        waiting, self._requests = self._requests, {}
        refused: list[SequenceOutput] = []
        for request in waiting.values():
            try:
                if not self.keep(request):
                    schedule(request)
            except InvalidRequestError as error:  # noqa: PERF203, few wait
                refused += refusals(request, error)
        return refused
