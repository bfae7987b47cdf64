"""Large bodies: a process of their own reads them, with the same results, and streams go on meanwhile."""

import asyncio
import gc
import json
import os
import re
import signal
import tracemalloc
from types import SimpleNamespace

import httpx
import pytest
from fastapi.routing import APIRoute

from pagemill.errors import ServerBusyError
from pagemill.server.access.connections import MOST_READ_BYTES, Connection
from pagemill.server.access.gate import SMALL_BODY_BYTES
from pagemill.server.app import create_app
from pagemill.server.bodies.process import packed
from pagemill.server.bodies.reader import LARGE_BODY_BYTES, MOST_MARKS, MOST_OBJECTS, BodyReader, BodyRoute, is_large
from pagemill.server.protocol.completions import CompletionRequest
from waiting import wait_until

JSON = {"Content-Type": "application/json"}
PADDING = b" " * (LARGE_BODY_BYTES + 1)


def test_every_body_may_be_large():
    def routes(of):
        for route in of:
            yield from routes(route.original_router.routes) if hasattr(route, "original_router") else [route]

    app = create_app(SimpleNamespace(rates=dict, on_request_end=[]), "m")
    with_body = [route for route in routes(app.routes) if isinstance(route, APIRoute) and route.dependant.body_params]
    assert len(with_body) > 4
    assert [route.path for route in with_body if not isinstance(route, BodyRoute)] == []


@pytest.mark.parametrize(
    ("body", "large"),
    [
        (b"[]," * (SMALL_BODY_BYTES // 3), False),
        (b"[]," * (SMALL_BODY_BYTES // 3 + 1), True),
        (b"x" * LARGE_BODY_BYTES, False),
        (b"x" * (LARGE_BODY_BYTES + 1), True),
        (b'{ "a":1},' * MOST_OBJECTS, False),
        (b'{ "a":1},' * (MOST_OBJECTS + 1), True),
        (json.dumps({"prompt": 'if (x) {"y"; {}}' * 2000}).encode(), False),
        (b"x" * SMALL_BODY_BYTES + b"\\" * MOST_MARKS, False),
        (b"x" * SMALL_BODY_BYTES + b"\\" * (MOST_MARKS + 1), True),
    ],
)
def test_a_body_is_large_by_its_bytes_or_by_what_is_in_it(body, large):
    assert is_large(body) == large


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("completions", {"prompt": [1, 2, 3], "max_tokens": 3, "temperature": 0, "logprobs": 1, "echo": True}),
        ("completions", {"prompt": [[1, 2], [3]], "max_tokens": 3, "temperature": 0, "allowed_token_ids": [5, 6, 7]}),
        ("completions", {"prompt": ["a", "b"], "max_tokens": 3, "seed": 1, "stop": ["x"], "logit_bias": {"5": 1}}),
        ("chat/completions", {"messages": [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}], "seed": 1}),
        ("completions", {"prompt": [5] * 3000}),
        ("completions", {"prompt": [99999999]}),
        ("completions", {"prompt": [2**70]}),
        ("completions", {"prompt": [[]]}),
        ("completions", {"prompt": "x", "no_such_field": 1}),
        ("completions", {"prompt": "x", "max_tokens": "many"}),
        ("completions", {"prompt": "\ud800"}),
        ("chat/completions", {"messages": [{"role": "tool", "content": "x"}]}),
        ("pins", {"name": "a", "prompt": [1, 2]}),
        ("pins", {"name": "a", "prompt": [1] * 16}),
        ("kv_memory", {"kv_memory": -1}),
        ("completions", []),
        ("completions", "{"),
        ("completions", "[" * 100_000),
    ],
)  # fmt: skip
def test_a_large_body_has_the_same_answer_as_a_small_one(v1, path, body):
    text = body if isinstance(body, str) else json.dumps({**body, "max_tokens": 5} if "messages" in body else body)
    answers = [v1.post(f"/{path}", content=text.encode() + padding, headers=JSON) for padding in (b"", PADDING)]
    assert answers[0].status_code == answers[1].status_code
    small, large = (answer.json() for answer in answers)
    for changing in ("id", "created", "usage"):
        small.pop(changing, None), large.pop(changing, None)
    if "error" in small:
        assert small["error"] == large["error"]
    else:
        assert small == large


@pytest.mark.parametrize("padding", [b"", PADDING])
def test_a_body_of_another_content_type_is_told_which_one_is_taken(v1, padding):
    refused = v1.post("/completions", content=b'{"prompt":"x"}' + padding, headers={"Content-Type": "text/plain"})
    assert refused.status_code == 400
    assert "sent with Content-Type: application/json" in refused.json()["error"]["message"]


def test_a_body_that_is_no_object_of_known_fields_is_small(v1):
    response = v1.put("/tenants/x", content=b'{"weight":1}' + PADDING, headers=JSON)
    assert response.status_code == 413
    assert "takes at most 65536" in response.json()["error"]["message"]


def test_integers_are_sent_as_arrays_and_all_else_as_it_is():
    assert packed([1, 2]).tolist() == [1, 2]
    assert [entry.tolist() for entry in packed([[1], [2, 3]])] == [[1], [2, 3]]
    for other in ([], ["a"], [2**70], [1, "a"], [[]], "text", None, {"a": [1]}):
        assert packed(other) == other


@pytest.mark.parametrize("many", [False, True])
def test_a_prompt_of_too_many_token_ids_is_refused_before_it_is_sent_on(v1, served, monkeypatch, many):
    def received(*_):
        raise AssertionError("the front end got the token ids")

    monkeypatch.setattr(CompletionRequest, "__setstate__", received)
    ids = [1] * LARGE_BODY_BYTES
    refused = v1.post("/completions", json={"prompt": [ids, [2]] if many else ids, "max_tokens": 1}).json()["error"]
    limit = served.llm.facts.max_model_len
    assert f"the prompt has {len(ids)} tokens" in refused["message"]
    assert f"{limit - 1} tokens" in refused["message"]
    assert (refused["code"], refused["param"]) == ("context_length_exceeded", "prompt")


def test_the_process_may_end_and_is_started_again():
    reader, body = BodyReader(lambda: None), b'{"prompt":"x"}'

    async def ask():
        return await reader.read(CompletionRequest, body, "default")

    try:
        assert asyncio.run(ask()).prompt == "x"
        os.kill(reader.pid, signal.SIGKILL)
        with pytest.raises(ServerBusyError, match="the process that reads large bodies ended over one of 14 bytes"):
            asyncio.run(ask())
        assert asyncio.run(ask()).prompt == "x"
    finally:
        reader.close()
    assert reader.pid is None


def test_nobody_waits_for_a_body_whose_client_has_gone():
    app = create_app(SimpleNamespace(rates=lambda tenant: {}, on_request_end=[]), "m")
    app.state.body_reader = SimpleNamespace(read=lambda *body: asyncio.Event().wait())
    coming, sent = [{"type": "http.request", "body": b"{" + PADDING}], []

    async def receive():
        return coming.pop() if coming else {"type": "http.disconnect"}

    async def send(message):
        sent.append(message)

    headers = [(b"host", b"here"), (b"content-type", b"application/json")]
    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "query_string": b"", "headers": headers}
    asyncio.run(asyncio.wait_for(app(scope, receive, send), 10))
    assert sent[0]["status"] == 499


