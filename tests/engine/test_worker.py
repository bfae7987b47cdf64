"""The front end's threads: fair, forgetful after its end, and no obstacle to the end of the process."""

import asyncio
import subprocess
import sys
import threading
import time

import pytest

from pagemill.errors import EngineDeadError, TooManyWaitingError
from pagemill.frontend.fair_queue import SHORT
from pagemill.frontend.worker import WorkerThreads


def test_results_are_returned_and_failures_raised():
    async def work():
        worker = WorkerThreads()
        results = await asyncio.gather(*(worker.run(str, number) for number in range(20)))
        with pytest.raises(ZeroDivisionError):
            await worker.run_for("a", 10, lambda: 1 / 0)
        await worker.respond()
        worker.close()
        return results

    assert asyncio.run(work()) == [str(number) for number in range(20)]


def test_nothing_short_waits_behind_what_is_long():
    async def work():
        worker, leave = WorkerThreads(), threading.Event()
        long = [asyncio.ensure_future(worker.run_for("a", SHORT + 1, leave.wait, 20)) for _ in range(3)]
        await asyncio.sleep(0)
        assert await asyncio.wait_for(worker.run_for("a", SHORT, str, "short"), 10) == "short"
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(worker.respond(), 0.05)
        leave.set()
        await asyncio.gather(*long)
        worker.close()

    asyncio.run(work())


def test_who_hangs_up_takes_its_work_along():
    async def work():
        worker, leave, done = WorkerThreads(), threading.Event(), []
        worker.limit("a", 2)
        first = asyncio.ensure_future(worker.run_for("a", SHORT + 1, leave.wait, 20))
        await asyncio.sleep(0.05)
        for _ in range(3):
            waiting = [asyncio.ensure_future(worker.run_for("a", SHORT + 1, done.append, 1)) for _ in range(2)]
            await asyncio.sleep(0)
            with pytest.raises(TooManyWaitingError, match=r"2 texts of tenant 'a' wait to be .* max_waiting is 2;"):
                worker.require_room("a")
            for one in waiting:
                one.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)
        leave.set()
        await first
        await worker.respond()
        worker.close()
        return done

    assert asyncio.run(work()) == []


def test_what_has_not_begun_when_it_is_closed_is_told():
    async def work():
        worker, begun, leave = WorkerThreads(), threading.Event(), threading.Event()
        running = asyncio.ensure_future(worker.run_for("a", SHORT + 1, lambda: (begun.set(), leave.wait(10))))
        await asyncio.to_thread(begun.wait)
        waiting = asyncio.ensure_future(worker.run_for("a", SHORT + 1, int))
        await asyncio.sleep(0)
        worker.close()
        worker.close()
        for late in (waiting, worker.run(int)):
            with pytest.raises(EngineDeadError):
                await asyncio.wait_for(late, 5)
        leave.set()
        await running

    asyncio.run(work())


def test_a_thread_that_is_busy_for_long_does_not_keep_the_process():
    code = """
import asyncio, time
from pagemill.frontend.worker import WorkerThreads
async def main():
    worker = WorkerThreads()
    asyncio.ensure_future(worker.run(time.sleep, 60))
    await asyncio.sleep(0.2)
    worker.close()
asyncio.run(main())
"""
    began = time.monotonic()
    assert subprocess.run([sys.executable, "-c", code], timeout=50).returncode == 0
    assert time.monotonic() - began < 20


def test_a_worker_that_nobody_has_any_more_ends():
    worker = WorkerThreads()
    asyncio.run(worker.run(int))
    threads = [thread for thread in threading.enumerate() if thread.name == "tokenizer" and thread.is_alive()][-2:]
    del worker
    for thread in threads:
        thread.join(5)
        assert not thread.is_alive()
