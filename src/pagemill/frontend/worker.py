"""Workers: where the front end tokenizes and keeps sessions: in the caller's thread, or in threads of its own."""

from __future__ import annotations

import asyncio
import functools
import threading
import weakref
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, Protocol, TypeVar

from pagemill.errors import EngineStoppedError
from pagemill.frontend.fair_queue import FairQueue, Work

T = TypeVar("T")

OWN = ""
"""The owner of work that is nobody's: it is short, and is never refused."""


class Worker(Protocol):
    """Runs functions."""

    def limit(self, owner: str, max_waiting: int | None) -> None:
        """Sets how many works of an owner may wait; None is no limit."""

    def require_room(self, owner: str) -> None:
        """Raises `TooManyWaitingError` where so many works of an owner wait as may."""

    async def run(self, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Returns what the function returns, or raises what it raises."""

    async def run_for(self, owner: str, size: int, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Does what `run` does for an owner, whose turn comes by what else waits. size: characters to work on."""


class Inline:
    """A `Worker` in the caller's thread."""

    def limit(self, owner: str, max_waiting: int | None) -> None:
        """Does nothing: no work ever waits."""

    def require_room(self, owner: str) -> None:
        """Does nothing either."""

    async def run(self, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        return function(*args, **kwargs)

    async def run_for(self, owner: str, size: int, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        return function(*args, **kwargs)


def immediately(work: Coroutine[Any, Any, T]) -> T:
    """Returns the result of a coroutine over an inline engine and worker, which never waits, without an event loop."""
    try:
        work.send(None)
    except StopIteration as done:
        result: T = done.value
        return result
    work.close()
    raise RuntimeError("a coroutine over an inline engine has waited")


class WorkerThreads:
    """A `Worker` with threads of its own: a long prompt must not hold up everybody's events.

    They share a `FairQueue`. They are daemons, unlike those of concurrent.futures: whatever they are doing does not
    keep the process from ending.
    """

    def __init__(self, name: str = "tokenizer", *, num_threads: int = 2) -> None:
        self._queue = FairQueue(num_threads)
        weakref.finalize(self, self._queue.close)
        for thread in range(num_threads):
            threading.Thread(target=_serve, args=(self._queue, thread), name=name, daemon=True).start()

    def limit(self, owner: str, max_waiting: int | None) -> None:
        self._queue.limit(owner, max_waiting)

    def require_room(self, owner: str) -> None:
        self._queue.require_room(owner)

    def submit(self, function: Callable[..., T], *args: Any, **kwargs: Any) -> Future[T]:
        """Returns what the function will return; that is cancelled after `close`."""
        return self._queue.put(OWN, 0, functools.partial(function, *args, **kwargs)).future

    async def run(self, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        result: T = await self._result(self._queue.put(OWN, 0, functools.partial(function, *args, **kwargs)))
        return result

    async def run_for(self, owner: str, size: int, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        call = functools.partial(function, *args, **kwargs)
        result: T = await self._result(self._queue.put(owner, size, call))
        return result

    async def respond(self) -> None:
        """Returns once every thread has answered, between two works."""
        calls = [asyncio.wrap_future(call) for call in self._queue.call_threads()]
        await asyncio.wait(calls)
        if any(call.cancelled() for call in calls):
            raise EngineStoppedError()

    async def _result(self, work: Work) -> Any:
        """Returns a work's result. Who no longer waits for it takes it out of the queue."""
        future = asyncio.wrap_future(work.future)
        future.add_done_callback(_retrieve)
        try:
            await asyncio.wait({future})
        finally:
            self._queue.drop(work)
        if future.cancelled():  # by `close`, which leaves nothing in the queue
            raise EngineStoppedError()
        return future.result()

    def close(self) -> None:
        """Drops what has not begun. Raises nothing if called twice."""
        self._queue.close()


def _retrieve(future: asyncio.Future[Any]) -> None:
    """Looks at a result, so that an error for somebody who has left is not logged as one that was overlooked."""
    if not future.cancelled():
        future.exception()


def _serve(queue: FairQueue, thread: int) -> None:
    while (work := queue.take(thread)) is not None:
        function = work.function
        if function is not None and work.future.set_running_or_notify_cancel():
            try:
                result = function()
            except BaseException as error:
                work.future.set_exception(error)
            else:
                work.future.set_result(result)
                del result
        del work, function  # an idle thread keeps no request
