"""A server tells of itself: its models, health, metrics, and its pool while that is resized."""

import asyncio
import re

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from pagemill.frontend.async_llm import AsyncLLM
from pagemill.server.app import create_app
from server.questions import MODEL


def test_what_is_served(client, http):
    (model,) = client.models.list().data
    assert model.id == client.models.retrieve(MODEL).id == MODEL
    assert model.max_model_len == 2048
    assert http.get("/health").json() == {"status": "ok"}
    assert http.get("/version").json()["version"]
    api = http.get("/openapi.json").json()
    assert "/v1/chat/completions" in api["paths"]
    fields = api["components"]["schemas"]["CompletionRequest"]["properties"]
    assert "It must be" in fields["stop_token_ids"]["description"]
    for name in ("stop", "logit_bias"):  # which have another form in JSON than in Python
        assert not re.search("must be|several times", fields[name]["description"])


READ = ("/v1/models", f"/v1/models/{MODEL}", "/health", "/ready", "/live", "/version", "/metrics", "/v1/sessions")


@pytest.mark.parametrize("path", READ)
def test_head_is_served_where_get_is(http, path):
    got, head = http.get(path), http.head(path)
    assert (head.status_code, head.content) == (got.status_code, b"")
    assert head.headers["content-type"] == got.headers["content-type"]
    assert http.head("/v1/completions").status_code == 405


def test_help_of_metrics_can_be_read_alone(http):
    helps = [family.documentation for family in text_string_to_metric_families(http.get("/metrics").text)]
    assert len(helps) > 30
    assert [text for text in helps if re.search(r"^(Those|Their)\b|\bthere\b", text)] == []


def metrics(http) -> dict[str, float]:
    """By name and labels, the model's name apart."""
    response = http.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    families = text_string_to_metric_families(response.text)
    return {
        " ".join(
            [
                sample.name.removeprefix("pagemill:"),
                *(value for label, value in sample.labels.items() if label != "model_name"),
            ]
        ): sample.value
        for family in families
        for sample in family.samples
    }


def test_metrics_count_what_was_served(served, client, http):
    served.wait_until_idle()
    create_app(served.llm, MODEL)  # another application of this engine takes nothing from the first
    before = metrics(http)
    asked = {"model": MODEL, "stream": True, "extra_body": {"ignore_eos": True}}
    stream = client.completions.create(**asked, prompt="One two three four five " * 9, max_tokens=50)
    next(stream)
    during = metrics(http)
    assert during["num_requests_running"] == 1
    assert 0 < during["kv_slots_written"] <= during["kv_slots_reserved"] == during["kv_blocks active"] * 16
    assert during["kv_cache_usage_perc"] > 0
    list(stream)
    with client.completions.create(**asked, prompt="One", max_tokens=500) as left:
        next(left)
    served.wait_until_idle()
    after = metrics(http)

    def grown(name: str) -> float:
        return after[name] - before.get(name, 0)

    assert grown("request_success_total length") == 1
    assert grown("request_success_total abort") == 1
    for name in ("time_to_first_token_seconds_count", "request_queue_time_seconds_count"):
        assert grown(name) == 2
    assert grown("request_time_per_output_token_seconds_count") in (1, 2)  # who left may have seen one token
    assert grown("e2e_request_latency_seconds_count") == 1
    assert grown("generation_tokens_total") > 50
    assert grown("prompt_tokens_total") > 45
    assert grown("engine_steps_total") >= 51
    assert sum(after[f"kv_blocks {state}"] for state in ("free", "cached", "active")) == served.stats().frames
    assert after["kv_blocks active"] == 0


def test_the_pool_is_resized_while_a_stream_runs(served, client, http):
    size = http.get("/v1/kv_memory").json()["kv_memory"]
    answers = {}
    for resized in (False, True):
        stream = client.completions.create(model=MODEL, prompt="Once upon a time", stream=True, seed=3, max_tokens=60)
        texts = [next(stream).choices[0].text]
        if resized:
            assert http.post("/v1/kv_memory", json={"kv_memory": "used"}).json()["kv_memory"] < size
            assert http.post("/v1/kv_memory", json={"kv_memory": "64MiB"}).json()["kv_memory"] <= 64 << 20
        answers[resized] = texts + [chunk.choices[0].text for chunk in stream]
    assert "".join(answers[True]) == "".join(answers[False])
    refused = http.post("/v1/kv_memory", json={"kv_memory": "1TiB"})
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "kv_memory"
    assert "are free" in refused.json()["error"]["message"]
    assert http.post("/v1/kv_memory", json={"kv_memory": None}).json() == {"kv_memory": size}
    served.wait_until_idle()


def test_who_has_no_room_in_a_pool_that_was_made_small_may_ask_again(served, http):
    body = {"model": MODEL, "prompt": "Once upon a time " * 20, "max_tokens": 8}
    assert http.post("/v1/kv_memory", json={"kv_memory": "used"}).status_code == 200
    refused = http.post("/v1/completions", json=body)
    assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
    assert "try again later" in refused.json()["error"]["message"]
    assert http.post("/v1/kv_memory", json={"kv_memory": None}).status_code == 200
    assert http.post("/v1/completions", json=body).status_code == 200
    served.wait_until_idle()


def test_the_model_of_an_engine_that_is_gone_keeps_its_card():
    async def cards():
        async with AsyncLLM(MODEL, kv_memory="16MiB", max_num_seqs=4) as llm:
            transport = httpx.ASGITransport(create_app(llm, MODEL))
            async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
                loading = (await http.get("/v1/models")).json()["data"][0]
                await llm.ready()
                served = (await http.get("/v1/models")).json()
                await llm.shutdown()
                return loading, served, (await http.get("/v1/models")).json()

    loading, served, gone = asyncio.run(cards())
    assert loading["max_model_len"] is None
    assert gone == served
    assert served["data"][0]["max_model_len"] > 0
