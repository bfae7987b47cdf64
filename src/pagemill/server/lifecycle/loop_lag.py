"""How late the front end's event loop runs what is due: while something holds it, no stream gets its next part."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable, Collection, Iterator

PERIOD_S = 0.005
"""Seconds between two looks: what holds the loop is seen to this much."""
IDLE_PERIOD_S = 0.1
"""The same while there is nobody to be held up, so that an idle process wakes seldom."""
WAITS = "/proc/thread-self/schedstat"
"""Linux's count of nanoseconds that a thread ran, then of those in which it was ready and no processor was free."""


async def watch_loop_lag(observe: Callable[[float, float], None], requests: Collection[object]) -> None:
    """Calls `observe` again and again, until cancelled, with the seconds by which the running event loop is late, and
    with what is left of them without those in which its thread waited for a processor.

    requests: those in flight; while there are none, it looks seldom.

    The first is what streams notice. The second is what the front end itself is to blame for: a call that took long, or
    another thread that held the interpreter. Where the system counts no waits, both are equal.
    """
    loop = asyncio.get_running_loop()
    with _waits() as waited_s:
        timer: asyncio.TimerHandle

        def begin(waited_before_s: float) -> None:
            nonlocal timer
            due_s = loop.time() + (PERIOD_S if requests else IDLE_PERIOD_S)
            timer = loop.call_at(due_s, look, due_s, waited_before_s)

        def look(due_s: float, waited_before_s: float) -> None:
            lag_s, now_waited_s = max(loop.time() - due_s, 0.0), waited_s()
            observe(lag_s, max(lag_s - (now_waited_s - waited_before_s), 0.0))
            begin(now_waited_s)

        begin(waited_s())  # calls, not a task that sleeps: they take half the time, two hundred times a second
        try:
            await loop.create_future()
        finally:
            timer.cancel()


@contextlib.contextmanager
def _waits() -> Iterator[Callable[[], float]]:
    """Gives a function that returns the seconds for which this thread has waited for a processor since its start."""
    try:
        counts = os.open(WAITS, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        yield lambda: 0.0
        return
    try:
        yield lambda: int(os.pread(counts, 64, 0).split()[1]) / 1e9
    finally:
        os.close(counts)
