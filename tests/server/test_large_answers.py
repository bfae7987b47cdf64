"""Large answers are written in a thread and sent in parts, and are the same."""

import asyncio
import json
import queue
import threading

import pytest

from pagemill.frontend.request_state import RequestState
from pagemill.server.protocol.parts import PART_BYTES, JSONInParts
from pagemill.server.routes import call

BODY = {"prompt": "Once upon", "max_tokens": 4, "n": 3, "logprobs": 2, "seed": 1, "echo": True}
CHAT = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4, "n": 3, "seed": 1}
CHAT |= {"logprobs": True, "top_logprobs": 2}


@pytest.mark.parametrize(
    ("path", "body"), [("completions", BODY), ("completions", {**BODY, "stream": True}), ("chat/completions", CHAT)]
)
def test_an_answer_is_the_same_whether_a_thread_writes_it(v1, monkeypatch, path, body):
    found = []
    for most_here in (10**6, 0):
        monkeypatch.setattr(call, "MOST_HERE", most_here)
        response = v1.post(f"/{path}", json=body)
        assert response.status_code == 200
        parts = [line[6:] for line in response.text.splitlines() if line.startswith("data: {")] or [response.text]
        found.append([])
        for part in map(json.loads, parts):
            for changing in ("id", "created", "usage"):
                part.pop(changing, None)
            found[-1].append(part)
    here, in_a_thread = (sorted(map(json.dumps, parts)) for parts in found)
    assert here == in_a_thread


@pytest.mark.parametrize("stream", [False, True])
def test_log_probabilities_of_an_answer_are_freed_in_a_thread(v1, monkeypatch, stream):
    freed = queue.Queue()
    monkeypatch.setattr(call, "MOST_HERE", 0)
    monkeypatch.setattr(
        RequestState, "forget_logprobs", lambda request: freed.put((request.num_logprobs, threading.current_thread()))
    )
    assert v1.post("/completions", json={**BODY, "stream": stream}).status_code == 200
    count, thread = freed.get(timeout=20)
    assert count >= 12
    assert "asyncio" in thread.name


@pytest.mark.parametrize("pieces", [[b"{}"], [b"[", *[b"x" * 9] * 100_000, b"]"], [b"x" * (3 * PART_BYTES)]])
def test_an_answer_goes_out_in_parts_between_which_others_run(pieces):
    sent, others = [], []

    async def other():
        while True:
            others.append(len(sent))
            await asyncio.sleep(0)

    async def send(message):
        sent.append(message)

    async def answer():
        beside = asyncio.ensure_future(other())
        await JSONInParts(pieces)({"type": "http"}, None, send)
        beside.cancel()

    asyncio.run(answer())
    start, *parts = sent
    bodies = [part["body"] for part in parts]
    assert b"".join(bodies) == b"".join(pieces)
    assert (b"content-length", str(len(b"".join(pieces))).encode()) in start["headers"]
    assert [part["more_body"] for part in parts] == [True] * (len(parts) - 1) + [False]
    assert max(map(len, bodies)) <= 2 * PART_BYTES
    assert set(range(2, len(sent) + 1)) <= set(others)
