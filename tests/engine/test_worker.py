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


class Held:
    """Work that has begun in one thread, and does not end before `end`."""

    @classmethod
    async def begin(cls, worker, size):
        held, begun = cls(), threading.Event()
        held._leave = threading.Event()
        held._work = asyncio.ensure_future(worker.run_for("a", size, lambda: (begun.set(), held._leave.wait(50))))
        await asyncio.to_thread(begun.wait, 50)
        return held

    async def end(self):
        self._leave.set()
        await self._work


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
        worker = WorkerThreads()
        long = await Held.begin(worker, SHORT + 1)
        more = [asyncio.ensure_future(worker.run_for("a", SHORT + 1, int)) for _ in range(2)]
        assert await asyncio.wait_for(worker.run_for("a", SHORT, str, "short"), 50) == "short"
        await long.end()
        await asyncio.gather(*more)
        worker.close()

    asyncio.run(work())


@pytest.mark.parametrize("busy", [0, 1])
def test_responding_waits_for_every_thread(busy):
    async def work():
        worker = WorkerThreads()
        held = [await Held.begin(worker, SHORT + 1), await Held.begin(worker, 1)]
        asking = asyncio.ensure_future(worker.respond())
        await asyncio.sleep(0)
        await held[1 - busy].end()
        for size in (1, SHORT + 1)[: 1 + busy]:  # what the other thread takes
            await worker.run_for("a", size, int)
        assert not asking.done()
        await held[busy].end()
        await asyncio.wait_for(asking, 50)
        asking = asyncio.ensure_future(worker.respond())
        worker.close()
        with pytest.raises(EngineDeadError):
            await asking

    asyncio.run(work())


def test_who_hangs_up_takes_its_work_along():
    async def work():
        worker, done = WorkerThreads(), []
        worker.limit("a", 2)
        first = await Held.begin(worker, SHORT + 1)
        for _ in range(3):
            waiting = [asyncio.ensure_future(worker.run_for("a", SHORT + 1, done.append, 1)) for _ in range(2)]
            await asyncio.sleep(0)
            with pytest.raises(TooManyWaitingError, match=r"2 texts of tenant 'a' wait to be .* max_waiting is 2;"):
                worker.require_room("a")
            for one in waiting:
                one.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)
        await first.end()
        await worker.respond()
        worker.close()
        return done

    assert asyncio.run(work()) == []


def test_what_has_not_begun_when_it_is_closed_is_told():
    async def work():
        worker = WorkerThreads()
        running = await Held.begin(worker, SHORT + 1)
        waiting = asyncio.ensure_future(worker.run_for("a", SHORT + 1, int))
        await asyncio.sleep(0)
        worker.close()
        worker.close()
        for late in (waiting, worker.run(int)):
            with pytest.raises(EngineDeadError):
                await asyncio.wait_for(late, 5)
        await running.end()

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
