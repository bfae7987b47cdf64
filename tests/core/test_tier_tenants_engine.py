"""Another tenant's flood leaves a session in the lower tiers where it is: it goes on with loaded blocks."""

from __future__ import annotations

import pytest
from drive import drive, request

from pagemill.kvcache.load_time import LoadTime
from pagemill.sampling.params import SamplingParams
from pagemill.tenant_limits import TenantLimits
from shallow import FRAME_BYTES

pytestmark = pytest.mark.shallow
LENGTH, BLOCKS = 200, 12
"""The length of each prompt, in tokens and in whole blocks."""
PARAMS = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
SMALL = {"kv_memory": 30 * FRAME_BYTES, "max_model_len": 352, "max_num_seqs": 2, "max_num_batched_tokens": 128}
"""Room for two of the prompts."""
ROOM = 36
"""The size of the tier, in blocks: three prompts."""


@pytest.fixture(scope="module")
def text(prompts):
    return [token for prompt in prompts for token in prompt] * 4


def conversations(text, tenant: str, numbers):
    """Prompts that have nothing in common."""
    return [
        request(f"{tenant} {at}", text[at : at + LENGTH], PARAMS, tenant=tenant, cache_salt=str(at)) for at in numbers
    ]


@pytest.mark.parametrize("tier", [*(pytest.param(one, marks=pytest.mark.slow) for one in ("host", "disk")), "both"])
def test_a_session_goes_on_with_its_blocks_after_another_tenants_flood(text, make_engine, tmp_path, monkeypatch, tier):
    monkeypatch.setattr(LoadTime, "pays", lambda *how: True)
    settings = dict(SMALL) | {"target_tpot_ms": "off"}
    if tier != "disk":
        settings["kv_host_memory"] = ROOM * FRAME_BYTES
    if tier != "host":
        settings |= {"kv_disk_memory": ROOM * (FRAME_BYTES + 4096), "kv_disk_path": str(tmp_path)}
    core = make_engine(**settings)
    for name in ("calm", "flood"):
        core.set_tenant(name, TenantLimits())
    begun = request("begun", text[:LENGTH], PARAMS, tenant="calm")
    answer = drive(core, [begun]).tokens["begun", 0]
    drive(core, conversations(text, "flood", range(10)))
    core.tiers.transfers.flush()
    stats = core.stats()
    for where, count in stats.tier_blocks.items():
        assert count == ROOM
        assert sum(tenant.tier_blocks[where] for tenant in stats.tenants.values()) == ROOM
    if tier != "host":  # over a restart, in which what the pool and host memory hold is kept on disk
        core.close()
        core = make_engine(**settings)
        for name in ("calm", "flood"):
            core.set_tenant(name, TenantLimits())
        assert core.stats().tier_blocks["disk"] == ROOM
        drive(core, conversations(text, "flood", range(10, 15)))
    before = core.stats()
    turn = request("turn", [*text[:LENGTH], *answer, *text[300:340]], PARAMS, tenant="calm")
    alone = [request("turn", turn.prompt_token_ids, PARAMS)]
    run = drive(core, [turn])
    assert run.cached["turn"] == BLOCKS * 16
    loaded = core.stats().blocks_loaded - before.blocks_loaded
    assert loaded == BLOCKS - before.tenants["calm"].blocks_cached >= BLOCKS // 2
    assert run.tokens == drive(make_engine(enable_prefix_caching=False), alone).tokens
    core.close()


def test_what_is_guaranteed_of_the_pool_is_guaranteed_of_a_tier(text, make_engine, monkeypatch):
    """14 blocks of 36 are, and half of the others is its share."""
    monkeypatch.setattr(LoadTime, "pays", lambda *how: True)
    core = make_engine(**SMALL, kv_host_memory=ROOM * FRAME_BYTES)
    core.set_tenant("large", TenantLimits(guaranteed_blocks="40%"))
    core.set_tenant("flood", TenantLimits())
    drive(core, conversations(text, "large", range(4)))
    drive(core, conversations(text, "flood", range(10)))
    core.tiers.transfers.flush()
    held = {name: one.tier_blocks["host"] for name, one in core.stats().tenants.items()}
    assert held == {"default": 0, "large": 14 + 11, "flood": 11}
    core.close()
