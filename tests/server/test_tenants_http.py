"""Tenants over HTTP: keys decide whose a request is, and one tenant's flood leaves another its answers."""

from __future__ import annotations

import concurrent.futures
import hashlib
import json
import logging
import re
import time

import httpx
import openai
import pytest

from pagemill.errors import ConfigError
from pagemill.tenant_limits import key_digest, read_tenants_file

MODEL = "smollm2-135m"
FILE = {
    "admin_keys": ["sk-admin"],
    "tenants": {
        "calm": {"api_keys": ["sha256:" + hashlib.sha256(b"sk-calm").hexdigest()], "guaranteed_blocks": "50%"},
        "wild": {"api_keys": ["sk-wild", "sk-wild-2"], "max_waiting": 30},
    },
}
ADMIN = {"Authorization": "Bearer sk-admin"}
PROMPTS = [f"{number}. The history of paging begins with the Atlas computer, which" for number in range(3)]
ENDLESS = {"prompt": PROMPTS[0], "max_tokens": 240, "ignore_eos": True}


@pytest.fixture(scope="module")
def server(serving, tmp_path_factory):
    path = tmp_path_factory.mktemp("tenants") / "tenants.json"
    path.write_text(json.dumps(FILE))
    with serving(tenants=path, max_model_len=512, max_num_seqs=4, kv_memory="24MiB", kv_host_memory="8MiB") as server:
        yield server


def client(server, key: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0, timeout=120)


def complete(server, key: str, prompt: str, max_tokens: int = 12) -> str:
    with client(server, key) as caller:
        answer = caller.completions.create(model=MODEL, prompt=prompt, max_tokens=max_tokens, temperature=0)
        return answer.choices[0].text


def test_without_a_known_key_nothing_is_served(server):
    for key in ("none", "sk-cal", "sha256:" + hashlib.sha256(b"sk-calm").hexdigest()):
        with pytest.raises(openai.AuthenticationError) as caught, client(server, key) as caller:
            caller.models.list()
        assert caught.value.status_code == 401
        assert caught.value.body["code"] == "invalid_api_key"
    assert httpx.post(f"{server.url}/v1/chat/completions", json={}).status_code == 401
    assert httpx.get(f"{server.url}/health").json() == {"status": "ok"}


def test_beside_a_flood_a_tenant_gets_its_own_answers(server):
    alone = [complete(server, "sk-calm", prompt) for prompt in PROMPTS]
    with concurrent.futures.ThreadPoolExecutor(24) as threads:
        flood = [
            threads.submit(complete, server, "sk-wild", f"Flood {number}, flood, flood. {PROMPTS[0]}", 40)
            for number in range(24)
        ]
        beside = [complete(server, "sk-calm", prompt) for prompt in PROMPTS]
        behind = sum(not one.done() for one in flood)
        assert all(one.result() for one in flood)
    assert beside == alone
    assert behind > 0, "the flood had ended before the others were served"
    figures = httpx.get(f"{server.url}/v1/tenants", headers=ADMIN).json()
    assert figures["calm"]["preemptions"] == 0
    assert figures["calm"]["prefix_hit_tokens"] > 0
    assert figures["wild"]["blocks_cached"] > 0
    metrics = httpx.get(f"{server.url}/metrics", headers=ADMIN).text
    assert 'pagemill:tenant_guaranteed_blocks{model_name="smollm2-135m",tenant="calm"} ' in metrics
    assert 'pagemill:tenant_kv_blocks{model_name="smollm2-135m",state="cached",tenant="wild"} ' in metrics


