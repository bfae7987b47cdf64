"""FairQueue: work that waits for a thread, taken so that nobody's mass of it holds up what others want."""

from __future__ import annotations

import heapq
import itertools
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from pagemill.errors import TooManyWaitingError

SHORT = 16_384
"""Work of at most so many characters is short, and a text has to be very large to be tokenized as one."""
LEAST = 256
"""Characters that each work counts at least: what it costs beside its text."""


@dataclass(slots=True, eq=False)
class Work:
    """Holds a function to be called, and where its result goes. waits: until it is taken, or nobody wants it."""

    future: Future[Any]
    function: Callable[[], Any] | None
    owner: str
    size: int
    waits: bool = True


Heap = list[tuple[float, int, Work]]


@dataclass(slots=True, eq=False)
class _Owner:
    """Holds one owner's work, the one with the least tag first.

    service: characters that were taken for it. tag: of what was taken last.
    """

    service: float = 0.0
    tag: float = 0.0
    waiting: int = 0
    short: Heap = field(default_factory=list)
    long: Heap = field(default_factory=list)


class FairQueue:
    """A queue for several threads. The owner goes first for whom the fewest characters have been taken.

    The first thread takes any work, the others only short one: no short work waits behind a long one, whosever that is.

    An owner that comes back has at least what the others have had, so that nobody saves up. Within an owner, work goes
    first that would end first if all of it were done at once, a little of each in turn (its tag): short before long,
    and nothing is passed for ever.
    """

    def __init__(self, num_threads: int = 1) -> None:
        self._changed = threading.Condition()
        self._calls: list[list[Future[None]]] = [[] for _ in range(num_threads)]
        self._owners: dict[str, _Owner] = {}
        self._limits: dict[str, int | None] = {}
        self._numbers = itertools.count()
        self._level = 0.0
        self._closed = False

    def limit(self, owner: str, max_waiting: int | None) -> None:
        """Sets how many works of an owner may wait; None is no limit."""
        self._limits[owner] = max_waiting

    def require_room(self, owner: str) -> None:
        """Raises TooManyWaitingError where an owner has as much waiting as it may."""
        with self._changed:
            most = self._limits.get(owner)
            waiting = self._owners[owner].waiting if owner in self._owners else 0
        if most is not None and waiting >= most:
            raise TooManyWaitingError(
                f"{waiting} texts of tenant {owner!r} wait to be tokenized, and max_waiting is {most}; try again "
                f"later, or raise that limit",
                param="tenant",
            )

    def put(self, owner: str, size: int, function: Callable[[], Any]) -> Work:
        """Adds work of so many characters; it is cancelled if the queue is closed."""
        work = Work(Future(), function, owner, size)
        with self._changed:
            if self._closed:
                work.waits = not work.future.cancel()
                return work
            mine = self._owners.setdefault(owner, _Owner())
            if not mine.waiting:
                mine.service = max(mine.service, self._level)
            mine.waiting += 1
            heap = mine.short if size <= SHORT else mine.long
            heapq.heappush(heap, (mine.tag + max(size, LEAST), next(self._numbers), work))
            self._changed.notify_all()
        return work

    def call_threads(self) -> list[Future[None]]:
        """Returns a future for each thread, which is done when that next comes for work."""
        calls: list[Future[None]] = [Future() for _ in self._calls]
        with self._changed:
            for waiting, call in zip(self._calls, calls, strict=True):
                waiting.append(call)
            if self._closed:
                self._cancel_calls()
            self._changed.notify_all()
        return calls

    def take(self, thread: int = 0) -> Work | None:
        """Waits for work for a thread, by its number, and returns it; None once the queue is closed."""
        calls = self._calls[thread]
        with self._changed:
            while not self._closed:
                while calls:
                    if (call := calls.pop()).set_running_or_notify_cancel():
                        call.set_result(None)
                if (work := self._next(only_short=thread > 0)) is not None:
                    return work
                self._changed.wait()
        return None

    def drop(self, work: Work) -> None:
        """Forgets work that nobody wants any more, if it has not begun."""
        with self._changed:
            work.future.cancel()
            if work.waits:
                work.waits, work.function = False, None
                self._owners[work.owner].waiting -= 1

    def close(self) -> None:
        """Cancels what waits, and ends the threads that take from it."""
        with self._changed:
            self._closed = True
            for owner in self._owners.values():
                for _, _, work in owner.short + owner.long:
                    work.waits = False
                    work.future.cancel()
            self._owners.clear()
            self._cancel_calls()
            self._changed.notify_all()

    def _cancel_calls(self) -> None:
        for calls in self._calls:
            while calls:
                calls.pop().cancel()

    def _next(self, only_short: bool) -> Work | None:
        found: tuple[_Owner, Heap] | None = None
        for name, owner in list(self._owners.items()):
            heaps = [heap for heap in (owner.short, owner.long) if _has_work(heap)]
            if not heaps:
                if owner.service <= self._level:  # else it comes back with what it has had
                    del self._owners[name]
            elif (not only_short or owner.short) and (found is None or owner.service < found[0].service):
                found = owner, owner.short if only_short else min(heaps, key=lambda heap: heap[0])
        if found is None:
            return None
        owner, heap = found
        owner.tag, _, work = heapq.heappop(heap)
        work.waits = False
        owner.waiting -= 1
        self._level = owner.service
        owner.service += max(work.size, LEAST)
        return work


def _has_work(heap: Heap) -> bool:
    """Takes out what nobody wants any more, as far as it comes first. Returns whether there is other work."""
    while heap and not heap[0][2].waits:
        heapq.heappop(heap)
    return bool(heap)
