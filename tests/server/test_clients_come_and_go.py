"""Clients that go away, that come together, and that wait beside a long prompt."""

import concurrent.futures
import http.client as http_client
import json
import time

import httpx
import pytest

from pagemill.server.protocol.completions import CompletionRequest
from pagemill.server.routes.completions import CompletionCall
from server.questions import MODEL


@pytest.mark.parametrize("kind", ["stream", "whole", "several prompts"])
def test_a_client_that_goes_away_gives_everything_back(served, kind):
    body = {"model": MODEL, "prompt": "Once upon a time", "max_tokens": 2000, "ignore_eos": True, "n": 2}
    if kind == "several prompts":
        body["prompt"] = ["Once", "upon"]
    generated = served.stats().generated_tokens
    with httpx.Client(base_url=served.url) as http:
        if kind == "stream":
            with http.stream("POST", "/v1/completions", json={**body, "stream": True}) as response:
                assert next(response.iter_lines()).startswith("data: ")
        else:
            connection = http_client.HTTPConnection(served.url.removeprefix("http://"))
            connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
            while served.stats().generated_tokens == generated:
                time.sleep(0.01)
            connection.close()
    stats = served.wait_until_idle()
    assert 0 < stats.generated_tokens - generated < 2000


def test_a_stream_that_nobody_reads_gives_everything_back_when_it_is_closed(served):
    body = CompletionRequest(prompt="Once upon a time", max_tokens=2000, ignore_eos=True, stream=True)
    generated = served.stats().generated_tokens

    async def unread():
        events = await CompletionCall(served.llm, body, MODEL, "default").events()
        await events.aclose()

    served.run(unread())
    assert served.wait_until_idle().generated_tokens - generated < 1000


def test_a_small_answer_is_not_held_back(served):
    """Head and body are two parts: with Nagle's algorithm each answer on a kept connection took 44 ms."""
    connection = http_client.HTTPConnection(served.url.removeprefix("http://"))
    seconds = []
    for _ in range(30):
        began = time.perf_counter()
        connection.request("GET", "/version")
        connection.getresponse().read()
        seconds.append(time.perf_counter() - began)
    connection.close()
    assert min(seconds) < 0.02


def test_many_clients_at_the_same_time(client, served):
    def ask(number):
        stream = client.completions.create(
            model=MODEL, prompt=f"{number}, {number + 1},", temperature=0, max_tokens=4, stream=True
        )
        return "".join(chunk.choices[0].text for chunk in stream)

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        texts = list(pool.map(ask, range(8)))
    assert texts[3] == ask(3)
    served.wait_until_idle()


def test_health_stays_quick_while_a_long_prompt_is_tokenized(http, served):
    body = {"model": MODEL, "prompt": "many words " * 400_000, "max_tokens": 1}
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        refused = pool.submit(httpx.post, f"{served.url}/v1/completions", json=body, timeout=60)
        slowest = 0.0
        while not refused.done():
            started = time.process_time()
            assert http.get("/health").status_code == 200
            slowest = max(slowest, time.process_time() - started)
    assert refused.result().status_code == 400
    assert slowest < 1.0
