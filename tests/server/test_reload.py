"""The tenants file is read again while the server runs: keys and limits change, a broken file changes nothing."""

import asyncio
import dataclasses
import itertools
import json
import os
import signal
import time
from types import SimpleNamespace

import httpx
import pytest
from starlette.datastructures import Headers

from pagemill.errors import AuthenticationError, ConfigError, EngineRestartingError
from pagemill.server.access.api_keys import ApiKeys
from pagemill.server.access.server_access import ServerAccess
from pagemill.server.lifecycle import reload as reloading
from pagemill.server.lifecycle.reload import TenantsReload
from pagemill.tenant_limits import TenantLimits, key_digest, read_tenants_file
from waiting import wait_until

NO_LIMITS = {field.name: field.default for field in dataclasses.fields(TenantLimits)}


class Reloaded:
    """A tenants file, what an engine was told of it, and what was said. `share`: guarantees that fit in all."""

    def __init__(self, path, **tenants):
        self.path, self.said, self.limits, self.share, self.restarting = path, [], {}, 100, False
        self.num_asked = 0
        self.write(**tenants)
        file = read_tenants_file(path)
        self.limits.update(file.limits)
        self.keys = ApiKeys(file, ServerAccess(api_key=["sk-own"]))
        self.reload = TenantsReload(file, self.keys, SimpleNamespace(set_tenant=self.set_tenant), self.said.append)

    def write(self, **tenants):
        self.path.write_text(json.dumps({"tenants": {name: NO_LIMITS | own for name, own in tenants.items()}}))

    async def set_tenant(self, name, limits):
        self.num_asked += 1
        if self.restarting:
            raise EngineRestartingError("the engine process was killed")
        promised = {**self.limits, name: limits}
        if sum(int(str(each.guaranteed_blocks).rstrip("%")) for each in promised.values()) > self.share:
            raise ConfigError(f"too much for {name}")
        self.limits = promised

    def again(self, **tenants):
        self.write(**tenants)
        asyncio.run(self.reload.reload())


def test_limits_change_in_an_order_that_fits(tmp_path):
    reloaded = Reloaded(tmp_path / "t.json", a={"guaranteed_blocks": "75%"}, b={"guaranteed_blocks": "25%"}, c={})
    reloaded.again(b={"guaranteed_blocks": "75%"}, a={"guaranteed_blocks": "20%"}, d={"max_running": 3})
    assert reloaded.limits == {
        "a": TenantLimits(guaranteed_blocks="20%"),
        "b": TenantLimits(guaranteed_blocks="75%"),
        "c": TenantLimits(),
        "d": TenantLimits(max_running=3),
    }
    assert reloaded.said[-1].endswith("tenants: 3, keys: 0, admin keys: 0, changed: 'a', 'b', 'd', gone: 'c'")


def test_a_tenant_that_is_gone_has_no_guarantee(tmp_path):
    reloaded = Reloaded(tmp_path / "t.json", a={"guaranteed_blocks": "75%", "api_keys": ["sk-a"]})
    reloaded.again()
    assert reloaded.limits["a"].guaranteed_blocks == 0


def test_what_the_engine_refuses_is_tried_again_with_each_look_and_said_once(tmp_path, caplog):
    reloaded = Reloaded(tmp_path / "t.json", a={"guaranteed_blocks": "50%"}, b={"guaranteed_blocks": "40%"})
    refusals = [
        ("WARNING", "tenant 'b' keeps its limits: too much for b"),
        ("WARNING", "tenant 'c' keeps its limits: too much for c"),
    ]

    def warnings():
        return sorted((record.levelname, record.message) for record in caplog.records)

    wanted = {"b": {"guaranteed_blocks": "51%"}, "c": {"guaranteed_blocks": "20%"}}
    reloaded.write(a={"guaranteed_blocks": "50%"}, **wanted, d={"max_running": 3})
    for _ in range(3):
        asyncio.run(reloaded.reload.look())
    assert warnings() == refusals
    assert reloaded.limits["b"] == TenantLimits(guaranteed_blocks="40%")
    (said,) = reloaded.said
    assert said.endswith("changed: 'd', gone: none, refused: 'b', 'c'")

    asyncio.run(reloaded.reload.reload())
    assert warnings() == sorted(refusals * 2), "who asks for a reading is told what is still refused"
    assert reloaded.said[1].endswith("changed: none, gone: none, refused: 'b', 'c'")

    reloaded.share = 121  # something else has ended that kept the engine from it
    asyncio.run(reloaded.reload.look())
    assert {name: limits.guaranteed_blocks for name, limits in reloaded.limits.items()} == {
        "a": "50%", "b": "51%", "c": "20%", "d": 0,
    }  # fmt: skip
    told = f"more limits of the tenants file {str(reloaded.path)!r} are set; changed: 'b', 'c', gone: none"
    assert reloaded.said[2] == told
    asyncio.run(reloaded.reload.look())
    assert len(reloaded.said) == 3


