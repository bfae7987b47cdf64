"""Sequences that fork, and beams: they share blocks until they write apart."""

from __future__ import annotations

import itertools
from itertools import chain, combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduler_bench import EOS, Bench, expected, expected_of_search, make_request, make_search

from pagemill.sampling.params import BeamSearchParams, TokenLogprobs
from pagemill.scheduling import preemption
from pagemill.scheduling.beam import BeamSearch
from pagemill.scheduling.forecast import TenantLengths
from pagemill.tenant_limits import TenantLimits


def test_a_fork_takes_no_block_until_it_diverges():
    bench = Bench(frames=32, budget=64)
    bench.scheduler.add(make_request("r", [1] * 10, 6, n=3, ignore_eos=True))
    bench.step()
    assert bench.memory.stats().frames_active == 3
    bench.step()
    assert bench.memory.stats().frames_active == 5  # two of the three wrote into the shared partial block: two copies
    assert bench.memory.stats().copies == 2
    bench.run()


def test_a_running_sequence_forks_into_another_request_without_a_block():
    bench = Bench(frames=32, budget=64)
    origin = make_request("origin", [1] * 10, 20, ignore_eos=True)
    bench.scheduler.add(origin)
    for _ in range(4):
        bench.step()
    held = bench.memory.stats().frames_active
    prompt = bench.scheduler.state.requests["origin"][0].tokens.copy()
    assert len(prompt) == 14
    child = make_request("child", prompt, 9, n=2, seed=9)
    bench.scheduler.add(child, ("origin", 0))
    assert bench.memory.stats().frames_active == held
    assert bench.scheduler.num_running == 2
    computed = bench.device.computed_tokens
    bench.step()
    assert bench.device.computed_tokens == computed + 2
    bench.run()
    assert bench.outputs["origin", 0] == expected(origin, 0)
    assert [bench.outputs["child", i] for i in range(2)] == [expected(child, i) for i in range(2)]


@pytest.mark.parametrize("why", ["ended", "no row", "another namespace", "other tokens", "preempted"])
def test_a_fork_of_what_is_not_running_is_a_prompt_like_others(why):
    bench = Bench(frames=32, budget=64, max_num_seqs=1 if why == "no row" else 4)
    origin = make_request("origin", [1] * 10, 20, ignore_eos=True)
    bench.scheduler.add(origin)
    for _ in range(4):
        bench.step()
    prompt = bench.scheduler.state.requests["origin"][0].tokens.copy()
    if why == "ended":
        bench.scheduler.abort("origin", bench.now)
    elif why == "preempted":
        preemption.preempt(bench.scheduler.state, bench.scheduler.state.requests["origin"][0], bench.now)
    elif why == "other tokens":
        prompt[-2] += 1
    child = make_request("child", prompt, 5, salt="x" if why == "another namespace" else "", ignore_eos=True)
    running = bench.scheduler.num_running
    bench.scheduler.add(child, ("origin", 0))
    assert bench.scheduler.num_running == running
    bench.run()
    assert bench.outputs["child", 0] == expected(child, 0)


