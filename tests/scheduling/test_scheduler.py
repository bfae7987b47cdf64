"""One behaviour of the scheduler at a time: who begins, waits, is preempted or refused, and devices that fail."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduler_bench import Bench, expected, make_request, make_search

from pagemill.errors import EngineDeadError, KVMemoryError, PoolTooSmallError, RequestTooLargeError
from pagemill.scheduling.sequence import Precedence, Sequence
from pagemill.scheduling.waiting import PendingPrefixes
from pagemill.tenant_limits import TenantLimits


def test_a_device_that_fails_while_frames_go_ends_what_was_being_moved_and_nothing_else():
    bench = Bench(frames=64, budget=64)
    bench.scheduler.add(make_request("low", [1] * 8, 1, pin="low"))
    bench.run_steps()
    cached = make_request("cached", [2] * 16, 1, ignore_eos=True)
    running = [make_request(f"r{i}", [3 + i] * 10, 12, ignore_eos=True) for i in range(3)]
    for request in (*running, make_request("high", [9] * 8, 1, pin="high"), cached):
        bench.scheduler.add(request)
    for _ in range(2):
        bench.step()
    gone = set(range(20, 64))

    def lies_there(table) -> bool:
        return bench.memory.lies_in(table, gone)

    lost = {one.request.request_id for one in bench.scheduler.state.running if lies_there(one.table)}
    assert lost == {"r2"}
    assert [pin.name for pin in bench.scheduler.pins.list() if lies_there(pin.table)] == ["high"]
    assert any(frame in gone for frame, _ in bench.memory.cached_blocks())
    bench.resize(20, fails=True)
    assert {name for (name, _), reason in bench.reasons.items() if reason == "error"} == lost
    assert [pin.name for pin in bench.scheduler.pins.list()] == ["low"]
    for request in (make_request("again", cached.prompt_token_ids, 2, seed=3), make_request("behind", [9] * 9, 2)):
        bench.scheduler.add(request)
        running.append(request)
    bench.run()
    assert all(bench.outputs[r.request_id, 0] == expected(r, 0) for r in running if r.request_id not in lost)


def test_a_result_that_is_not_of_the_oldest_step_in_flight_is_refused():
    """Its tokens would be given to other requests."""
    bench = Bench(depth=3)
    request = make_request("r", [1] * 9, 12, ignore_eos=True)
    bench.scheduler.add(request)
    bench.step()
    bench.step()
    (_, first), (result, second) = bench.flights
    with pytest.raises(EngineDeadError, match=f"step {second} has ended where {first} was due"):
        bench.scheduler.commit(result, bench.now, second)
    bench.run()
    assert bench.outputs["r", 0] == expected(request, 0)


def test_a_device_that_fails_to_take_edits_of_a_table_ends_its_sequence():
    """Two forks compute the same block at once, and the second to commit it is to take the first one's."""
    bench = Bench(frames=32, budget=64)
    origin = make_request("origin", [1] * 9, 20, ignore_eos=True)
    bench.scheduler.add(origin)
    bench.step()
    child = make_request("child", bench.scheduler.state.requests["origin"][0].tokens, 19, ignore_eos=True)
    bench.scheduler.add(child, ("origin", 0))
    while not bench.memory.core.pending.edits:
        bench.step()
    bench.resize(40, fails=True)
    assert bench.reasons == {("child", 0): "error"}
    bench.run()
    assert bench.outputs["origin", 0] == expected(origin, 0)


def test_a_device_that_fails_to_take_the_tokens_of_beams_ends_their_search():
    bench = Bench(frames=32, budget=64)
    other = make_request("other", [2] * 9, 6, ignore_eos=True)
    for request in (make_search("search", [1] * 9, 6, 2, ignore_eos=True), other):
        bench.scheduler.add(request)
    bench.step()
    bench.step()
    bench.resize(40, fails=True)
    assert bench.reasons == {("search", 0): "error", ("search", 1): "error"}
    bench.run()
    assert bench.outputs["other", 0] == expected(other, 0)