def test_limits_that_are_set_by_hand_stay_until_the_file_changes(tmp_path):
    reloaded = Reloaded(tmp_path / "t.json", a={"guaranteed_blocks": "50%"}, b={"guaranteed_blocks": "40%"})
    reloaded.write(a={"guaranteed_blocks": "50%"}, b={"guaranteed_blocks": "60%"})
    asyncio.run(reloaded.reload.look())
    by_hand = reloaded.limits["b"] = TenantLimits(max_running=1)
    reloaded.reload.note_set("b")
    reloaded.share = 200  # the file's would be taken now
    asyncio.run(reloaded.reload.look())
    assert reloaded.limits["b"] == by_hand
    reloaded.write(a={"guaranteed_blocks": "50%"}, b={"guaranteed_blocks": "70%"})
    asyncio.run(reloaded.reload.look())
    assert reloaded.limits["b"].guaranteed_blocks == "70%"


def test_what_stays_refused_is_tried_ever_less_often(tmp_path, monkeypatch):
    reloaded, now, tries = Reloaded(tmp_path / "t.json", a={"guaranteed_blocks": "50%"}), [0.0], []
    monkeypatch.setattr(reloading, "time", SimpleNamespace(monotonic=lambda: now[0]))
    reloaded.write(a={"guaranteed_blocks": "50%"}, b={"guaranteed_blocks": "60%"})
    for _ in range(100):
        before = reloaded.num_asked
        asyncio.run(reloaded.reload.look())
        if reloaded.num_asked > before:
            tries.append(now[0])
        now[0] += reloading.LOOK_S
    assert tries[:6] == [0, 2, 4, 8, 16, 32]
    assert max(after - before for before, after in itertools.pairwise(tries)) == reloading.LONGEST_WAIT_S


def test_a_change_during_a_restart_is_taken_by_the_next_engine(tmp_path, caplog):
    reloaded = Reloaded(tmp_path / "t.json", a={"max_running": 3}, b={"max_running": 3})
    reloaded.restarting = True
    reloaded.write(a={"max_running": 2}, c={})
    for _ in range(3):
        asyncio.run(reloaded.reload.look())
    assert not caplog.records
    (said,) = reloaded.said
    assert said.endswith("changed: none, gone: none, to be set when an engine runs again: 'a', 'b', 'c'")
    reloaded.restarting = False
    asyncio.run(reloaded.reload.look())
    assert reloaded.limits == {"a": TenantLimits(max_running=2), "b": TenantLimits(), "c": TenantLimits()}
    assert reloaded.said[1].endswith("are set; changed: 'a', 'c', gone: 'b'")