def test_an_admin_changes_limits_and_others_do_not(server):
    for key in ("sk-calm", "sk-wild"):
        refused = httpx.get(f"{server.url}/v1/tenants", headers={"Authorization": f"Bearer {key}"})
        assert refused.status_code == 403
        assert refused.json()["error"]["type"] == "permission_error"
        body, headers = {"kv_memory": "used"}, {"Authorization": f"Bearer {key}"}
        assert httpx.post(f"{server.url}/v1/kv_memory", json=body, headers=headers).status_code == 403
    with httpx.Client(base_url=f"{server.url}/v1/tenants", headers={"Authorization": "Bearer sk-admin"}) as admin:
        assert admin.get(f"{server.url}/v1/tenants").json()["calm"]["limits"]["max_running"] == "75%"
        limits = admin.put("/wild", json={"max_waiting": 0, "max_sessions": None}).json()["limits"]
        safe = [limits[name] for name in ("max_running", "max_pinned_blocks", "guaranteed_blocks")]
        assert (limits["max_waiting"], limits["max_sessions"], *safe) == (0, None, "75%", "33.33%", "25%")
        with pytest.raises(openai.RateLimitError) as caught:
            complete(server, "sk-wild-2", "Hello")
        assert 1 <= int(caught.value.response.headers["retry-after"]) <= 60
        assert "max_waiting is 0" in caught.value.body["message"]
        assert caught.value.param == "tenant"
        assert admin.put("/wild", json={"max_running": 1, "max_blocks_per_request": 3}).status_code == 200
        with client(server, "sk-wild") as caller:
            for param, limit, ask in (
                ("n", "max_running lets 1", {"n": 2, "max_tokens": 1}),
                ("max_tokens", "max_blocks_per_request", {"max_tokens": 99}),
            ):
                with pytest.raises(openai.BadRequestError, match=limit) as too_large:
                    caller.completions.create(model=MODEL, prompt="Hello", **ask)
                assert too_large.value.param == param
                assert too_large.value.code is None
        for limits, max_tokens, n in (({"max_blocks_per_request": 3}, None, 4), ({"max_blocks": 2}, 99, 1)):
            assert admin.put("/wild", json=limits).status_code == 200
            with client(server, "sk-wild") as caller, pytest.raises(openai.BadRequestError) as over_quota:
                caller.completions.create(model=MODEL, prompt="Hello", max_tokens=max_tokens, n=n)
            assert f"{next(iter(limits))} " in over_quota.value.body["message"]
            assert (over_quota.value.code, over_quota.value.param) == (None, "max_tokens")
        assert admin.put("/wild", json={}).status_code == 200
        with client(server, "sk-wild") as caller, pytest.raises(openai.BadRequestError, match="max_running lets 3"):
            caller.completions.create(model=MODEL, prompt="Hello", n=4)
        refused = admin.put("/wild", json={"guaranteed_blocks": "60%"})
        assert refused.status_code == 400
        assert "blocks would be guaranteed" in refused.json()["error"]["message"]
        later = admin.put("/later", json={"weight": 2}).json()["limits"]
        assert (later["guaranteed_blocks"], later["max_running"], later["weight"]) == (0, "75%", 2)
        heavy = admin.put("/later", json={"weight": 1e308})
        assert (heavy.status_code, "from 0.000001 to 1000000" in heavy.text) == (400, True)
        assert "no limit 'max_block'" in admin.put("/wild", json={"max_block": 3}).json()["error"]["message"]
    assert complete(server, "sk-wild", "Hello", 2)


def api(server, key: str) -> httpx.Client:
    return httpx.Client(base_url=f"{server.url}/v1", headers={"Authorization": f"Bearer {key}"}, timeout=120)