@pytest.mark.parametrize(("watermark", "enters"), [(0, True), (4, True), (5, False)])
def test_who_enters_beside_others_leaves_a_block_for_each_and_the_watermark(watermark, enters):
    """Of 12 blocks the first holds 4, and the second wants 3."""
    bench = Bench(frames=12, budget=64)
    bench.scheduler.add(make_request("first", [1] * 15, 2, ignore_eos=True))
    bench.step()
    bench.scheduler.controller.watermark = watermark
    bench.scheduler.add(make_request("second", [2] * 11, 2, ignore_eos=True))
    bench.step()
    assert (bench.first_step.get("second") == 2) == enters
    bench.run()
    assert bench.first_step["second"] == 3 - enters


def test_who_runs_alone_needs_no_watermark():
    bench = Bench(frames=12, budget=64)
    bench.scheduler.controller.watermark = 12
    bench.scheduler.add(make_request("alone", [1] * 40, 8, ignore_eos=True))
    bench.run()
    assert len(bench.outputs["alone", 0]) == 8


def test_prefix_computed_by_another_request_is_waited_for():
    bench = Bench(budget=64)
    shared = [1, 2, 3, 4] * 8
    for i in range(4):
        bench.scheduler.add(make_request(f"r{i}", [*shared, 10 + i], 3, ignore_eos=True))
    bench.run()
    once = len(shared) + 4 * 3
    assert bench.device.computed_tokens == once


def test_what_a_request_generates_is_found_while_it_runs_and_afterwards():
    bench = Bench(frames=64, block_size=4, budget=64)
    bench.scheduler.add(make_request("first", [1] * 5, 30, ignore_eos=True))
    while len(bench.outputs.get(("first", 0), [])) < 12:
        bench.step()
    for name in ("beside", "after"):
        tokens = [1] * 5 + bench.outputs["first", 0]
        found = bench.scheduler.prefix_hit_tokens
        bench.scheduler.add(make_request(name, tokens, 1, ignore_eos=True))
        bench.step()
        assert bench.scheduler.prefix_hit_tokens - found >= (len(tokens) - 2) // 4 * 4, name
        bench.run()


def test_waiting_requests_with_other_prompts_pass_those_that_wait_for_a_prefix():
    bench = Bench(budget=8)
    shared = [1, 2, 3, 4] * 8
    bench.scheduler.add(make_request("owner", [*shared, 9], 2, ignore_eos=True))
    bench.scheduler.add(make_request("same", [*shared, 8], 2, ignore_eos=True))
    bench.scheduler.add(make_request("other", [30, 31], 2, ignore_eos=True))
    bench.run()
    assert bench.first_step["other"] <= bench.first_step["same"]


def test_first_come_first_served_within_a_class():
    bench = Bench(max_num_seqs=2, budget=8)
    for i in range(6):
        bench.scheduler.add(make_request(f"r{i}", [10 + i, 20 + i], 4, ignore_eos=True, arrival_s=0.0))
    bench.run()
    order = sorted(bench.first_step, key=lambda name: (bench.first_step[name], name))
    assert order == [f"r{i}" for i in range(6)]


def test_urgent_class_goes_first_but_ageing_lets_nobody_starve():
    bench = Bench(max_num_seqs=1, budget=8)
    bench.scheduler.add(make_request("patient", [5, 6], 2, priority=2, ignore_eos=True, arrival_s=0.0))
    for i in range(60):
        bench.scheduler.add(make_request(f"urgent{i}", [10, i], 2, ignore_eos=True, arrival_s=float(i)))
    bench.run()
    overtakers = [name for name, step in bench.first_step.items() if step < bench.first_step["patient"]]
    assert len(overtakers) == 20  # those that arrived within 2 classes * 10 s after it
    assert "urgent0" in overtakers


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 3), st.integers(1, 3), st.integers(1, 12), st.integers(4, 40))
def test_bounded_wait(priority, max_num_seqs, max_tokens, prompt_len):
    """Under a stream of more urgent requests without end, a request of any class starts within a bound of steps."""
    bench = Bench(frames=80, max_num_seqs=max_num_seqs, budget=16)
    prompt = list(range(prompt_len))
    bench.scheduler.add(make_request("low", prompt, max_tokens, priority=priority, ignore_eos=True, arrival_s=0.0))
    bound = 10.0 * priority + (max_num_seqs + 2) * (max_tokens + prompt_len)
    while ("low", 0) not in bench.reasons:
        arrival = make_request(
            f"u{bench.now}", [*prompt, bench.steps], max_tokens, ignore_eos=True, arrival_s=bench.now
        )
        bench.scheduler.add(arrival)
        bench.step()
        assert bench.now <= bound + 10.0 * priority * (max_tokens + prompt_len), "starved"


