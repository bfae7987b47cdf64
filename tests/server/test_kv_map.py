"""`/v1/kv_map`: what it streams, who sees what of it, and that it ends."""

import asyncio
import base64
import contextlib
import json
import time

import httpx
import numpy as np
import pytest

from pagemill.engine.stats import EngineStats
from pagemill.memory.block_map import OTHERS
from pagemill.server.routes.kv_map import MAX_WATCHERS, MAX_WATCHERS_PER_TENANT, Feed
from pagemill.server.routes.metrics import Metrics

MODEL = "smollm2-135m"
LONG = {
    "model": MODEL,
    "prompt": "Once upon a time there was " * 8,
    "max_tokens": 400,
    "ignore_eos": True,
    "stream": True,
}


def numbers(text, kind):
    return np.frombuffer(base64.b64decode(text), kind)


@contextlib.contextmanager
def watching(url, key=None, **params):
    """Yields an iterator of events."""
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    with httpx.stream("GET", f"{url}/v1/kv_map", params=params, headers=headers, timeout=30) as response:
        if response.status_code != 200:
            response.read()
        response.raise_for_status()
        assert response.headers["content-type"].startswith("text/event-stream")
        yield (json.loads(line[6:]) for line in response.iter_lines() if line.startswith("data: "))


@contextlib.contextmanager
def generating(url, key=None, **body):
    """Runs a request until the block ends; yields its id."""
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    with httpx.stream("POST", f"{url}/v1/completions", json={**LONG, **body}, headers=headers, timeout=30) as response:
        lines = response.iter_lines()
        yield json.loads(next(line for line in lines if line)[6:])["id"]


def cells_of(event, tier=0):
    return numbers(event["tiers"][tier]["cells"], "<u2").reshape(-1, len(event["columns"]))


def test_changes_add_up_to_the_whole(served, v1):
    with generating(served.url) as name, watching(served.url, interval_s=0.1) as events:
        first = next(events)
        cells, width = cells_of(first).copy(), len(first["columns"])
        assert set(first["stats"]) >= set(EngineStats.__struct_fields__)
        assert [table["name"] for table in first["tables"]] == [name]
        deltas = [next(events) for _ in range(8)]
        while not any("tiers" in event for event in deltas) and len(deltas) < 200:  # a busy machine takes its time
            deltas.append(next(events))
        for event in deltas:
            for tier in event.get("tiers", []):
                rows = numbers(tier["cells"], "<u2").reshape(-1, width)
                cells[numbers(tier["changed"], "<u2")] = rows
        assert any("tiers" in event for event in deltas), "a request took blocks"
        assert all("columns" not in event for event in deltas)
        tables = [event["tables"] for event in deltas if "tables" in event][-1]
        frames, holders = (numbers(tables[0][field][0], "<i4") for field in ("frames", "holders"))
        active = first["columns"].index("active")
        assert (cells[frames, active] == 1).all()
        assert (holders == 1).all()
        assert frames.size == tables[0]["num_entries"] == cells[:, active].sum()


def test_streams_end_when_they_are_told_to(served):
    async def follow():
        feed = Feed(served.llm, Metrics("m"))
        events = await feed.events(None, 60.0)
        assert (await anext(events)).startswith("data: ")
        asyncio.get_running_loop().call_soon(feed.close)
        return [event async for event in events]

    assert served.run(follow(), timeout_s=10) == []


def test_who_leaves_leaves_nothing_that_waits(served):
    async def leave():
        feed = Feed(served.llm, Metrics("m"))
        before = asyncio.all_tasks()
        for _ in range(3):
            events = await feed.events(None, 60.0)
            await anext(events)
            waiting = asyncio.ensure_future(anext(events))
            await asyncio.sleep(0.05)
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
            await events.aclose()
        await asyncio.sleep(0)
        return asyncio.all_tasks() - before

    assert served.run(leave(), timeout_s=10) == set()


def test_its_head_alone_has_no_body_and_takes_no_place(served):
    with httpx.Client(base_url=served.url, timeout=10, limits=httpx.Limits(max_connections=1)) as http:
        for _ in range(MAX_WATCHERS + 1):
            head = http.head("/v1/kv_map")
            assert (head.status_code, head.headers["content-type"][:17]) == (200, "text/event-stream")
        assert http.get("/version").status_code == 200


