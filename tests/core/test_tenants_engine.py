"""Tenants on a real model: what one is given, another does not feel, and finds nothing of."""

from __future__ import annotations

import pytest

from pagemill import LLM, BeamSearchParams, SamplingParams, TenantLimits
from pagemill.errors import (
    ConfigError,
    InvalidRequestError,
    PinLimitError,
    RequestTooLargeError,
    SessionLimitError,
    UnknownTenantError,
)
from shallow import FRAME_BYTES

BLOCK = 16
PROMPT = "The history of paging begins with the Atlas computer, built in Manchester. " * 4
GREEDY = SamplingParams(temperature=0.0, max_tokens=12)


@pytest.fixture
def llm(shallow_path):
    with LLM(
        str(shallow_path),
        max_model_len=256,
        max_num_seqs=8,
        max_num_batched_tokens=64,
        kv_memory=40 * FRAME_BYTES,
        dtype="float32",
        tenants={"calm": TenantLimits(guaranteed_blocks="50%"), "wild": {"max_blocks": 12, "weight": 0.5}},
        check_invariants=True,
    ) as llm:
        yield llm


def test_no_tenant_finds_anothers_prompts_and_all_get_the_same_answer(llm):
    outputs = [llm.generate(PROMPT, GREEDY, use_tqdm=False, tenant=name)[0] for name in ("calm", "wild", "default")]
    assert [output.num_cached_tokens for output in outputs] == [0, 0, 0]
    assert len({tuple(output.outputs[0].token_ids) for output in outputs}) == 1
    assert llm.generate(PROMPT, GREEDY, use_tqdm=False, tenant="calm")[0].num_cached_tokens > 32
    stats = llm.stats().tenants
    assert stats["calm"].prefix_hit_tokens > 32
    assert stats["wild"].prefix_hit_tokens == 0
    assert all(stats[name].blocks_cached > 0 for name in ("calm", "wild", "default"))
    assert sum(tenant.blocks_cached for tenant in stats.values()) == llm.stats().frames_cached


def test_a_beam_search_is_its_tenants(llm):
    params = BeamSearchParams(beam_width=2, max_tokens=4)
    llm.beam_search([PROMPT, "Once"], params, tenant=["calm", "default"], priority=[1, -1])
    assert llm.stats().tenants["calm"].blocks_cached > 0
    assert llm.stats().tenants["wild"].blocks_cached == 0
    with pytest.raises(UnknownTenantError, match="'nobody'"):
        llm.beam_search(PROMPT, params, tenant="nobody")
    with pytest.raises(InvalidRequestError, match="priority is 'high'"):
        llm.beam_search(PROMPT, params, priority="high")


def test_beside_a_flood_a_guaranteed_tenant_gets_its_own_answers(llm):
    prompts = [f"{number}. {PROMPT}" for number in range(3)]
    alone = [llm.generate(prompt, GREEDY, use_tqdm=False, tenant="calm")[0].outputs[0].token_ids for prompt in prompts]
    flood = [f"Flood {number}: {PROMPT}" for number in range(20)]
    tenants = ["default"] * 20 + ["calm"] * 3
    outputs = llm.generate(flood + prompts, GREEDY, use_tqdm=False, tenant=tenants)
    assert [output.outputs[0].token_ids for output in outputs[20:]] == alone
    stats = llm.stats().tenants
    assert stats["calm"].preemptions == 0
    assert stats["default"].evictions + stats["default"].preemptions > 0


def test_limits_are_kept_and_changed(llm):
    with pytest.raises(RequestTooLargeError, match=r"tenant 'wild' can count on 12"):
        llm.generate(PROMPT, SamplingParams(max_tokens=150), use_tqdm=False, tenant="wild")
    short = llm.generate(PROMPT, SamplingParams(temperature=0.0, max_tokens=None), use_tqdm=False, tenant="wild")[0]
    assert len(short.prompt_token_ids) + len(short.outputs[0].token_ids) <= 12 * BLOCK + 1
    llm.set_tenant("wild", TenantLimits(max_blocks=14))
    llm.generate(PROMPT, SamplingParams(max_tokens=150), use_tqdm=False, tenant="wild")
    assert llm.stats().tenants["wild"].max_blocks == 14
    with pytest.raises(ConfigError, match="blocks would be guaranteed"):
        llm.set_tenant("wild", TenantLimits(guaranteed_blocks="60%"))
    with pytest.raises(UnknownTenantError, match=r"no tenant 'nobody'; known: calm, default, wild"):
        llm.generate(PROMPT, GREEDY, use_tqdm=False, tenant="nobody")


def test_a_tenant_pins_no_more_than_its_own_share(llm):
    with pytest.raises(PinLimitError, match=r"tenant 'wild' would have 7 pinned, over .* of its max_blocks, 6 of 12"):
        llm.pin([5] * 7 * BLOCK, name="a", tenant="wild")
    llm.pin([5] * 6 * BLOCK, name="a", tenant="wild")
    llm.pin([5] * 7 * BLOCK, name="a", tenant="calm")


def test_a_tenants_number_of_sessions_can_be_changed(llm):
    for most in (1, 2):
        llm.set_tenant("wild", TenantLimits(max_sessions=most))
        llm.session(str(most), tenant="wild").generate("Once", GREEDY)
        with pytest.raises(SessionLimitError):
            llm.session("more", tenant="wild").generate("Once", GREEDY)
