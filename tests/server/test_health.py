"""Health: an engine or a tokenizer that does not answer is not healthy, and asking waits for neither."""

import asyncio
import json
from types import SimpleNamespace

import pytest

from pagemill.errors import EngineDeadError
from pagemill.server import health


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

        asking = health.Health(SimpleNamespace(error=None, is_ready=True, respond=respond))
        statuses = []
        for clock[0] in (0, 0, 10, health.STUCK_S + 1):
            statuses.append(asking.answer().status_code)
            await asyncio.sleep(0)
        assert len(questions) == 1, "a flood of questions about health is none to the engine"
        answers.set()
        await asyncio.sleep(0.01)
        return [*statuses, asking.answer().status_code]

    assert asyncio.run(asked()) == [200, 200, 200, 503, 200]


def test_an_engine_that_is_gone_is_dead(clock):
    answer = health.Health(SimpleNamespace(error=EngineDeadError("gone"), is_ready=False)).answer()
    assert (answer.status_code, json.loads(answer.body)) == (503, {"status": "dead", "error": "gone"})