def test_a_session_is_its_tenants(server):
    body = {"prompt": PROMPTS[0], "session_id": "mine", "max_tokens": 6, "temperature": 0}
    with api(server, "sk-calm") as calm, api(server, "sk-wild") as wild, api(server, "sk-wild-2") as wild_too:
        first = calm.post("/completions", json=body).json()["usage"]["total_tokens"]
        for answer in (wild.get("/sessions/mine"), wild.delete("/sessions/mine"),
                       wild.post("/sessions/mine/fork", json={"session_id": "theirs"})):  # fmt: skip
            assert answer.status_code == 404
        assert wild.get("/sessions").json()["data"] == []
        wild.post("/completions", json=body | {"prompt": "Another beginning:"})
        wild_too.post("/completions", json=body | {"prompt": " and more"})
        assert wild.get("/sessions/mine").json()["num_turns"] == 2
        assert calm.get("/sessions/mine").json()["num_tokens"] == first
        assert calm.post("/sessions/mine/fork", json={"session_id": "yours"}).json()["num_tokens"] == first
        assert wild.delete("/sessions/mine").status_code == 200
        assert [card["id"] for card in calm.get("/sessions").json()["data"]] == ["yours", "mine"]
        for name in ("mine", "yours"):
            assert calm.delete(f"/sessions/{name}").status_code == 200
    assert httpx.get(f"{server.url}/v1/sessions").status_code == 401


def test_a_pin_is_its_tenants_and_charged_to_it(server):
    prompt = "A prefix that its owner pins, and nobody else can find. " * 8
    with api(server, "sk-calm") as calm, api(server, "sk-wild") as wild, api(server, "sk-admin") as admin:
        refused = wild.post("/pins", json={"name": "p", "prompt": prompt})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "prompt")
        assert "over its max_pinned_blocks, 5; unpin something" in refused.json()["error"]["message"]
        admin.put("/tenants/wild", json={"max_waiting": 30, "max_pinned_blocks": None})
        before = admin.get("/tenants").json()["wild"]["blocks_active"]
        card = wild.post("/pins", json={"name": "p", "prompt": prompt}).json()
        assert wild.post("/pins", json={"name": "p", "prompt": prompt, "tenant": "calm"}).status_code == 400
        assert admin.get("/tenants").json()["wild"]["blocks_active"] == before + card["num_blocks"]
        assert calm.get("/pins").json()["data"] == admin.get("/pins").json()["data"] == []
        assert calm.delete("/pins/p").status_code == 404
        assert wild.get("/pins").json()["data"] == [card]
        ask = {"prompt": prompt + "x", "max_tokens": 1}
        hits = [one.post("/completions", json=ask).json()["usage"]["prompt_tokens_details"] for one in (calm, wild)]
        assert [hit["cached_tokens"] for hit in hits] == [0, card["num_tokens"]]
        taken = {"guaranteed_blocks": "98%", "max_waiting": 30}
        assert "of which pins hold" in admin.put("/tenants/calm", json=taken).json()["error"]["message"]
        assert wild.delete("/pins/p").status_code == 200


def test_an_admin_finds_and_removes_what_lies_under_a_salt_that_nobody_knows(server, caplog):
    caplog.set_level(logging.INFO, "pagemill.audit")
    salt = {"cache_salt": "forgotten"}
    talk = {"prompt": PROMPTS[0], "session_id": "lost", "max_tokens": 1, **salt}
    with api(server, "sk-calm") as calm, api(server, "sk-wild") as wild, api(server, "sk-admin") as admin:
        assert calm.post("/completions", json=talk).status_code == 200
        assert calm.post("/pins", json={"name": "lost", "prompt": PROMPTS[0] * 2, **salt}).status_code == 200
        for kind, key in (("sessions", "id"), ("pins", "name")):
            assert calm.get(f"/{kind}").json()["data"] == []
            (mine,) = calm.get(f"/{kind}", params=salt).json()["data"]
            (found,) = admin.get(f"/{kind}", params={"all": True}).json()["data"]
            assert found == {**mine, "tenant": "calm", **salt}
            assert mine[key] == "lost"
            assert admin.get(f"/{kind}", params={"all": True, "tenant": "calm"}).json()["data"] == [found]
            assert admin.get(f"/{kind}", params={"all": True, "tenant": "wild"}).json()["data"] == []
            assert admin.get(f"/{kind}", params={"tenant": "calm", **salt}).json()["data"] == [mine]
            both = admin.get(f"/{kind}", params={"all": True, **salt})
            assert (both.status_code, both.json()["error"]["param"]) == (400, "cache_salt")
            for caller, asked in ((calm, {"all": True}), (wild, {"tenant": "calm", **salt})):
                refused = caller.get(f"/{kind}", params=asked)
                assert (refused.status_code, refused.json()["error"]["type"]) == (403, "permission_error")
            assert wild.delete(f"/{kind}/lost", params={"tenant": "calm", **salt}).status_code == 403
            assert admin.delete(f"/{kind}/lost", params={"tenant": "calm"}).status_code == 404
            assert admin.delete(f"/{kind}/lost", params={"tenant": "calm", **salt}).status_code == 200
            assert admin.get(f"/{kind}", params={"all": True}).json()["data"] == []
    lines = [(record.message, record.fields) for record in caplog.records if "removed" in record.message]
    assert [line for line, _ in lines] == ["session removed", "pin removed"]
    assert {(found["tenant"], found["name"]) for _, found in lines} == {("calm", "lost")}
    assert "forgotten" not in str(lines)