def test_allowed_tokens_are_named_once(v1, served):
    size = served.llm.facts.vocab_size
    body = {"prompt": "x", "max_tokens": 1, "allowed_token_ids": [5] * (size + 1)}
    refused = v1.post("/completions", json=body).json()["error"]
    assert refused["param"] == "allowed_token_ids"
    assert f"has {size + 1} entries; this model has {size} tokens" in refused["message"]


def test_a_large_body_does_not_hold_the_event_loop(v1, served):
    """Parsed in the loop, it held it for half a second and more."""
    body = b'{"prompt":[' + b"[]," * ((7 << 20) // 3) + b"[]]}"

    def lag():
        text = httpx.get(f"{served.url}/metrics").text
        return float(re.search(r"^pagemill:event_loop_lag_max_seconds\S* (\S+)$", text, re.MULTILINE)[1])

    lags = []
    for _ in range(3):
        lag()
        assert v1.post("/completions", content=body, headers=JSON).status_code == 400
        lags.append(lag())
    assert min(lags) < 0.1


@pytest.mark.parametrize(
    "body",
    [
        b'{"prompt":' * 300_000,
        b'{"prompt":"x","stop":[' + b'"y",' * 700_000 + b'"y"]}',
        b'{"prompt":"' + b"ab cd " * 500_000 + b'"}',
        b'{"prompt":"x","unknown":"' + b"y" * 900_000 + b'"}',
    ],
    ids=["deep", "long list", "too long for the model", "unknown field"],
)
def test_a_refused_body_is_freed_without_a_collection(v1, body):
    gc.collect()
    gc.disable()
    tracemalloc.start()
    try:
        _refuse(v1, body)
        most = tracemalloc.get_traced_memory()[0] + len(body)
        for _ in range(4):
            _refuse(v1, body)
        wait_until(lambda: tracemalloc.get_traced_memory()[0] < most, "refused bodies are kept")
    finally:
        tracemalloc.stop()
        gc.enable()


def _refuse(v1, body):
    assert v1.post("/completions", content=body, headers=JSON).status_code == 400


def test_no_connection_takes_a_whole_turn_of_the_event_loop(v1, monkeypatch):
    sizes, take = [], Connection.data_received

    def noted(connection, data):
        sizes.append(len(data))
        take(connection, data)

    monkeypatch.setattr(Connection, "data_received", noted)
    assert v1.post("/completions", content=b"[" * 900_000, headers=JSON).status_code == 400
    assert max(sizes) <= MOST_READ_BYTES < sum(sizes)
