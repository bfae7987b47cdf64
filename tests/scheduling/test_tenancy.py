"""Tenants in the scheduler: what one does, another does not feel, in its blocks, its results or its wait."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scheduler_bench import Bench, expected, make_request

from pagemill.errors import (
    ConfigError,
    KVMemoryError,
    RequestTooLargeError,
)
from pagemill.tenant_limits import TenantLimits

SIZE = 4


def bench_of(tenants: dict[str, TenantLimits], **settings) -> Bench:
    bench = Bench(**settings)
    for name, limits in tenants.items():
        bench.scheduler.set_tenant(name, limits)
    return bench


def load_of(bench: Bench, name: str):
    return bench.scheduler.tenants[name]


floods = st.lists(
    st.tuples(
        st.sampled_from(["add", "add", "add", "abort", "step"]),
        st.integers(0, 30),  # how much
        st.integers(1, 60),  # length of a prompt
        st.integers(1, 40),  # longest answer
        st.integers(1, 3),  # sequences
        st.integers(-3, 3),  # priority
    ),
    min_size=5,
    max_size=30,
)


@settings(max_examples=25, deadline=None)
@example(  # calm has blocks beyond its guarantee, cached only, when the flood lacks some
    flood=[("add", 0, 1, 1, 1, 0)] * 2 + [("add", 1, 1, 1, 1, 0), ("add", 21, 1, 1, 1, 0), ("add", 12, 44, 4, 2, 0)],
    frames=41,
    max_num_seqs=5,
    room=9,
    weight=1,
    caching=True,
)
@given(
    flood=floods,
    frames=st.integers(40, 80),
    max_num_seqs=st.integers(3, 6),
    room=st.sampled_from([2, 9, 40]),
    weight=st.sampled_from([1, 0.5]),
    caching=st.booleans(),
)
def test_whatever_one_tenant_does_another_keeps_blocks_results_and_a_bounded_wait(
    flood, frames, max_num_seqs, room, weight, caching
):
    """A request that is guaranteed its blocks enters a step within 2 + (2 longest + budget) / (budget - rows) steps of
    its coming: until then computed are at most the rest of a prompt that was begun, what its tenant is ahead by, and
    one more prompt. Once in, it is never preempted."""
    budget = max_num_seqs + room
    guaranteed = 16
    bench = bench_of(
        {"calm": TenantLimits(guaranteed_blocks=guaranteed, weight=weight)},
        frames=frames,
        block_size=SIZE,
        max_num_seqs=max_num_seqs,
        budget=budget,
        caching=caching,
    )
    longest = 100
    bound = 2 + -(-(2 * longest + budget / weight) // room)
    calm, arrived, waited = [], 0.0, 0

    def send() -> None:
        nonlocal arrived
        request = make_request(
            f"calm{len(calm)}", [len(calm)] * (9 + 5 * len(calm) % 30), 8, arrival_s=bench.now, tenant="calm"
        )
        arrived = bench.now
        calm.append(request)
        bench.scheduler.add(request)

    def step() -> None:
        nonlocal waited
        bench.step()
        load = load_of(bench, "calm")
        assert load.preemptions == 0, "a guarantee was broken"
        if load.waiting:
            waited += 1
            assert bench.now - arrived <= bound, "it waits longer than it should"
        account = load.account
        borrowed = sum(max(0, other.borrowed) for other in bench.memory.tenants if other is not account)
        free = bench.memory.stats().frames_free
        assert account.charged >= guaranteed or free + borrowed >= guaranteed - account.charged

    send()
    for number, (action, amount, prompt_len, max_tokens, n, priority) in enumerate(flood):
        live = [name for name in bench.scheduler.request_ids() if name.startswith("flood")]
        if action == "add":
            for i in range(amount // 4):
                request = make_request(
                    f"flood{number}-{i}",
                    [number, i, *range(prompt_len)],
                    max_tokens,
                    n=n,
                    priority=priority,
                    ignore_eos=True,
                    arrival_s=bench.now,
                )
                try:
                    bench.scheduler.add(request)
                except RequestTooLargeError:
                    assert (request.max_len + SIZE - 2) // SIZE > frames - guaranteed
        elif action == "abort" and live:
            bench.scheduler.abort(live[amount % len(live)], bench.now)
        for _ in range(amount):
            step()
            if calm[-1].request_id not in bench.scheduler.request_ids():
                send()
    while calm[-1].request_id in bench.scheduler.state.requests:
        step()
    for request in calm:
        assert bench.outputs[request.request_id, 0] == expected(request, 0)
    bench.run()


def test_within_its_guarantee_a_tenant_preempts_who_has_borrowed():
    bench = bench_of({"calm": TenantLimits(guaranteed_blocks=8)}, frames=16, block_size=SIZE, budget=64, caching=False)
    for i in range(4):
        bench.scheduler.add(make_request(f"a{i}", [i] * 12, 6, ignore_eos=True))
    bench.step()
    assert bench.scheduler.num_running == 4
    bench.scheduler.add(make_request("calm", [9] * 20, 4, ignore_eos=True, arrival_s=1.0, tenant="calm"))
    bench.step()
    assert load_of(bench, "calm").running == 1
    assert load_of(bench, "default").preemptions == 2  # four blocks each, and calm needs six to go on
    bench.run()
    assert load_of(bench, "calm").preemptions == 0


def test_what_a_tenant_shares_already_counts_once_in_its_guarantee():
    bench = bench_of({"calm": TenantLimits(guaranteed_blocks=8)}, frames=16, block_size=SIZE, budget=64)
    prefix = [5, 6] * 8
    bench.scheduler.add(make_request("pin", prefix, 1, tenant="calm", pin="p"))
    bench.run_steps()
    for i in range(3):
        bench.scheduler.add(make_request(f"a{i}", [i] * 12, 6, ignore_eos=True))
    bench.step()
    bench.scheduler.add(make_request("calm", [*prefix, 7, 8, 9], 4, ignore_eos=True, arrival_s=1.0, tenant="calm"))
    bench.step()
    assert load_of(bench, "calm").running == 1, "five blocks, of which four are pinned, and one to grow: eight in all"
    assert load_of(bench, "default").preemptions > 0
    bench.run()
    assert load_of(bench, "calm").preemptions == 0


def test_within_its_guarantee_a_tenant_gets_a_row():
    bench = bench_of({"calm": TenantLimits(guaranteed_blocks=8)}, frames=64, max_num_seqs=2, budget=16)
    for i in range(3):
        bench.scheduler.add(make_request(f"a{i}", [i] * 4, 30, ignore_eos=True))
    bench.step()
    bench.scheduler.add(make_request("calm", [9] * 4, 4, ignore_eos=True, arrival_s=1.0, tenant="calm"))
    bench.step()
    assert load_of(bench, "calm").running == 1
    bench.run()
    assert next(iter(bench.reasons)) == ("calm", 0)


def test_beyond_its_guarantee_a_tenant_waits_like_others():
    bench = bench_of({"calm": TenantLimits(guaranteed_blocks=2)}, frames=64, max_num_seqs=2, budget=16)
    for i in range(2):
        bench.scheduler.add(make_request(f"a{i}", [i] * 4, 10, ignore_eos=True))
    bench.step()
    bench.scheduler.add(make_request("calm", [9] * 12, 4, ignore_eos=True, arrival_s=1.0, tenant="calm"))
    bench.run()
    assert bench.scheduler.preemptions == 0
    assert list(bench.reasons)[-1] == ("calm", 0)


def test_at_its_quota_a_tenant_preempts_only_itself():
    bench = bench_of({"a": TenantLimits(max_blocks=8)}, frames=32, block_size=SIZE, max_num_seqs=4, budget=32)
    bench.scheduler.add(make_request("other", [7] * 8, 30, ignore_eos=True))
    for i in range(3):
        bench.scheduler.add(make_request(f"a{i}", [10 + i] * 4, 20, ignore_eos=True, tenant="a", priority=-5))
    while bench.scheduler.has_work():
        bench.step()
        assert load_of(bench, "a").account.charged <= 8
    assert load_of(bench, "a").preemptions > 0
    assert load_of(bench, "default").preemptions == 0
    bench.assert_all_free()


@pytest.mark.parametrize("limits", [TenantLimits(max_running=1), TenantLimits(max_blocks=2)])
def test_who_waits_for_its_own_limits_lets_others_pass(limits):
    bench = bench_of({"a": limits}, frames=64, max_num_seqs=4, budget=16)
    for i in range(3):
        bench.scheduler.add(make_request(f"a{i}", [i] * 4, 5, ignore_eos=True, tenant="a"))
    bench.scheduler.add(make_request("b", [9] * 4, 5, ignore_eos=True))
    bench.step()
    assert (load_of(bench, "a").running, load_of(bench, "default").running) == (1, 1)
    bench.run()


@pytest.mark.parametrize(
    ("limits", "rows", "most"),
    [
        (TenantLimits(guaranteed_blocks=40, max_running=1), 4, 0),
        (TenantLimits(guaranteed_blocks=9), 4, 5),
        (TenantLimits(guaranteed_blocks=40), 1, 5),
        (TenantLimits(max_blocks=19), 4, 5),
        (TenantLimits(guaranteed_blocks=19, max_blocks=19), 4, 5),
    ],
    ids=["max_running", "beyond its guarantee", "no row", "quota", "guaranteed quota"],
)
def test_a_long_prompt_that_waits_is_not_looked_at_in_every_step(limits, rows, most, monkeypatch):
    """Not all its blocks, which its tenant's other sequence has too; and once that has ended, it begins at once."""
    crowded = limits.guaranteed_blocks == 9
    bench = bench_of({"a": limits}, frames=32 if crowded else 48, block_size=SIZE, max_num_seqs=rows, budget=64)
    prefix, looks = [1, 2, 3, 4] * 8, []
    bench.scheduler.add(make_request("runs", prefix, 18, ignore_eos=True, tenant="a"))
    bench.scheduler.add(make_request("waits", prefix + [5] * 40, 4, ignore_eos=True, tenant="a", priority=1))
    if crowded:
        bench.scheduler.add(make_request("other", [9] * 60, 17, ignore_eos=True))
    bench.step()
    bench.step()
    for name in ("count_active", "peek"):
        real = getattr(bench.memory, name)
        monkeypatch.setattr(bench.memory, name, lambda *args, real=real: (looks.append(args), real(*args))[1])
    while ("runs", 0) not in bench.reasons:
        bench.step()
    assert len(looks) <= 2 * most
    assert "waits" not in bench.first_step
    ended = bench.steps
    bench.run()
    assert bench.first_step["waits"] == ended + 1