def test_a_salt_is_at_most_as_long_wherever_it_is_given(server):
    long, body = "x" * 1025, {"prompt": PROMPTS[0], "max_tokens": 1}
    with api(server, "sk-calm") as calm:
        answers = [
            *(
                calm.post("/completions", json={**body, "cache_salt": long, **more})
                for more in ({}, {"session_id": "s"})
            ),
            calm.post("/pins", json={"name": "p", "prompt": PROMPTS[0], "cache_salt": long}),
            *(
                calm.get(path, params={"cache_salt": long})
                for path in ("/sessions", "/sessions/s", "/pins", "/requests")
            ),
            *(calm.delete(path, params={"cache_salt": long}) for path in ("/sessions/s", "/pins/p")),
            calm.post("/sessions/s/fork", json={"session_id": "t"}, params={"cache_salt": long}),
        ]
    for answer in answers:
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "cache_salt")
        assert "has 1025 characters; give at most 1024" in answer.json()["error"]["message"]


def test_a_session_has_a_limit_of_its_own(server):
    chat = {"messages": [{"role": "user", "content": PROMPTS[0]}], "temperature": 0, "ignore_eos": True}
    talk = {**chat, "session_id": "long"}
    with api(server, "sk-wild") as wild, api(server, "sk-admin") as admin:
        admin.put("/tenants/wild", json={"max_blocks_per_session": 5})
        assert wild.post("/chat/completions", json=talk).json()["usage"]["total_tokens"] == 5 * 16 + 1
        refused = wild.post("/chat/completions", json={**talk, "max_tokens": 2})
        assert refused.status_code == 400
        assert "max_blocks_per_session of tenant 'wild' is 5" in refused.json()["error"]["message"]
        assert wild.get("/sessions/long").json()["num_tokens"] == 5 * 16 + 1
        alone = wild.post("/chat/completions", json={**chat, "max_tokens": 60})
        assert alone.json()["usage"]["completion_tokens"] == 60
        admin.put("/tenants/wild", json={"max_waiting": 30})
        wild.delete("/sessions/long")


def test_a_tenant_keeps_no_more_sessions_than_it_may(server):
    talk = {"messages": [{"role": "user", "content": PROMPTS[0]}], "max_tokens": 1}
    with api(server, "sk-wild") as wild, api(server, "sk-calm") as calm, api(server, "sk-admin") as admin:
        limits = admin.put("/tenants/wild", json={"max_sessions": 1}).json()["limits"]
        assert limits["max_sessions"] == 1
        assert wild.post("/chat/completions", json={**talk, "session_id": "one"}).status_code == 200
        refused = wild.post("/chat/completions", json={**talk, "session_id": "two"})
        assert refused.status_code == 400
        assert "max_sessions of tenant 'wild' is 1" in refused.json()["error"]["message"]
        assert calm.post("/chat/completions", json={**talk, "session_id": "two"}).status_code == 200
        admin.put("/tenants/wild", json={"max_waiting": 30})
        assert wild.post("/chat/completions", json={**talk, "session_id": "two"}).status_code == 200
        for owner, name in ((wild, "one"), (wild, "two"), (calm, "two")):
            owner.delete(f"/sessions/{name}")