def test_a_key_that_is_gone_is_refused_before_the_engine_has_taken_limits(tmp_path):
    old = {"api_keys": ["sk-old"], "max_running": 3}
    reloaded = Reloaded(tmp_path / "t.json", a=old, b={"api_keys": ["sk-b"]})
    waits, goes_on = asyncio.Event(), asyncio.Event()

    def asks(key):
        headers = Headers({"authorization": f"Bearer {key}"})
        try:
            return reloaded.keys.caller("POST", "/v1/completions", headers).tenant
        except AuthenticationError:
            return None

    async def set_tenant(name, limits):
        waits.set()
        await goes_on.wait()

    async def scenario():
        reloaded.reload._llm = SimpleNamespace(set_tenant=set_tenant)  # noqa: SLF001
        reloaded.write(a={"api_keys": ["sk-new"], "max_running": 2})
        reading = asyncio.create_task(reloaded.reload.reload())
        await waits.wait()
        during = [asks(key) for key in ("sk-old", "sk-b", "sk-new", "sk-own")]
        goes_on.set()
        await reading
        return during

    assert asyncio.run(scenario()) == [None, None, None, "default"]
    assert [asks(key) for key in ("sk-old", "sk-b", "sk-new", "sk-own")] == [None, None, "a", "default"]


@pytest.mark.parametrize(
    "content", ["{", '{"tenants": {"a": {"no_limit": 1}}}', '{"tenants": {"b": {"api_keys": ["sk-own"]}}}']
)
def test_a_file_that_cannot_be_used_changes_nothing(tmp_path, content, caplog):
    reloaded = Reloaded(tmp_path / "t.json", a={"max_running": 2, "api_keys": ["sk-a"]})
    reloaded.path.write_text(content)
    asyncio.run(reloaded.reload.reload())
    assert reloaded.limits == {"a": TenantLimits(max_running=2)}
    (said,) = caplog.records
    assert said.levelname == "WARNING"
    assert said.message.startswith("keys and limits stay as they were: ")
    assert "sk-" not in said.message
    reloaded.path.unlink()
    asyncio.run(reloaded.reload.reload())
    assert reloaded.limits == {"a": TenantLimits(max_running=2)}
    assert reloaded.keys.are_there


def test_keys_change_while_a_server_runs(serving, tmp_path, monkeypatch):
    monkeypatch.setattr(reloading, "LOOK_S", 0.05)
    path = tmp_path / "tenants.json"

    def write(**tenants):
        path.write_text(json.dumps({"admin_keys": [f"sha256:{key_digest('sk-admin').hex()}"], "tenants": tenants}))

    write(one={"api_keys": ["sk-old"], "max_running": 2})
    with (
        serving(tenants=path, max_model_len=128, max_num_seqs=4, kv_memory="8MiB") as server,
        httpx.Client(base_url=f"{server.url}/v1", timeout=60) as http,
    ):

        def status(key, body=None):
            headers = {"Authorization": f"Bearer {key}"}
            if body is None:
                return http.get("/models", headers=headers).status_code
            return http.post("/completions", json=body, headers=headers).status_code

        assert (status("sk-old"), status("sk-new")) == (200, 401)
        write(one={"api_keys": ["sk-new"], "max_running": 1}, two={"api_keys": ["sk-two"]})
        deadline = time.monotonic() + 20
        while status("sk-new") != 200:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert status("sk-old") == 401
        assert status("sk-two", {"prompt": "Hi", "max_tokens": 1}) == 200
        tenants = http.get("/tenants", headers={"Authorization": "Bearer sk-admin"}).json()
        assert tenants["one"]["limits"]["max_running"] == 1


def test_a_file_that_changes_while_an_engine_restarts_holds_for_the_next_one(serving, tmp_path, monkeypatch):
    monkeypatch.setattr(reloading, "LOOK_S", 0.05)
    path = tmp_path / "tenants.json"
    path.write_text(json.dumps({"tenants": {"one": {"max_running": 2}}}))
    with serving(tenants=path, max_model_len=128, max_num_seqs=4, kv_memory="8MiB") as server:
        os.kill(server.llm.engine_pid, signal.SIGKILL)
        wait_until(lambda: server.llm.restarting is not None, "the engine does not end")
        path.write_text(json.dumps({"tenants": {"one": {"max_running": 1}, "two": {"max_running": 3}}}))
        wait_until(lambda: server.llm.restarting is None, "no engine runs again", within_s=60)

        def limits():
            return {name: tenant.limits.max_running for name, tenant in server.stats().tenants.items()}

        wait_until(lambda: limits().get("two") == 3, limits)
        assert limits()["one"] == 1
