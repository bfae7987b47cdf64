"""The application behind another server's proxies keeps the log, the counts and the tenants file as by itself."""

import asyncio
import json
import logging

import httpx

from pagemill import AsyncLLM
from pagemill.server.access.api_keys import ApiKeys
from pagemill.server.access.server_access import ServerAccess
from pagemill.server.app import create_app
from pagemill.server.lifecycle import reload
from pagemill.server.proxied import stand_behind_proxies
from pagemill.tenant_limits import read_tenants_file

MODEL = "smollm2-135m"
KEY, OTHER = "sk-first-key-of-ada", "sk-second-key-of-ada"


def write(path, key):
    path.write_text(json.dumps({"tenants": {"ada": {"api_keys": [key]}}}))


async def asked(path, caplog):
    caplog.set_level(logging.INFO, "pagemill.access")
    file, said = read_tenants_file(path), []
    keys = ApiKeys(file, ServerAccess(), on_loopback=False)
    async with AsyncLLM(MODEL, kv_memory="16MiB", max_num_seqs=4, tenants=file.limits) as llm:
        app = create_app(llm, MODEL, keys)
        stand_behind_proxies(app, llm, keys, file, said.append)
        transport = httpx.ASGITransport(app, client=("10.0.0.9", 1))
        client = httpx.AsyncClient(transport=transport, base_url="http://x")
        async with app.router.lifespan_context(app), client as http:
            await llm.ready()

            async def models(key):
                return await http.get("/v1/models", headers={"Authorization": f"Bearer {key}", "X-Request-Id": "mine"})

            first = await models(KEY)
            write(path, OTHER)
            for _ in range(200):
                if said:
                    break
                await asyncio.sleep(0.05)
            answers = [first, await models(KEY), await models(OTHER)]
            metrics = (await http.get("/metrics", headers={"Authorization": f"Bearer {OTHER}"})).text
    return answers, metrics, [record.fields for record in caplog.records if record.message == "request"], said


def test_requests_are_named_logged_and_counted_and_keys_follow_the_file(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(reload, "LOOK_S", 0.05)
    path = tmp_path / "tenants.json"
    write(path, KEY)
    answers, metrics, lines, said = asyncio.run(asked(path, caplog))
    assert [answer.status_code for answer in answers] == [200, 401, 200]
    assert not any("x-request-id" in answer.headers for answer in answers), "the proxy tells it"
    assert [(line["request_id"], line["path"], line["status"]) for line in lines[:3]] == [
        ("mine", "/v1/models", status) for status in (200, 401, 200)
    ]
    assert 'path="/v1/models",status="200"} 2.0' in metrics
    assert "pagemill:event_loop_lag_seconds_count" in metrics
    assert "was read again" in said[0]