def test_a_response_is_its_tenants_and_gives_way_to_its_tenants_alone(server):
    asked = {"input": PROMPTS[0], "max_output_tokens": 2}
    with api(server, "sk-wild") as wild, api(server, "sk-calm") as calm, api(server, "sk-admin") as admin:
        other = calm.post("/responses", json=asked).json()["id"]
        for answer in (wild.get(f"/responses/{other}"), wild.delete(f"/responses/{other}"),
                       wild.post("/responses", json={**asked, "previous_response_id": other})):  # fmt: skip
            assert answer.status_code == 404
        admin.put("/tenants/wild", json={"max_sessions": 1})
        older, newer = (wild.post("/responses", json=asked).json()["id"] for _ in range(2))
        assert [wild.get(f"/responses/{name}").status_code for name in (older, newer)] == [404, 200]
        admin.put("/tenants/wild", json={"max_waiting": 30})
        assert wild.delete(f"/responses/{newer}").status_code == calm.delete(f"/responses/{other}").status_code == 200


def test_an_idle_engine_gives_back_what_its_time_has_come_for(server):
    """Whoever asks for figures wakes the engine, but only after it should have acted."""
    with api(server, "sk-wild") as wild, api(server, "sk-admin") as admin:
        limits = {"idle_timeout_s": 0.4, "max_waiting": 30}
        assert admin.put("/tenants/wild", json=limits).json()["limits"]["idle_timeout_s"] == 0.4
        complete(server, "sk-wild", "Something of which nobody asks again, but which is longer than one block", 4)
        time.sleep(1)
        figures = admin.get("/tenants").json()["wild"]
        assert figures["blocks_cached"] == 0
        metrics = httpx.get(f"{server.url}/metrics", headers=ADMIN).text
        (below,) = re.findall(r'tenant_kv_tier_blocks\{[^}]*tenant="wild",tier="host"\} (\d+)', metrics)
        assert int(below) == figures["tier_blocks"]["host"] > 0, "they went down a tier"
        assert admin.put("/tenants/wild", json={"max_waiting": 30}).status_code == 200
        card = wild.post("/pins", json={"name": "short", "prompt": "A prefix. " * 20, "expires_s": 0.5}).json()
        time.sleep(1)
        figures = admin.get("/tenants").json()["wild"]
        assert (figures["blocks_active"], figures["blocks_cached"]) == (0, card["num_blocks"])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "Expecting"),
        ('{"acme": {}}', 'must be an object with "tenants"'),
        ('{"tenants": {"a": {"api_keys": ["k"]}, "b": {"api_keys": ["k"]}}}', "have the same key"),
        ('{"admin_keys": ["k"], "tenants": {"a": {"api_keys": ["k"]}}}', "admin_keys and tenant 'a' have the same key"),
        ('{"tenants": {"a": {"api_keys": "k"}}}', "must be a list of texts"),
        ('{"tenants": {"a": {"api_keys": ["k y"]}}}', "printable ASCII characters without spaces"),
        ('{"tenants": {"a": {"api_keys": ["sha256:12"]}}}', "64 hexadecimal digits"),
        ('{"tenants": {"a": {"max_blocks": "120%"}}}', "max_blocks is '120%'"),
        ('{"tenants": {"a": {"max_running": 0}}}', "max_running is 0"),
        ('{"tenants": {"a": {"weight": -1}}}', "weight is -1"),
        ('{"tenants": {"a": {"weight": 1e-300}}}', "weight is 1e-300; it must be a number from 0.000001 to 1000000"),
        ('{"tenants": {"a": {"idle_timeout_s": 0}}}', "idle_timeout_s is 0"),
        ('{"tenants": {"a": {"max_block": 1}}}', "has no limit 'max_block'; did you mean 'max_blocks'\\?"),
        ('{"tenants": {"a": {"api_key": ["x"]}}}', "did you mean 'api_keys'\\?"),
        ('{"tenants": {"a": 1}}', "must be an object of limits"),
    ],
)
def test_a_wrong_tenants_file_is_refused_by_name(tmp_path, content, message):
    path = tmp_path / "tenants.json"
    path.write_text(content)
    with pytest.raises(ConfigError, match=rf"tenants\.json'.*{message}"):
        read_tenants_file(path)