def test_a_bad_interval_is_refused(served):
    for interval in ("0.01", "100", "often"):
        answer = httpx.get(f"{served.url}/v1/kv_map", params={"interval_s": interval})
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "interval_s"


@pytest.fixture(scope="module")
def two(serving, tmp_path_factory):
    """A server with two tenants and an admin."""
    path = tmp_path_factory.mktemp("tenants") / "tenants.json"
    tenants = {name: {"api_keys": [f"sk-{name}"]} for name in ("blue", "green")}
    path.write_text(json.dumps({"admin_keys": ["sk-admin"], "tenants": tenants}))
    with serving(tenants=path, max_model_len=1024, max_num_seqs=4, kv_memory="64MiB") as server:
        yield server


def test_a_tenant_sees_its_own_names_only(two):
    pin = {
        "name": "greens-pin",
        "prompt": "A secret text of green's, which nobody else must learn of at all, ever. " * 2,
    }
    headers = {"Authorization": "Bearer sk-green"}
    assert httpx.post(f"{two.url}/v1/pins", json=pin, headers=headers, timeout=30).status_code == 200
    with generating(two.url, "sk-green", cache_salt="greens-salt") as greens, generating(two.url, "sk-blue") as blues:
        with watching(two.url, "sk-blue") as events:
            seen = next(events)
        text = json.dumps(seen)
        for secret in ("green", greens, "greens-pin", "greens-salt"):
            assert secret not in text
        assert [table["name"] for table in seen["tables"]] == [blues]
        assert list(seen["stats"]["tenants"]) == ["blue"]
        others = cells_of(seen)[:, -2]
        (own,) = map(int, seen["owners"])
        assert set(others.tolist()) == {0, own, OTHERS}
        with watching(two.url, "sk-admin") as events:
            everything = next(events)
        assert {table["name"] for table in everything["tables"]} == {"greens-pin", greens, blues}
        assert set(everything["owners"].values()) >= {"blue", "green"}
        with watching(two.url, "sk-green", cache_salt="greens-salt") as events:
            assert [table["name"] for table in next(events)["tables"]] == [greens]
    httpx.delete(f"{two.url}/v1/pins/greens-pin", headers=headers)


def test_it_needs_a_key_where_the_api_does(two):
    answer = httpx.get(f"{two.url}/v1/kv_map")
    assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")
    assert httpx.get(f"{two.url}/").status_code == 200


def test_a_tenant_cannot_take_all_places(two):
    def status(key):
        with httpx.stream("GET", f"{two.url}/v1/kv_map", headers={"Authorization": f"Bearer {key}"}) as answer:
            refused = "" if answer.status_code == 200 else answer.read().decode()
            return answer.status_code, refused

    with contextlib.ExitStack() as stack:
        streams = [stack.enter_context(watching(two.url, "sk-blue")) for _ in range(MAX_WATCHERS_PER_TENANT)]
        assert all(next(events)["tables"] == [] for events in streams)
        code, refusal = status("sk-blue")
        assert code == 503
        assert "'blue' watches 4 times, and 4 are allowed" in refusal
        assert status("sk-green")[0] == 200
    deadline = time.monotonic() + 30
    while (code := status("sk-blue")[0]) != 200 and time.monotonic() < deadline:
        time.sleep(0.02)
    assert code == 200, "a client that has gone keeps its place"


def test_the_page_has_strict_headers_and_no_other_files(served):
    page = httpx.get(f"{served.url}/")
    policy = page.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert "frame-ancestors 'none'" in policy
    assert (page.headers["x-content-type-options"], page.headers["referrer-policy"]) == ("nosniff", "no-referrer")
    again = httpx.get(f"{served.url}/", headers={"If-None-Match": page.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    for name in ("../app.py", "%2e%2e%2fapp.py", "nothing.js", "__init__.py"):
        assert httpx.get(f"{served.url}/page/{name}").status_code == 404