def test_when_blocks_run_out_the_youngest_is_preempted_and_recomputed():
    bench = Bench(frames=10, block_size=4, max_num_seqs=4, budget=32, caching=False)
    for i in range(3):
        bench.scheduler.add(make_request(f"r{i}", [10 + i] * 4, 20, ignore_eos=True))
    bench.run()
    assert bench.scheduler.preemptions > 0
    for i in range(3):
        assert bench.outputs[f"r{i}", 0] == expected(make_request(f"r{i}", [10 + i] * 4, 20, ignore_eos=True), 0)
    assert list(bench.reasons) == [("r0", 0), ("r1", 0), ("r2", 0)]


def test_a_sequence_that_waits_for_memory_counts_as_one_look_up():
    bench = Bench(frames=6, block_size=4, max_num_seqs=4, budget=32)
    bench.scheduler.add(make_request("runs", [1] * 4, 14, ignore_eos=True))
    bench.scheduler.add(make_request("waits", [2] * 17, 2, ignore_eos=True))
    bench.run()
    assert bench.scheduler.preemptions == 0
    assert bench.first_step["waits"] > 10
    assert (bench.scheduler.prefix_queried_tokens, bench.scheduler.prefix_hit_tokens) == (21, 0)


def test_what_can_never_fit_is_refused_at_once():
    bench = Bench(frames=4, block_size=4, max_num_seqs=2)
    with pytest.raises(RequestTooLargeError, match=r"may grow to 20 tokens, which takes 5 KV blocks .* the pool has 4"):
        bench.scheduler.add(make_request("big", [1] * 10, 10))
    unsaid = make_request("long", [1] * 17, 1)
    unsaid.params.max_tokens = None
    for request, param in ((make_request("big", [1] * 10, 10), "max_tokens"), (unsaid, "prompt")):
        with pytest.raises(PoolTooSmallError) as caught:
            bench.scheduler.add(request)
        assert (caught.value.param, caught.value.blocks) == (param, 5)
        assert ("max_tokens" in caught.value.message) == (param == "max_tokens"), "who gave none cannot lower it"
    with pytest.raises(RequestTooLargeError, match="n is 3, but max_num_seqs"):
        bench.scheduler.add(make_request("wide", [1], 1, n=3))
    with pytest.raises(RequestTooLargeError, match="beam_width is 3, but max_num_seqs"):
        bench.scheduler.add(make_search("wide", [1], 1, 3))
    with pytest.raises(RequestTooLargeError, match="takes 5 KV blocks"):
        bench.scheduler.add(make_search("search", [1] * 4, 6, 2))
    bench.scheduler.add(make_search("just", [1] * 4, 5, 2))
    bench.scheduler.add(make_request("fits", [1] * 10, 7, ignore_eos=True))
    bench.run()
    assert len(bench.outputs["fits", 0]) == 7


def test_a_pool_above_the_least_is_refused_where_rounded_guarantees_leave_less():
    """The guarantees of others are 7 and 19 of 39 blocks, and 8 and 20 of 40."""
    bench = Bench(frames=60)
    for name, share in (("one", "20%"), ("other", "50%")):
        bench.scheduler.set_tenant(name, TenantLimits(guaranteed_blocks=share))
    bench.scheduler.add(make_request("r", [1] * 9, 44, ignore_eos=True))  # 13 blocks
    assert bench.scheduler.least_frames == 39
    with pytest.raises(KVMemoryError, match="could count on 12"):
        bench.scheduler.resize(40, bench.now)
    bench.resize(39)
    bench.run()


