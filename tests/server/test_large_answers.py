"""Large answers are written in a thread, and are the same."""

import json

import pytest

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
