"""Wrong keys: an address that goes on guessing waits, and so little is kept of each that none can fill the memory."""

import asyncio
from types import SimpleNamespace

import httpx
import pytest

from pagemill.errors import RateLimitError
from pagemill.server.access import failed_keys
from pagemill.server.access.api_keys import ApiKeys
from pagemill.server.access.failed_keys import FailedKeys
from pagemill.server.access.limits import ServerLimits
from pagemill.server.access.server_access import ServerAccess
from pagemill.server.app import create_app


@pytest.fixture
def clock(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(failed_keys, "time", SimpleNamespace(monotonic=lambda: now[0]))
    return now


def waits(failed, address):
    try:
        failed.check(address)
    except RateLimitError as error:
        return error.retry_after_s


def test_an_address_waits_for_the_rest_of_its_minute(clock):
    failed = FailedKeys(2)
    failed.note("a")
    clock[0] = 20
    assert waits(failed, "a") is None
    failed.note("a")
    assert (waits(failed, "a"), waits(failed, "b")) == (40, None)
    clock[0] = 60.1
    assert waits(failed, "a") is None
    failed.note("a")
    assert waits(failed, "a") is None


def test_addresses_are_remembered_up_to_a_number(clock, monkeypatch):
    monkeypatch.setattr(failed_keys, "MAX_ADDRESSES", 3)
    failed = FailedKeys(1)
    for address in "abcd":
        failed.note(address)
    assert [address for address in "abcd" if waits(failed, address)] == ["b", "c", "d"]


def test_over_http_a_right_key_does_not_help_and_health_is_open(clock, caplog):
    keys = ApiKeys(None, ServerAccess(api_key=["sk-a"]))
    llm = SimpleNamespace(facts=None, is_ready=False, model="m", rates=lambda tenant: {}, on_request_end=[])
    app = create_app(llm, "m", keys, ServerLimits(max_failed_keys=3))

    async def ask(client, key=None, path="/v1/models"):
        transport = httpx.ASGITransport(app, client=(client, 9))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
            return await http.get(path, headers={} if key is None else {"Authorization": f"Bearer {key}"})

    async def attack():
        without = [(await ask("10.0.0.1")).status_code for _ in range(5)]
        wrong = [(await ask("10.0.0.1", f"sk-{guess}")).status_code for guess in range(5)]
        right, version = await ask("10.0.0.1", "sk-a"), await ask("10.0.0.1", path="/version")
        return without, wrong, right, version, await ask("10.0.0.2", "sk-a"), await ask("::ffff:10.0.0.1", "sk-a")

    without, wrong, right, version, other, same = asyncio.run(attack())
    assert without == [401] * 5
    assert wrong == [401] * 3 + [429] * 2
    refused = [record.fields for record in caplog.records if record.message == "key refused"]
    assert [(one["client"], one["path"]) for one in refused] == [("10.0.0.1", "/v1/models")] * 3
    assert "sk-" not in str(refused)
    assert (right.status_code, version.status_code, other.status_code, same.status_code) == (429, 200, 200, 429)
    assert right.headers["retry-after"] == "60"
    assert right.json()["error"]["code"] == "rate_limit_exceeded"
    assert "--max-failed-keys" in right.json()["error"]["message"]
