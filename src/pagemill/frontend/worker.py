"""Workers: where the front end tokenizes and keeps sessions: in the caller's thread, or in one of its own."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol, TypeVar

from pagemill.errors import EngineDeadError

T = TypeVar("T")


class Worker(Protocol):
    """Runs functions one after another."""

    async def run(self, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Returns what the function returns, or raises what it raises."""

    def run_behind(self, function: Callable[[], None]) -> None:
        """Runs the function behind all others, and waits for nothing."""


class Inline:
    """A `Worker` in the caller's thread."""

    async def run(self, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        return function(*args, **kwargs)

    def run_behind(self, function: Callable[[], None]) -> None:
        function()


def immediately(work: Coroutine[Any, Any, T]) -> T:
    """Returns the result of a coroutine over an inline engine and worker, which never waits, without an event loop."""
    try:
        work.send(None)
    except StopIteration as done:
        result: T = done.value
        return result
    work.close()
    raise RuntimeError("a coroutine over an inline engine has waited")


class WorkerThread:
    """A `Worker` with a thread of its own: a long prompt must not hold up everybody's events."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="tokenizer")

    def submit(self, function: Callable[..., T], *args: Any) -> Future[T]:
        return self._pool.submit(function, *args)

    async def run(self, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        loop = asyncio.get_running_loop()
        work = loop.run_in_executor(self._pool, functools.partial(function, *args, **kwargs))
        try:
            await asyncio.wait({work})
        finally:
            work.cancel()
        if work.cancelled():  # by `close`, which leaves nothing in the queue
            raise EngineDeadError("the engine was shut down")
        return work.result()

    def run_behind(self, function: Callable[[], None]) -> None:
        with contextlib.suppress(RuntimeError):  # after `close` nobody needs it
            self._pool.submit(function)

    def close(self) -> None:
        """Drops what has not begun. Raises nothing if called twice."""
        self._pool.shutdown(wait=False, cancel_futures=True)