def test_keys_are_kept_as_digests(tmp_path):
    path = tmp_path / "tenants.json"
    path.write_text(json.dumps(FILE))
    file = read_tenants_file(path)
    assert file.keys == {key_digest("sk-calm"): "calm", key_digest("sk-wild"): "wild", key_digest("sk-wild-2"): "wild"}
    assert file.admin_keys == [key_digest("sk-admin")]


def test_a_running_request_is_its_tenants(server):
    calm, wild = api(server, "sk-calm"), api(server, "sk-wild")
    with calm, wild, calm.stream("POST", "/completions", json={**ENDLESS, "stream": True}) as response:
        lines = response.iter_lines()
        name = json.loads(next(lines).removeprefix("data: "))["id"]
        assert [card["id"] for card in calm.get("/requests").json()["data"]] == [name]
        assert wild.get("/requests").json()["data"] == []
        refused = wild.post("/completions", json={"fork_of": name})
        assert (refused.status_code, refused.json()["error"]["type"]) == (404, "not_found_error")
        assert calm.post("/completions", json={"fork_of": name, "max_tokens": 1}).status_code == 200
    assert httpx.get(f"{server.url}/v1/requests").status_code == 401


def test_a_minute_allows_so_many_requests_and_tokens(server):
    limits = {"requests_per_minute": 3, "tokens_per_minute": 1000, "max_waiting": 30}
    with api(server, "sk-wild") as wild, api(server, "sk-admin") as admin:
        assert admin.put("/tenants/wild", json=limits).status_code == 200
        body = {"prompt": "Hello there", "max_tokens": 5, "ignore_eos": True}
        first = wild.post("/completions", json=body)
        headers = {name: value for name, value in first.headers.items() if name.startswith("x-ratelimit")}
        used = first.json()["usage"]["total_tokens"]
        assert headers["x-ratelimit-limit-requests"] == "3"
        assert headers["x-ratelimit-remaining-requests"] == "2"
        assert headers["x-ratelimit-limit-tokens"] == "1000"
        assert 1000 - used <= int(headers["x-ratelimit-remaining-tokens"]) <= 1000
        assert re.fullmatch(r"\d+(s|ms)", headers["x-ratelimit-reset-requests"])
        with wild.stream("POST", "/completions", json={**body, "stream": True}) as stream:
            assert stream.headers["x-ratelimit-remaining-requests"] == "1"
            stream.read()
        texts = ["one", "two", "three"]
        for path, param, how in (("/completions", "prompt", {"max_tokens": 1}), ("/embeddings", "input", {})):
            refused = wild.post(path, json={**how, param: texts})
            assert (refused.status_code, refused.json()["error"]["code"]) == (429, "rate_limit_exceeded")
            assert 20 < int(refused.headers["retry-after"]) <= 40
            assert refused.headers["x-ratelimit-remaining-requests"] == "1"
            assert "requests_per_minute, and this has 3 prompts" in refused.json()["error"]["message"]
            never = wild.post(path, json={**how, param: [*texts, "four"]})
            assert (never.status_code, never.json()["error"]["param"]) == (400, param)
            assert "send at most 3 at a time" in never.json()["error"]["message"]
        assert admin.put("/tenants/wild", json={"max_waiting": 30, "tokens_per_minute": 10}).status_code == 200
        assert wild.post("/completions", json={**body, "max_tokens": 20}).status_code == 200
        refused = wild.post("/chat/completions", json={"messages": [{"role": "user", "content": "Hi"}]})
        assert "the 10 of its tokens_per_minute" in refused.json()["error"]["message"]
        assert admin.put("/tenants/wild", json={"max_waiting": 30}).status_code == 200
        assert "x-ratelimit-limit-requests" not in wild.post("/completions", json=body).headers


