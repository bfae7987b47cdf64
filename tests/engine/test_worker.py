"""The front end's thread: in order, forgetful after its end, and no obstacle to the end of the process."""

import asyncio
import subprocess
import sys
import threading
import time

import pytest

from pagemill.errors import EngineDeadError
from pagemill.frontend.worker import WorkerThread


def test_work_is_done_in_order_and_failures_are_raised():
    async def work():
        worker, done = WorkerThread(), []
        results = await asyncio.gather(*(worker.run(lambda number=number: done.append(number)) for number in range(20)))
        with pytest.raises(ZeroDivisionError):
            await worker.run(lambda: 1 / 0)
        worker.close()
        return done, results

    done, results = asyncio.run(work())
    assert done == list(range(20))
    assert results == [None] * 20


def test_what_has_not_begun_when_it_is_closed_is_told():
    async def work():
        worker, begun, leave = WorkerThread(), threading.Event(), threading.Event()
        running = asyncio.ensure_future(worker.run(lambda: (begun.set(), leave.wait(10))))
        await asyncio.to_thread(begun.wait)
        waiting = asyncio.ensure_future(worker.run(int))
        await asyncio.sleep(0)
        worker.close()
        worker.close()
        for late in (waiting, worker.run(int)):
            with pytest.raises(EngineDeadError):
                await asyncio.wait_for(late, 5)
        worker.run_behind(lambda: None)
        leave.set()
        await running

    asyncio.run(work())


def test_a_thread_that_is_busy_for_long_does_not_keep_the_process():
    code = """
import asyncio, time
from pagemill.frontend.worker import WorkerThread
async def main():
    worker = WorkerThread()
    asyncio.ensure_future(worker.run(time.sleep, 60))
    await asyncio.sleep(0.2)
    worker.close()
asyncio.run(main())
"""
    began = time.monotonic()
    assert subprocess.run([sys.executable, "-c", code], timeout=50).returncode == 0
    assert time.monotonic() - began < 20


def test_a_worker_that_nobody_has_any_more_ends():
    worker = WorkerThread()
    asyncio.run(worker.run(int))
    (thread,) = [thread for thread in threading.enumerate() if thread.name == "tokenizer" and thread.is_alive()][-1:]
    del worker
    thread.join(5)
    assert not thread.is_alive()
