"""A pool that shrinks and grows while requests run: no bit changes, nothing is lost, and what cannot be is refused."""

from __future__ import annotations

import pytest
from drive import Run, drive, record_logits, request

from pagemill.errors import ConfigError, KVMemoryError, PoolShrunkError, RequestTooLargeError, ResizeFailedError
from pagemill.namespace import Namespace
from pagemill.sampling.params import SamplingParams
from pagemill.tenant_limits import TenantLimits
from shallow import FRAME_BYTES

pytestmark = pytest.mark.shallow
PARAMS = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)


@pytest.fixture(scope="module")
def requests(prompts):
    joined = [token for prompt in prompts for token in prompt]
    return [request(f"r{i}", joined[37 * i : 37 * i + 120], PARAMS) for i in range(6)]


@pytest.fixture(scope="module")
def expected(requests, make_engine):
    return drive(make_engine(), requests, record=True)


def test_requests_do_not_notice(requests, expected, make_engine):
    settings = {"max_model_len": 176, "max_num_batched_tokens": 64, "target_tpot_ms": "off"}
    core, run = make_engine(kv_memory=100 * FRAME_BYTES, **settings), Run()
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
        core.memory.check()
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
    with pytest.raises(KVMemoryError, match=r"cannot have 40 blocks now: the request 'r' .* which takes 3"):
        core.resize(40 * FRAME_BYTES)
    assert core.executor.pool.nbytes == core.ready.kv_bytes == 39 * FRAME_BYTES


def pinning(name, prompt):
    return request(f"pin {name}", prompt, SamplingParams(temperature=0.0, max_tokens=1), pin=name)


@pytest.fixture
def crowd(requests, make_engine):
    """An engine with two pins, cached blocks, five requests that run and one that waits; and what has come of them."""
    core, run = make_engine(kv_memory=100 * FRAME_BYTES, max_model_len=176, max_num_seqs=5), Run()
    for each in (pinning("low", requests[5].prompt_token_ids[:32]), requests[5]):
        drive_on(core, [each])
    for each in (*requests[:4], pinning("high", requests[4].prompt_token_ids[50:90]), requests[4], requests[5]):
        core.add_request(each)
    for _ in range(5):
        run.take(core.step())
    del run.tokens["pin high", 0]
    assert (core.stats().running, core.stats().waiting) == (5, 1)
    yield core, run
    core.close()


def drive_on(core, requests) -> Run:
    """As `drive`, beside pins."""
    run = Run()
    for each in requests:
        core.add_request(each)
    while core.has_work():
        run.take(core.step())
    return run


def in_frames(core, frames) -> tuple[set[str], set[str]]:
    """Running requests, and pins, that hold blocks in these frames."""
    frames, lies_in = set(frames), core.memory.lies_in
    running = {one.request.request_id for one in core.scheduler.state.running if lies_in(one.table, frames)}
    return running, {pin.name for pin in core.scheduler.pins.list() if lies_in(pin.table, frames)}


def assert_all_else_went_on(core, run, requests, expected, lost) -> None:
    """All answers but those that were lost, each with its error; and then the engine serves as if nothing had been."""
    assert {key[0]: last.error.error_type for key, last in run.last.items() if last.finish_reason == "error"} == lost
    for (name, _), tokens in run.tokens.items():
        want = expected.tokens[name, 0]
        assert tokens == (want[: len(tokens)] if name in lost else want)
    core.memory.check()
    for pin in core.pins().pins:
        core.unpin(pin.name, Namespace())
    assert core.stats().frames_active == 0
    assert core.resize(60 * FRAME_BYTES).num_frames == 60
    again = drive(core, requests)
    assert again.tokens == expected.tokens


@pytest.mark.parametrize(
    "how", ["fails", pytest.param("is interrupted", marks=pytest.mark.slow), "loses what it moves"]
)
def test_a_shrink_that_goes_wrong_ends_what_was_being_moved_and_nothing_else(
    crowd, requests, expected, monkeypatch, how
):
    core, run = crowd
    (lost, lost_pins), (running, pins) = in_frames(core, range(48, 100)), in_frames(core, range(100))
    assert (lost, running) == ({"r4"}, {"r0", "r1", "r2", "r3", "r4"})
    assert (lost_pins, pins) == ({"high"}, {"low", "high"})
    pool, size = core.executor.pool, 100

    def broken(_, target):
        pool.frames.bytes[:, target] = 0xFF  # NaN
        if how == "fails":
            raise RuntimeError("out of device memory")
        if how == "is interrupted":
            raise KeyboardInterrupt
        return target.tolist()

    with monkeypatch.context() as patch:
        patch.setattr(pool.frames, "copy", broken)
        if how == "fails":
            message = "out of device memory; it keeps its size. Ended: 1 requests; pins: 'high'"
            with pytest.raises(ResizeFailedError, match=message):
                core.resize(48 * FRAME_BYTES)
        elif how == "is interrupted":
            with pytest.raises(KeyboardInterrupt):
                core.resize(48 * FRAME_BYTES)
        else:
            size = core.resize(48 * FRAME_BYTES).num_frames
    assert core.stats().frames == size == (48 if how == "loses what it moves" else 100)
    assert pool.nbytes == core.ready.kv_bytes == size * FRAME_BYTES
    core.memory.check()
    while core.has_work():
        run.take(core.step())
    assert [pin.name for pin in core.pins().pins] == ["low"]
    error = "KVStoreError" if how == "loses what it moves" else "ResizeFailedError"
    assert_all_else_went_on(core, run, requests, expected, {"r4": error})