def test_a_request_that_needs_much_is_not_passed_by_others_for_ever():
    bench = bench_of({"a": TenantLimits(), "b": TenantLimits()}, frames=12, block_size=SIZE, budget=32, caching=False)
    for i in range(3):
        bench.scheduler.add(make_request(f"b{i}", [i] * 8, 6, ignore_eos=True, tenant="b"))
    bench.step()
    bench.scheduler.add(make_request("big", [9] * 30, 6, ignore_eos=True, tenant="a"))
    for i in range(30):
        bench.scheduler.add(make_request(f"later{i}", [i] * 4, 4, ignore_eos=True, tenant="b", arrival_s=1.0))
    bench.run()
    assert bench.first_step["big"] < bench.first_step["later0"]


def test_service_is_shared_by_weight():
    bench = bench_of({"a": TenantLimits(), "b": TenantLimits(weight=3)}, frames=64, max_num_seqs=1, budget=16)
    for i in range(40):
        for tenant in "ab":
            bench.scheduler.add(make_request(f"{tenant}{i}", [i] * 4, 5, ignore_eos=True, tenant=tenant))
    for _ in range(100):
        bench.step()
    done = [name for name, _ in bench.reasons]
    assert len(done) == 20
    assert sum(name.startswith("b") for name in done) == 15


