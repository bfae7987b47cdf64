"""A client whose tenant has too many waiting is told when to come again, by how fast the last requests ended."""

import asyncio

import httpx

from pagemill import TenantLimits
from pagemill.server.app import create_app

BODY = {"prompt": "Once", "max_tokens": 1}


def test_retry_after_is_the_time_between_ends(served):
    async def retry_after(http):
        await served.llm.set_tenant("default", TenantLimits(max_waiting=0))
        refused = await http.post("/v1/completions", json=BODY)
        await served.llm.set_tenant("default", TenantLimits())
        assert refused.status_code == 429
        assert refused.json()["error"]["code"] == "rate_limit_exceeded"
        return int(refused.headers["retry-after"])

    async def asked():
        transport = httpx.ASGITransport(create_app(served.llm, "m"))
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1", timeout=60) as http:
            before = await retry_after(http)
            for _ in range(3):
                assert (await http.post("/v1/completions", json=BODY)).status_code == 200
                await asyncio.sleep(1.2)
            return before, await retry_after(http)

    before, after = served.run(asked())
    assert before == 1  # nothing has ended yet, and what was refused is no end
    assert 2 <= after <= 20