def test_a_growth_that_fails_ends_nothing(crowd, requests, expected, monkeypatch):
    core, run = crowd
    core.abort(["r2"])
    with monkeypatch.context() as patch:
        patch.setattr(core.executor, "apply", broken_apply)
        with pytest.raises(ResizeFailedError, match="Ended: 0 requests; pins: none"):
            core.resize(200 * FRAME_BYTES)
    assert core.stats().frames == 100
    assert core.executor.pool.nbytes == core.ready.kv_bytes == 100 * FRAME_BYTES
    while core.has_work():
        run.take(core.step())
    assert [pin.name for pin in core.pins().pins] == ["low", "high"]
    del run.tokens["r2", 0]
    assert_all_else_went_on(core, run, requests, expected, {})


def broken_apply(_):
    raise RuntimeError("the device is gone")


def test_a_request_for_which_the_pool_was_made_too_small_may_come_again(make_engine, prompts):
    core, long = make_engine(kv_memory=12 * FRAME_BYTES, max_model_len=192), (prompts[0] * 50)[:150]
    for params in (SamplingParams(max_tokens=None), SamplingParams(max_tokens=0), SamplingParams(max_tokens=9)):
        core.resize("used")
        with pytest.raises(PoolShrunkError, match=r"needs 10 KV blocks, and the KV pool has 1 of 12 now"):
            core.add_request(request("long", long, params))
        core.resize(None)
        core.add_request(request("long", long, params))
        core.abort(["long"])


def test_so_may_one_that_its_tenant_cannot_count_on_now(make_engine, prompts):
    limits = {"default": TenantLimits(guaranteed_blocks="25%"), "other": TenantLimits(guaranteed_blocks=2)}
    core, short = make_engine(kv_memory=12 * FRAME_BYTES, max_model_len=192), (prompts[0] * 50)[:10]
    for name, given in limits.items():
        core.set_tenant(name, given)
    core.resize("used")
    assert core.stats().frames == 2  # as many as the other is guaranteed
    with pytest.raises(PoolShrunkError, match="needs 1 KV block, and the KV pool has 2 of 12 now"):
        core.add_request(request("short", short, SamplingParams(max_tokens=1)))
    with pytest.raises(RequestTooLargeError, match="takes 11 KV blocks"):  # nor would the whole pool do
        core.add_request(request("long", short * 16, SamplingParams(max_tokens=16)))
    core.resize(None)
    core.add_request(request("short", short, SamplingParams(max_tokens=1)))
    core.abort(["short"])


@pytest.mark.parametrize("limit", ["max_blocks_per_request", "max_blocks_per_session"])
def test_so_may_one_whose_share_is_too_small_now(make_engine, prompts, limit):
    core, prompt = make_engine(kv_memory=24 * FRAME_BYTES, max_model_len=384), (prompts[0] * 50)[:30]
    core.add_request(request("running", (prompts[0] * 50)[:120], SamplingParams(max_tokens=60)))
    core.step()
    core.set_tenant("default", TenantLimits(**{limit: "25%"}))
    core.resize("used")
    assert core.stats().frames < 16, "a quarter is more than 3"
    asked = {"in_session": limit == "max_blocks_per_session"}
    core.add_request(request("a", prompt, SamplingParams(max_tokens=9), **asked))
    core.abort(["a"])
    with pytest.raises(PoolShrunkError, match="needs 6 KV blocks"):  # a quarter of the pool at the start
        core.add_request(request("a", prompt, SamplingParams(max_tokens=60), **asked))
    with pytest.raises(RequestTooLargeError, match="takes 7 KV blocks"):
        core.add_request(request("a", prompt, SamplingParams(max_tokens=70), **asked))
    core.resize(None)
    core.add_request(request("a", prompt, SamplingParams(max_tokens=60), **asked))
    core.abort(["a", "running"])