def test_a_flood_does_not_push_a_newcomer_to_its_end():
    bench = bench_of({"a": TenantLimits(), "b": TenantLimits()}, frames=64, max_num_seqs=2, budget=16)
    for i in range(50):
        bench.scheduler.add(make_request(f"a{i}", [i] * 4, 5, ignore_eos=True, tenant="a", priority=-3))
    for _ in range(20):
        bench.step()
    bench.scheduler.add(make_request("b", [9] * 4, 5, ignore_eos=True, tenant="b", arrival_s=bench.now))
    for _ in range(6):
        bench.step()
    assert "b" in bench.first_step


def test_nobody_saves_up_service_by_being_idle():
    bench = bench_of({"a": TenantLimits(), "b": TenantLimits()}, frames=64, max_num_seqs=1, budget=16)
    for i in range(30):
        bench.scheduler.add(make_request(f"a{i}", [i] * 4, 5, ignore_eos=True, tenant="a"))
    for _ in range(80):
        bench.step()
    for i in range(30):
        bench.scheduler.add(make_request(f"b{i}", [i] * 4, 5, ignore_eos=True, tenant="b", arrival_s=bench.now))
    before = len(bench.reasons)
    for _ in range(50):
        bench.step()
    done = [name for name, _ in bench.reasons][before:]
    assert 4 <= sum(name.startswith("a") for name in done) <= 6


