"""How late the event loop is, and how much of that is for want of a processor."""

import asyncio
import contextlib
import os
import subprocess
import sys
import time

import pytest

from pagemill.server.lifecycle.loop_lag import IDLE_PERIOD_S, PERIOD_S, WAITS, watch_loop_lag

HELD_S = 0.06
RIVALS = 5


def seen(hold):
    """Returns the longest lag, and the longest without waits for a processor, of a loop in which `hold` is called."""
    looks = []

    async def run():
        watcher = asyncio.create_task(watch_loop_lag(lambda *look: looks.append(look), ["a request"]))
        await asyncio.sleep(0.02)
        hold()
        await asyncio.sleep(0.02)
        watcher.cancel()

    asyncio.run(run())
    return tuple(max(times) for times in zip(*looks, strict=True))


def compute():
    """Keeps a processor busy for `HELD_S` of its time."""
    until = time.thread_time() + HELD_S
    while time.thread_time() < until:
        pass


def test_what_holds_the_loop_is_its_own():
    lag_s, held_s = seen(lambda: time.sleep(HELD_S))
    assert lag_s >= held_s > HELD_S * 0.9


@pytest.mark.skipif(not os.path.exists(WAITS), reason="this system counts no waits")
def test_waits_for_a_processor_are_not_its_own():
    allowed = os.sched_getaffinity(0)
    with contextlib.ExitStack() as rivals:
        os.sched_setaffinity(0, {min(allowed)})
        try:
            for _ in range(RIVALS):
                rivals.callback(subprocess.Popen([sys.executable, "-c", "while True: pass"]).kill)
            time.sleep(0.3)
            lag_s, held_s = seen(compute)
        finally:
            os.sched_setaffinity(0, allowed)
    assert lag_s > 2 * HELD_S, "the rivals took no processor"
    assert held_s < (lag_s + HELD_S) / 2


def test_it_looks_seldom_while_no_request_is_in_flight():
    looks, requests = [], set()

    async def run():
        watcher = asyncio.create_task(watch_loop_lag(lambda *look: looks.append(look), requests))
        await asyncio.sleep(5 * IDLE_PERIOD_S)
        idle = len(looks)
        requests.add("one")
        while len(looks) < idle + 20:
            await asyncio.sleep(PERIOD_S)
        watcher.cancel()
        return idle

    assert 1 <= asyncio.run(run()) <= 5