def test_beams_share_all_but_the_blocks_they_have_written_apart():
    bench = Bench(frames=32, budget=64)
    request = make_search("r", [1] * 16, 8, 3, ignore_eos=True)
    bench.scheduler.add(request)
    saved = 0
    for _ in range(7):
        bench.step()
        beams = bench.scheduler.state.requests["r"]
        assert len(beams) == 3
        tables = [beam.table.blocks[0].tolist() for beam in beams]
        for (one, first), (other, second) in combinations(zip(beams, tables, strict=True), 2):
            common = [a == b for a, b in zip(one.tokens, other.tokens, strict=True)].index(False)
            assert first[: common // 4] == second[: common // 4]
        distinct = len(set(chain(*tables)))
        assert bench.memory.stats().frames_active == distinct
        saved += sum(map(len, tables)) - distinct
    assert saved >= 7 * 2 * 4
    bench.run()
    assert bench.found["r"] == expected_of_search(request)


def test_a_preempted_search_computes_what_its_beams_share_once():
    bench = Bench(frames=15, budget=64, caching=False, max_num_seqs=4)
    older = make_request("older", [2] * 20, 30, ignore_eos=True)
    request = make_search("r", [1] * 16, 12, 3, ignore_eos=True)
    bench.scheduler.add(older)
    bench.scheduler.add(request)
    for _ in range(12):
        if bench.scheduler.preemptions == 0:
            bench.step()
    (leader,) = bench.scheduler.state.requests["r"]
    common, before = len(leader.tokens), bench.device.computed_tokens - len(bench.outputs["older", 0])
    assert 16 <= common < len(leader.group.parked[0])
    for _ in range(40):
        if leader.group.parked:
            bench.step()
    assert not leader.group.parked
    assert bench.device.computed_tokens - len(bench.outputs["older", 0]) == before + common
    bench.run()
    assert bench.found["r"] == expected_of_search(request)
    assert bench.outputs["older", 0] == expected(older, 0)


def test_a_parked_group_names_only_the_blocks_that_its_beams_have_in_common():
    bench = Bench(frames=32, budget=64)
    bench.scheduler.add(make_search("r", [1] * 16, 12, 3, ignore_eos=True))
    bench.step()
    (leader, *_) = bench.scheduler.state.requests["r"]
    while len(leader.tokens) % 4:  # its last block is then full, and no other beam's
        bench.step()
        leader = leader.group.beams[0]
    assert len(leader.digests) == len(leader.tokens) // 4
    preemption.preempt(bench.scheduler.state, leader, bench.now)
    (leader,) = bench.scheduler.state.requests["r"]
    assert len(leader.digests) == len(leader.tokens) // 4 < len(leader.group.parked[0]) // 4
    bench.run()


@pytest.mark.parametrize(
    ("going_on", "goes_on"), [(-0.2, {False: True, "never": True}), (-5.0, {False: False, "never": True}), (-9.0, {})]
)
@pytest.mark.parametrize("early_stopping", [True, False, "never"])
def test_a_search_with_all_its_hypotheses_ends_when_it_may(going_on, goes_on, early_stopping):
    search = BeamSearch(BeamSearchParams(2, 10, early_stopping=early_stopping), frozenset([EOS]), 10)
    first = TokenLogprobs([0, EOS, 1, 2], [0.0, -1.0, -1.5, -2.0], 1)
    assert search.advance([[]], [first]) == [(0, 1), (0, 2)]
    second = TokenLogprobs([0, EOS, 3, 4], [0.0, -0.1, going_on, -9.0], 1)
    third = TokenLogprobs([0, 5, EOS, 6], [0.0, -9.5, -9.6, -9.7], 1)
    chosen = search.advance([[1], [2]], [second, third])
    assert bool(chosen) == goes_on.get(early_stopping, False)
    assert [found.token_ids for found in search.hypotheses] == [[1, EOS], [EOS]]
    assert [found.score for found in search.hypotheses] == [pytest.approx(-1.6 / 2), -1.0]


def test_a_spare_candidate_does_not_end_a_search():
    search = BeamSearch(BeamSearchParams(2, 10), frozenset([EOS]), 10)
    candidates = TokenLogprobs([0, 1, 2, EOS], [0.0, -1.0, -1.5, -1.6], 1)
    assert search.advance([[]], [candidates]) == [(0, 1), (0, 2)]
    assert search.hypotheses == []


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("max_running", [None, 4])
def test_a_request_for_many_sequences_begins_with_the_rows_that_are_free(caching, max_running):
    """The others follow as rows come free: no row waits for them, and each gets the tokens of its seed."""
    bench = Bench(frames=200, max_num_seqs=6, budget=32, caching=caching)
    bench.scheduler.set_tenant("default", TenantLimits(max_running=max_running))
    for i in range(3):
        bench.scheduler.add(make_request(f"r{i}", [i] * 5, 4 + 9 * i, ignore_eos=True))
    bench.step()
    wide = make_request("wide", [9] * 30, 7, n=4, ignore_eos=True)
    bench.scheduler.add(wide)
    bench.step()
    tenant = bench.scheduler.tenants["default"]
    assert tenant.rows == (max_running or 6)
    assert tenant.waiting == 7 - tenant.rows
    assert tenant.must_wait(0) == 0, "max_waiting counts none of a request that has begun"
    bench.run()
    assert [bench.outputs["wide", index] for index in range(4)] == [expected(wide, index) for index in range(4)]
    if caching:
        assert bench.scheduler.prefix_queried_tokens == 3 * 5 + 30, "what it has computed itself is no hit"
        assert bench.scheduler.prefix_hit_tokens == 0
        assert bench.device.computed_tokens < 3 * 5 + 30 + 3 * 2 + (3 + 12 + 21) + 4 * 6


def test_a_request_for_many_sequences_begins_with_as_many_as_memory_is_foreseen_for():
    bench = Bench(frames=40, max_num_seqs=16, budget=32)
    bench.scheduler.state.lengths = TenantLengths()
    bench.scheduler.add(make_request("runs", [1] * 5, 60, ignore_eos=True))
    bench.step()
    wide = make_request("wide", [9] * 8, 30, n=16, ignore_eos=True)
    bench.scheduler.add(wide)
    bench.step()
    assert bench.scheduler.num_running == 2
    assert len(bench.scheduler.state.requests["wide"][0].child_rows) < 15
    bench.run()
    assert bench.scheduler.preemptions == 0
    assert [bench.outputs["wide", index] for index in range(16)] == [expected(wide, index) for index in range(16)]


@pytest.mark.parametrize("ends", ["abort", "fault"])
def test_what_ends_a_request_ends_its_sequences_that_wait_for_rows(ends):
    bench = Bench(frames=200, max_num_seqs=4, budget=32)
    bench.scheduler.add(make_request("runs", [1] * 5, 40, ignore_eos=True))
    bench.step()
    bench.scheduler.add(make_request("wide", [9] * 40, 7, n=4, ignore_eos=True))
    bench.step()
    assert len(bench.scheduler.state.requests["wide"]) == 2
    if ends == "abort":
        bench.scheduler.abort("wide", bench.now)
        assert bench.scheduler.num_waiting == 0
    else:
        bench.step(frozenset([bench.scheduler.state.requests["wide"][0].row]))
    bench.run()
    if ends == "fault":
        assert [bench.reasons["wide", index] for index in range(4)] == ["error"] * 3 + ["length"]


@settings(max_examples=8, deadline=None)
@given(st.integers(2, 8), st.integers(1, 20), st.integers(1, 30), st.booleans(), st.sampled_from(["0%", "40%"]))
def test_sequences_that_are_asked_for_together_cost_others_no_more_than_apart(
    width, max_tokens, prompt_len, caching, guaranteed
):
    """A tenant always has so many sequences of one request under way, or of as many requests, beside another tenant's
    of one row each. No row waits empty for others."""
    answered = []
    for n in (1, width):
        bench, number = Bench(frames=400, max_num_seqs=8, budget=16, caching=caching), itertools.count()
        for name in ("calm", "wide"):
            bench.scheduler.set_tenant(name, TenantLimits(guaranteed_blocks=guaranteed))

        def keep(tenant, live, *request, bench=bench, number=number, **params):
            while sum(name.startswith(tenant) for name in bench.scheduler.request_ids()) < live:
                name = f"{tenant}{next(number)}"
                params |= {"ignore_eos": True, "tenant": tenant, "arrival_s": bench.now}
                bench.scheduler.add(make_request(name, *request, **params))

        for _ in range(60):
            keep("calm", 10, [1, 2, 3], 8)
            keep("wide", width // n, [next(number)] * prompt_len, max_tokens, n=n)
            bench.step()
        answered.append(sum(len(tokens) for (name, _), tokens in bench.outputs.items() if name.startswith("calm")))
        bench.run()
    apart, together = answered
    assert together >= 0.8 * apart
