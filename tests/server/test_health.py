"""Health: an engine or a tokenizer that does not answer is not healthy, and asking waits for neither."""

import asyncio
import json
import os
import signal
import threading
from types import SimpleNamespace

import httpx
import pytest

from pagemill.errors import EngineDeadError
from pagemill.server.access.limits import ServerLimits
from pagemill.server.app import create_app
from pagemill.server.routes import health


@pytest.fixture
def clock(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(health, "time", SimpleNamespace(monotonic=lambda: now[0]))
    return now


def test_what_does_not_answer_is_stuck_until_it_does(clock):
    async def asked():
        answers, questions = asyncio.Event(), []

        async def respond():
            questions.append(clock[0])
            await answers.wait()

        asking = health.Health(
            SimpleNamespace(error=None, restarting=None, is_ready=True, respond=respond), stuck_after_s=100
        )
        statuses = []
        for clock[0] in (0, 0, 99, 101):
            statuses.append(asking.answer().status_code)
            await asyncio.sleep(0)
        assert len(questions) == 1, "a flood of questions about health is none to the engine"
        answers.set()
        await asyncio.sleep(0.01)
        return [*statuses, asking.answer().status_code]

    assert asyncio.run(asked()) == [200, 200, 200, 503, 200]


def test_an_engine_that_is_gone_is_dead(clock):
    answer = health.Health(SimpleNamespace(error=EngineDeadError("gone"), is_ready=False), 1).answer()
    assert (answer.status_code, json.loads(answer.body)) == (503, {"status": "dead", "error": "gone"})


def test_a_busy_server_has_minutes_and_another_time_can_be_set():
    assert ServerLimits().stuck_after_s >= 300

    async def never():
        await asyncio.Event().wait()

    llm = SimpleNamespace(error=None, restarting=None, is_ready=True, respond=never, rates=dict, on_request_end=[])
    app = create_app(llm, "m", limits=ServerLimits(stuck_after_s=0.05))

    async def asked_twice():
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://here") as http:
            first = (await http.get("/health")).status_code
            await asyncio.sleep(0.1)
            return first, (await http.get("/health")).json()["status"]

    assert asyncio.run(asked_twice()) == (200, "stuck")


def stop(pid):
    """Stops the engine's process, and waits until it does nothing any more."""
    os.kill(pid, signal.SIGSTOP)
    os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOWAIT)


def statuses(served, clock, hold, give_back):
    """What a real server's health is: before it is held, while it is, and afterwards."""

    async def asked():
        asking = health.Health(served.llm, stuck_after_s=0.5)

        async def answered():
            """The status at a time at which it is 503 until the last question has its answer."""
            clock[0] += 0.9
            while asking.answer().status_code != 200:
                await asyncio.sleep(0.01)
            return 200

        found = [asking.answer().status_code, await answered()]
        try:
            await hold()
            clock[0] += 1  # after which the next question is asked
            found.append(asking.answer().status_code)
            await asyncio.sleep(0.1)
            clock[0] += 0.4
            found.append(asking.answer().status_code)
            clock[0] += 0.2
            answer = asking.answer()
            found += [answer.status_code, json.loads(answer.body)["status"]]
        finally:
            give_back()
        return [*found, await answered()]

    return served.run(asked())


SEEN = [200, 200, 200, 200, 503, "stuck", 200]


def test_a_stopped_engine_process_is_noticed(served, clock):
    pid = served.llm.engine_pid

    async def hold():
        stop(pid)

    assert statuses(served, clock, hold, lambda: os.kill(pid, signal.SIGCONT)) == SEEN


def test_a_tokenizer_that_does_not_end_is_noticed(served, clock):
    begun, goes_on = threading.Event(), threading.Event()
    held = []

    async def hold():
        work = served.llm.in_tokenizer_thread(lambda: (begun.set(), goes_on.wait(60)), size=1)
        held.append(asyncio.ensure_future(work))
        await asyncio.to_thread(begun.wait, 60)

    assert statuses(served, clock, hold, goes_on.set) == SEEN


def test_responding_waits_for_engine_and_tokenizer(served):
    served.run(served.llm.respond())
    pid = served.llm.engine_pid
    stop(pid)
    try:
        with pytest.raises(asyncio.TimeoutError):
            served.run(asyncio.wait_for(served.llm.respond(), 0.3))
    finally:
        os.kill(pid, signal.SIGCONT)
    served.run(served.llm.respond())