def test_the_prompts_of_a_call_are_counted_together(server):
    ways = (("/completions", "prompt", {"max_tokens": 1}, 11), ("/embeddings", "input", {}, 12))
    with api(server, "sk-wild") as wild, api(server, "sk-admin") as admin:
        for path, name, how, tokens in ways:
            limits = {"requests_per_minute": tokens, "tokens_per_minute": tokens, "max_waiting": 30}
            assert admin.put("/tenants/wild", json=limits).status_code == 200
            taken = wild.post(path, json={**how, name: ["more tokens than a minute has " * 9, "two", "three"]})
            assert (taken.status_code, taken.headers["x-ratelimit-remaining-requests"]) == (200, str(tokens - 3))
        assert admin.put("/tenants/wild", json={"requests_per_minute": 5, "max_waiting": 30}).status_code == 200
        wrong = wild.post("/completions", json={"prompt": ["one", "", "three"], "max_tokens": 1})
        assert (wrong.status_code, wrong.headers["x-ratelimit-remaining-requests"]) == (400, "4")
        assert admin.put("/tenants/wild", json={"max_waiting": 30}).status_code == 200


def test_more_prompts_than_may_run_and_wait_are_refused_for_good(server):
    limits = {"max_running": 1, "max_waiting": 2, "requests_per_minute": 100, "tokens_per_minute": 10_000}
    body = {"prompt": ["one", "two", "three"], "max_tokens": 1}
    left = [f"x-ratelimit-remaining-{what}" for what in ("requests", "tokens")]
    with api(server, "sk-wild") as wild, api(server, "sk-admin") as admin:
        assert admin.put("/tenants/wild", json=limits).status_code == 200
        never = wild.post("/completions", json={**body, "prompt": PROMPTS * 3})
        assert (never.status_code, never.json()["error"]["param"]) == (400, "prompt")
        words = "9 prompts, and tenant 'wild' may have 1 of them running and 2 waiting (max_waiting); send at most 3 at"
        assert words in never.json()["error"]["message"]
        assert [never.headers[name] for name in left] == ["100", "10000"]
        assert wild.post("/completions", json=body).status_code == 200
        inputs = wild.post("/embeddings", json={"input": PROMPTS * 3})
        assert inputs.status_code == 200
        assert 88 <= int(inputs.headers[left[0]]) < 95
        with wild.stream("POST", "/completions", json={**ENDLESS, "stream": True}) as stream:
            before = [int(stream.headers[name]) for name in left]
            lines = stream.iter_lines()
            next(lines)
            later = wild.post("/completions", json=body)
            assert (later.status_code, later.json()["error"]["code"]) == (429, "rate_limit_exceeded")
            assert all(int(later.headers[name]) >= least for name, least in zip(left, before, strict=True))
        assert admin.put("/tenants/wild", json={**limits, "max_running": 4, "max_waiting": 1}).status_code == 200
        pairs = wild.post("/completions", json={**body, "prompt": PROMPTS + PROMPTS[:1], "n": 2, "temperature": 1})
        assert "2 of them running and 1 waiting (max_waiting); send at most 3" in pairs.json()["error"]["message"]
        assert wild.post("/completions", json={**body, "n": 2}).status_code == 200
        assert admin.put("/tenants/wild", json={"max_waiting": 0, "requests_per_minute": 5}).status_code == 200
        for asked in (body, {**body, "prompt": "one"}):
            refused = wild.post("/completions", json=asked)
            assert (refused.status_code, refused.headers[left[0]]) == (429, "5")
        assert admin.put("/tenants/wild", json={"max_waiting": 30}).status_code == 200
