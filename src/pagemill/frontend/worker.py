"""Workers: where the front end tokenizes and keeps sessions: in the caller's thread, or in one of its own."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import queue
import threading
import weakref
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, Protocol, TypeAlias, TypeVar

from pagemill.errors import EngineDeadError

T = TypeVar("T")

Work: TypeAlias = "queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None]"
"""Holds what a thread has to do, in order; None ends it."""


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
    """A `Worker` with a thread of its own: a long prompt must not hold up everybody's events.

    It is a daemon, unlike those of concurrent.futures: whatever it is doing does not keep the process from ending.
    """

    def __init__(self, name: str = "tokenizer") -> None:
        self._work: Work = queue.SimpleQueue()
        self._closed = False
        weakref.finalize(self, self._work.put, None)
        threading.Thread(target=_serve, args=(self._work,), name=name, daemon=True).start()

    def submit(self, function: Callable[..., T], *args: Any, **kwargs: Any) -> Future[T]:
        """Returns what the function will return; that is cancelled after `close`."""
        future: Future[T] = Future()
        if self._closed:
            future.cancel()
        else:
            self._work.put((future, functools.partial(function, *args, **kwargs)))
        return future

    async def run(self, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        work = asyncio.wrap_future(self.submit(function, *args, **kwargs))
        try:
            await asyncio.wait({work})
        finally:
            work.cancel()
        if work.cancelled():  # by `close`, which leaves nothing in the queue
            raise EngineDeadError("the engine was shut down")
        return work.result()

    def run_behind(self, function: Callable[[], None]) -> None:
        self.submit(function)

    def close(self) -> None:
        """Drops what has not begun. Raises nothing if called twice."""
        self._closed = True
        with contextlib.suppress(queue.Empty):
            while (left := self._work.get_nowait()) is not None:
                left[0].cancel()
        self._work.put(None)


def _serve(work: Work) -> None:
    while (item := work.get()) is not None:
        future, function = item
        if not future.set_running_or_notify_cancel():
            continue
        try:
            result = function()
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(result)
            del result
        del item, future, function  # an idle thread keeps no request