def test_who_has_no_room_is_not_looked_at_in_every_step_but_at_once_when_something_ends(monkeypatch):
    bench = Bench(frames=20, budget=64)
    looks = []
    opened = bench.memory.open

    def open_and_note(tokens, *rest):
        looks.append(bench.steps)
        return opened(tokens, *rest)

    bench.scheduler.add(make_request("runs", [1] * 40, 24, ignore_eos=True))
    bench.step()
    monkeypatch.setattr(bench.memory, "open", open_and_note)
    bench.scheduler.add(make_request("waits", [2] * 48, 2, ignore_eos=True, arrival_s=1.0))
    for _ in range(20):
        bench.step()
    assert looks == [1, 5, 9, 13, 17]
    bench.scheduler.abort("runs", bench.now)
    bench.step()
    assert looks[-1] == 21
    bench.run_steps()
    assert len(bench.outputs["waits", 0]) == 2


@pytest.mark.parametrize("priority", [0, 9])
def test_requests_that_are_aborted_while_they_wait_leave_nothing(priority):
    """In the queue, before or behind others."""
    bench = Bench(frames=200, max_num_seqs=1, budget=8)
    bench.scheduler.add(make_request("runs", [9] * 70, 3, ignore_eos=True))
    for number in range(3):
        bench.scheduler.add(make_request(f"waits{number}", [number], 3, ignore_eos=True))
    bench.step()
    for number in range(40):
        prompt = [9] * 60 if number % 2 else [1, number]
        bench.scheduler.add(make_request(f"gone{number}", prompt, 3, priority=priority))
        if number % 8 == 0:
            bench.step()
        bench.scheduler.abort(f"gone{number}", bench.now)
        assert len(bench.scheduler.state.waiting) <= 6, "twice those that wait"
    bench.run()
    assert {name for name, _ in bench.reasons} == {"runs", "waits0", "waits1", "waits2"}


def test_what_a_preempted_sequence_finds_of_its_own_is_no_hit():
    bench = Bench(frames=40, max_num_seqs=8, budget=32)
    for i in range(8):
        bench.scheduler.add(make_request(f"r{i}", [i] * 12, 60, ignore_eos=True))
    bench.run()
    assert bench.scheduler.preemptions > 0
    assert (bench.scheduler.prefix_queried_tokens, bench.scheduler.prefix_hit_tokens) == (8 * 12, 0)


def test_who_waits_for_many_blocks_of_another_is_looked_at_once(monkeypatch):
    """Not for each block: a step would cost as much as there are that wait. Once they are there, it begins at once."""
    bench, prefix = Bench(frames=128, max_num_seqs=8, budget=16), [9] * 80
    for name in "ab":
        bench.scheduler.set_tenant(name, TenantLimits())
    bench.scheduler.add(make_request("stream", [5], 90, ignore_eos=True, tenant="b"))
    bench.scheduler.add(make_request("ahead", [6] * 90, 1, tenant="a"))
    while ("ahead", 0) not in bench.reasons:
        bench.step()
    looks, peek = [], bench.memory.peek
    monkeypatch.setattr(bench.memory, "peek", lambda *args: (looks.append(bench.steps), peek(*args))[1])
    for i in range(5):
        bench.scheduler.add(make_request(f"r{i}", [*prefix, i, 2], 3, ignore_eos=True, tenant="a"))
    bench.run()
    assert len(looks) == 5 + 4, "the first does not wait"
    assert max(looks) - min(looks) >= 80 // 8, "a prompt of a tenant that is ahead takes its time"
    assert bench.first_step["r4"] <= max(looks) + 2


def test_a_sequence_that_waits_for_a_block_can_leave():
    pending, request = PendingPrefixes(), make_request("r", [1], 1)
    pending.add("owner", [b"a", b"b", b"c"], 0)
    stays, leaves = (Sequence(request, i, Precedence(0, i, 0), [1]) for i in range(2))
    for sequence in (leaves, stays):
        assert pending.wait([b"a", b"b", b"x"], 0, sequence)
    assert pending.leave(leaves)
    assert not pending.leave(leaves)
    assert pending.computed("owner", 1) == []
    assert pending.computed("owner", 2) == [stays]
    assert pending.drop("owner") == []
    assert len(pending) == 0