def test_tenants_find_nothing_of_each_other():
    bench = bench_of({"a": TenantLimits(), "b": TenantLimits()}, budget=64)
    for tenant in "ab":
        bench.scheduler.add(make_request(tenant, [1, 2, 3, 4] * 5, 2, ignore_eos=True, tenant=tenant))
        bench.run()
    assert [load_of(bench, name).prefix_hit_tokens for name in "ab"] == [0, 0]
    bench.scheduler.add(make_request("again", [1, 2, 3, 4] * 5, 2, ignore_eos=True, tenant="b"))
    bench.run()
    assert load_of(bench, "b").prefix_hit_tokens == 19


@pytest.mark.parametrize(
    ("limits", "way"),
    [
        ({"a": TenantLimits(max_blocks="1%")}, r"must be at least 1; raise it$"),
        (
            {"a": TenantLimits(max_blocks=4, guaranteed_blocks=6)},
            r"at least 6; raise it, or lower its guaranteed_blocks$",
        ),
        (
            {"a": TenantLimits(guaranteed_blocks="60%"), "b": TenantLimits(guaranteed_blocks="60%")},
            r"24 blocks would be guaranteed, and the pool has 20; guarantee less, or raise kv_memory$",
        ),
    ],
)
def test_limits_that_can_not_be_say_their_own_way_out(limits, way):
    with pytest.raises(ConfigError, match=way):
        bench_of(limits, frames=20)


def test_limits_that_are_shares_follow_the_pool():
    bench = bench_of(
        {"a": TenantLimits(guaranteed_blocks="50%", max_blocks="75%"), "b": TenantLimits(guaranteed_blocks=6)},
        frames=16,
    )
    account = load_of(bench, "a").account
    assert (account.guaranteed_blocks, account.max_blocks) == (8, 12)
    bench.resize(12)
    assert (account.guaranteed_blocks, account.max_blocks) == (6, 9)
    assert bench.scheduler.least_frames == 11
    with pytest.raises(KVMemoryError, match=r"cannot have 10 blocks now: 11 blocks would be guaranteed"):
        bench.scheduler.resize(10, bench.now)
    bench.resize(40)
    assert (account.guaranteed_blocks, account.max_blocks) == (20, 30)


