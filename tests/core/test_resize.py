"""A pool that shrinks and grows while requests run: no bit changes, nothing is lost, and what can not be is refused."""

from __future__ import annotations

import pytest
from drive import Run, drive, record_logits, request

from harness import FRAME_BYTES
from pagemill.errors import ConfigError, KVMemoryError
from pagemill.sampling.params import SamplingParams
from pagemill.tenant_limits import TenantLimits

PARAMS = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)


@pytest.fixture(scope="module")
def requests(prompts):
    joined = [token for prompt in prompts for token in prompt]
    return [request(f"r{i}", joined[37 * i : 37 * i + 120], PARAMS) for i in range(6)]


def test_requests_do_not_notice(requests, make_engine):
    expected = drive(make_engine(), requests, record=True)
    core, run = make_engine(kv_memory=100 * FRAME_BYTES, max_model_len=176, max_num_batched_tokens=64), Run()
    record_logits(core, run)
    for each in requests:
        core.add_request(each)
    preempted = []
    for frames in (60, "used", 24, 300, 30, None, "used"):
        for _ in range(8):
            run.take(core.step())
        active = core.stats().frames_active
        ready = core.resize(frames * FRAME_BYTES if isinstance(frames, int) else frames)
        stats = core.stats()
        preempted.append(stats.preemptions)
        assert ready.num_frames == stats.frames == {None: 100, "used": max(active, 10)}.get(frames, frames)
        assert ready.kv_bytes == ready.num_frames * FRAME_BYTES
        core._memory.check()
    while core.has_work():
        run.take(core.step())
    assert preempted[1] == preempted[0], "what is used fits"
    assert preempted[2] > preempted[1], "24 blocks are too few for what ran"
    assert run.tokens == expected.tokens
    for key, logits in run.logits.items():
        assert logits.equal(expected.logits[key]), key
    assert core.stats().frames_active == 0


def test_what_is_cached_moves_with_the_rest(requests, make_engine):
    core = make_engine(kv_memory=100 * FRAME_BYTES, max_model_len=176)
    before = drive(core, requests[:3])
    core.resize(12 * FRAME_BYTES)
    again = drive(core, requests[2:3])
    assert again.cached == {"r2": 119}
    assert again.tokens["r2", 0] == before.tokens["r2", 0]


def test_sizes_that_can_not_be(requests, make_engine):
    core = make_engine(kv_memory=100 * FRAME_BYTES, max_model_len=176)
    core.add_request(requests[0])
    core.step()
    with pytest.raises(KVMemoryError, match="'r0' may grow to 160 tokens, which takes 10"):
        core.resize(9 * FRAME_BYTES)
    with pytest.raises(ConfigError, match="kv_memory is 'much'"):
        core.resize("much")
    with pytest.raises(KVMemoryError, match="are free"):
        core.resize("1TiB")
    assert core.stats().frames == 100
    core.resize(10 * FRAME_BYTES)
    assert core.ready.longest_sequence == 161
    core.abort(["r0"])
    core.resize("used")
    assert core.ready.num_frames == 1


def test_a_pool_that_may_not_grow_has_not_grown(requests, make_engine):
    core = make_engine(kv_memory=39 * FRAME_BYTES, max_model_len=48)
    core.add_request(request("r", requests[0].prompt_token_ids[:20], PARAMS))
    for name in "abc":
        core.set_tenant(name, TenantLimits(guaranteed_blocks="33%"))  # 12 of 39, 13 of 40
    with pytest.raises(KVMemoryError, match=r"can not have 40 blocks now: the request 'r' .* which takes 3"):
        core.resize(40 * FRAME_BYTES)
    assert core._engine.pool.nbytes == core.ready.kv_bytes == 39 * FRAME_BYTES
