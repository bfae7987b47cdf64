"""Runs what recurses deeply in threads with large stacks: compilers of grammars do, along chains of rules."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, TypeAlias, TypeVar

T = TypeVar("T")

STACK_BYTES = 256 << 20
"""Stack of such a thread, of which only what is used takes memory."""

_ONE_STARTS = threading.Lock()
_ONE_WORKS = threading.Lock()

_Work: TypeAlias = "tuple[weakref.ref[Future[Any]], Callable[[], Any]]"


def in_roomy_thread(function: Callable[[], T], at_once: bool = False) -> Future[T]:
    """Runs a function in a thread of its own, `at_once` or when no other such function runs."""
    future: Future[T] = Future()
    _start(lambda: _work(future, function, at_once))
    return future


class RoomyThread:
    """A thread that runs one function after the other, while no other such function runs. It ends with this object."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[_Work | None] = SimpleQueue()
        self._started = False

    def submit(self, function: Callable[[], T]) -> Future[T]:
        """Runs a function when its turn comes, unless nobody holds what this returns by then."""
        if not self._started:
            queue = self._queue
            _start(lambda: _work_off(queue))
            self._started = True
            weakref.finalize(self, queue.put, None)
        future: Future[T] = Future()
        self._queue.put((weakref.ref(future), function))
        return future


def _start(target: Callable[[], None]) -> None:
    with _ONE_STARTS:
        usual = threading.stack_size(STACK_BYTES)
        try:
            threading.Thread(target=target, name="grammar", daemon=True).start()
        finally:
            threading.stack_size(usual)


def _work(future: Future[T], function: Callable[[], T], at_once: bool = False) -> None:
    with contextlib.nullcontext() if at_once else _ONE_WORKS:
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)


def _work_off(queue: SimpleQueue[_Work | None]) -> None:
    while (work := queue.get()) is not None:
        if (future := work[0]()) is not None:
            _work(future, work[1])
        del work, future  # nothing is kept while it waits