def test_a_pool_in_which_a_share_is_no_block_is_refused_and_changes_nothing():
    bench = bench_of({"a": TenantLimits(max_blocks="10%"), "b": TenantLimits(guaranteed_blocks="25%")}, frames=40)
    assert bench.scheduler.least_frames == 10
    with pytest.raises(KVMemoryError, match=r"have 9 blocks now: max_blocks of tenant 'a' would be 0, and must be at"):
        bench.scheduler.resize(9, bench.now)
    assert (bench.memory.num_frames, load_of(bench, "b").account.guaranteed_blocks) == (40, 10)
    with pytest.raises(ConfigError, match="max_blocks of tenant 'a' would be 0, and must be at least 1"):
        bench_of({"a": TenantLimits(max_blocks="2%")}, frames=40)
    bench.resize(10)
    assert [load_of(bench, "a").account.max_blocks, load_of(bench, "b").account.guaranteed_blocks] == [1, 2]


def test_a_quota_stays_above_what_a_larger_pool_would_guarantee():
    bench = bench_of({"a": TenantLimits(guaranteed_blocks="50%", max_blocks=12)}, frames=20)
    with pytest.raises(KVMemoryError, match="max_blocks of tenant 'a' would be 12, and must be at least 15"):
        bench.scheduler.resize(30, bench.now)
    bench.resize(24)


def test_pins_leave_what_is_guaranteed():
    bench = bench_of({"calm": TenantLimits(guaranteed_blocks=12)}, frames=20, block_size=SIZE, budget=64)
    with pytest.raises(
        RequestTooLargeError, match=r"takes 9 KV blocks .* can count on 8 .* leave it 8 of the pool's 20"
    ):
        bench.scheduler.add(make_request("pin", [1] * 36, 1, ignore_eos=True, pin="x"))
    bench.scheduler.add(make_request("pin", [1] * 24, 1, ignore_eos=True, pin="x"))
    bench.run_steps()
    with pytest.raises(
        RequestTooLargeError, match=r"tenant 'default' can count on 2 .* leave it 8 of .* its pins hold 6"
    ):
        bench.scheduler.add(make_request("big", [2] * 10, 3))
    with pytest.raises(ConfigError, match=r"21 blocks would be guaranteed, .* of which pins hold 6"):
        bench.scheduler.set_tenant("calm", TenantLimits(guaranteed_blocks=15))
    bench.scheduler.add(make_request("calm", [2] * 40, 4, ignore_eos=True, tenant="calm"))
    bench.run_steps()
    assert bench.outputs["calm", 0] == expected(make_request("calm", [2] * 40, 4, ignore_eos=True, tenant="calm"), 0)
    bench.scheduler.pins.clear(bench.now)
    bench.assert_all_free()


def test_a_fork_does_not_run_beyond_its_tenants_limit():
    bench = Bench()
    bench.scheduler.set_tenant("one", TenantLimits(max_running=1))
    bench.scheduler.add(make_request("r", [1] * 9, 6, tenant="one", ignore_eos=True))
    while len(bench.outputs.get(("r", 0), [])) < 3:
        bench.step()
    (origin,) = bench.scheduler.state.running
    child = make_request("child", list(origin.tokens), 3, tenant="one", ignore_eos=True)
    bench.scheduler.add(child, ("r", 0))
    assert bench.scheduler.num_running == 1
    while ("r", 0) not in bench.reasons:
        assert ("child", 0) not in bench.outputs
        bench.step()
    bench.run()
    assert bench.outputs["child", 0] == expected(child, 0)


def test_long_prompts_of_one_tenant_leave_anothers_stream_its_time():
    bench = bench_of({"a": TenantLimits(), "b": TenantLimits()}, frames=400, max_num_seqs=4, budget=64)
    bench.scheduler.add(make_request("stream", [9] * 4, 90, ignore_eos=True, tenant="b"))
    for i in range(20):
        bench.scheduler.add(make_request(f"a{i}", [i] * 200, 2, ignore_eos=True, tenant="a"))
    beside = []
    while ("stream", 0) not in bench.reasons:
        before = bench.device.computed_tokens
        bench.step()
        beside.append(bench.device.computed_tokens - before)
    assert max(beside[:3]) == 64, "who is not ahead fills the step"
    assert max(beside[5:]) <= 8 + 4
    for _ in range(3):
        before = bench.device.computed_tokens
        bench.step()
    assert bench.device.computed_tokens - before == 64, "nobody else wants the time"
    bench.run()
