"""A modelled fleet: every request gets its tokens, blocks travel where that pays, and prompts are computed apart."""

from __future__ import annotations

import pytest
from benchmarks.replay.modelled_fleet import ModelledFleet
from benchmarks.replay.peer_blocks import Network

from pagemill.planner.replica import Setup
from pagemill.simulate.step_time import COSTS, KVShape, StepTimes
from pagemill.simulate.trace import TracedRequest

TOKEN_S = 1e-4
TIMES = StepTimes(
    {**dict.fromkeys(COSTS, 0.0), "step": 0.005, "token to 8": TOKEN_S, "token to 32": TOKEN_S,
     "token to 128": TOKEN_S, "token beyond": TOKEN_S}, KVShape((None,), 2, 64, 2), {}
)  # fmt: skip
SETUP = Setup(4096 * TIMES.shape.frame_bytes(16), max_num_seqs=32)
TRACE = [
    TracedRequest(i, 0.15 * i, 1536 + 7 * i % 100, 2 + 5 * i % 40, (i % 4, 100 + i % 8, 200 + i, 400 + i))
    for i in range(40)
]


def serve(trace=TRACE, **given):
    fleet = ModelledFleet(SETUP, TIMES, 3, **given)
    outcome = fleet.run(trace)
    for replica in fleet.replicas:
        replica.engine.scheduler.memory.check()
        assert replica.engine.scheduler.memory.stats().frames_active == 0
    return fleet, outcome


def block_s(share_of_computing: float) -> float:
    return share_of_computing * 16 * TOKEN_S


@pytest.mark.parametrize("apart", [0, 1, 2])
@pytest.mark.parametrize("share", [0.02, 50.0])
def test_every_request_gets_its_tokens_once(apart, share):
    _, outcome = serve(network=Network(block_s(share), 1e-4), prefill_replicas=apart)
    assert [one.num_tokens for one in outcome.served] == [one.output_len for one in TRACE]
    assert all(one.request.arrival_s < one.first_token_s <= one.finished_s for one in outcome.served)
    assert len(outcome.gaps_s) == sum(one.output_len - 1 for one in TRACE)
    assert outcome.goodput_tokens_per_s == pytest.approx(outcome.output_tokens_per_s)


def test_blocks_travel_where_that_takes_less_time_than_computing():
    alone = serve()[0]
    fast = serve(network=Network(block_s(0.02), 1e-4))[0]
    slow = serve(network=Network(block_s(50.0), 1e-4))[0]
    computed = [sum(each.computed for each in fleet.replicas) for fleet in (alone, fast, slow)]
    fetched = [sum(each.peers.fetched for each in fleet.replicas) for fleet in (fast, slow)]
    assert computed[1] < computed[0]
    assert fetched[0] > 0
    assert fetched[1] <= 2 * 6 * 64, "each pair tries two chains over a slow link, and leaves it alone"


def test_prompts_are_computed_apart_and_answers_spread():
    fleet, outcome = serve(network=Network(block_s(0.02), 1e-4), prefill_replicas=1)
    first, *others = fleet.replicas
    assert first.computed > 2 * sum(each.computed for each in others)
    assert all(each.peers.fetched > 0 for each in others)
    assert outcome == serve(network=Network(block_s(0.02), 1e-4), prefill_replicas=1)[1]


def test_another_way_to_choose_takes_the_routers_place():
    seen: list[list[int]] = []

    def last(request, under_way):
        seen.append([*under_way])
        return 2

    fleet, outcome = serve(TRACE[:8], choose=last)
    assert [one.num_tokens for one in outcome.served] == [one.output_len for one in TRACE[:8]]
    assert [each.computed > 0 for each in fleet.replicas] == [False, False, True]
    assert seen[0] == [0, 0, 0]
    assert 0 < max(counts[2] for counts in seen) < 8
    assert {(*counts[:2],) for counts in seen} == {(0, 0)}
    in_turn = serve(TRACE[:6], policy="round-robin")[0]
    lens = [one.prompt_len for one in TRACE[:6]]
    found = sum(one.num_cached_tokens for one in in_turn.outcome.served)
    assert sum(each.computed for each in in_turn.replicas) == sum(lens) - found
    assert all(each.computed > 1536 for each in in_turn.replicas)


def test_a_timeout_ends_a_request_wherever_it_is():
    trace = [TracedRequest(i, 0.01 * i, 1000, 30, timeout=1.0) for i in range(40)]
    _, outcome = serve(trace, network=Network(block_s(0.02), 1e-4), prefill_replicas=1)
    assert 0 < sum(one.timed_out for one in outcome.served) < 40
    assert len(outcome.finished) + sum(one.timed_out for one in outcome.served) == 40
    assert all(one.finished_s <= one.request.deadline_s for one in outcome.finished)


def test_a_link_carries_one_transfer_at_a_time_each_way():
    network = Network(block_s=0.1, latency_s=0.01)
    assert network.send(0, 1, 10, now=5.0) == pytest.approx(6.01)
    assert network.send(0, 2, 1, now=5.0) == pytest.approx(6.12), "it sends to another"
    assert network.send(2, 1, 1, now=5.0) == pytest.approx(6.12), "that one receives from another"
    assert network.send(2, 0, 1, now=9.0) == pytest.approx(9.11)
