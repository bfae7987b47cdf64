"""Host memory below the simulated pool: the real scheduler swaps over a link that takes its time."""

from __future__ import annotations

import math

import pytest

from pagemill.memory.manager import MemoryManager
from pagemill.scheduling.scheduler import Scheduler
from pagemill.simulate.lower_tier import LowerTier
from pagemill.simulate.simulator import replay
from pagemill.simulate.step_time import COSTS, KVShape, StepTimes
from pagemill.simulate.trace import TracedRequest

TOKEN_S = 0.01
TIMES = StepTimes(
    {**dict.fromkeys(COSTS, 0.0), "step": 0.1, "token to 8": TOKEN_S, "token to 32": TOKEN_S, "token to 128": TOKEN_S,
     "token beyond": TOKEN_S}, KVShape((None,), 2, 64, 2), {},
)  # fmt: skip
TRACE = [TracedRequest(number, 0.0, 80, 40) for number in range(6)]
"""30 blocks of 4 each, in a pool for 3 of them: all are admitted, and some preempted."""


def serve(mode, block_s, trace=TRACE, frames=100, capacity=1000, target_s=math.inf):
    """Returns the replay, the tier, and how many tokens were computed again."""
    memory = MemoryManager(frames, 4, [None], saves_evicted=True)
    tier = LowerTier(memory, capacity, block_s, mode)
    scheduler = Scheduler(
        memory,
        max_num_seqs=8,
        max_num_batched_tokens=128,
        eos_token_ids=frozenset(),
        ageing_s=10.0,
        stored=tier.stored,
        swap_blocks=tier.swap_blocks,
        target_tpot_s=target_s,
    )
    outcome = replay(trace, scheduler, TIMES, tier=tier)
    assert [one.num_tokens for one in outcome.served] == [request.output_len for request in trace]
    memory.check()
    assert memory.stats().frames_active == 0
    return outcome, tier, scheduler.state.recomputed_tokens


def test_swapping_saves_what_recomputing_computes_again():
    swapped, swap, again_swapped = serve("swap", 0.001)
    computed, recompute, again_computed = serve("recompute", 0.001)
    assert swapped.preemptions > 0
    assert computed.preemptions > 0
    assert swap.loaded > 0
    assert recompute.loaded == 0
    assert again_swapped < again_computed / 4
    assert swapped.end_s < computed.end_s, "a block crosses the link in a fortieth of the time of computing it"


def test_the_mode_auto_loads_where_the_link_is_faster_than_computing():
    """Computing a block takes 0.04 s, and its part of a step. The first loads tell how fast the link is."""
    many = [TracedRequest(number, 0.0, 80, 40) for number in range(40)]
    fast, slow = serve("auto", 0.001, many)[1], serve("auto", 1.0, many)[1]
    assert fast.loaded == serve("swap", 0.001, many)[1].loaded
    assert 0 < slow.loaded < serve("swap", 1.0, many)[1].loaded / 2


@pytest.mark.parametrize("frames", [100, 180])
def test_a_pool_that_host_memory_holds_as_a_whole_is_filled_at_little_cost(frames):
    """Without a target of the user's own. Where host memory is one block short, requests wait for room instead."""
    trace = [TracedRequest(number, 0.0, 80, 40) for number in range(40)]
    filled, tier, again = serve("auto", 1e-4, trace, frames, capacity=frames, target_s=None)
    foreseen = serve("auto", 1e-4, trace, frames, capacity=frames - 1, target_s=None)[0]
    assert filled.preemptions > 0
    assert tier.loaded > 0
    assert foreseen.preemptions == 0
    assert again < 0.02 * sum(one.length for one in trace)
    assert filled.end_s < foreseen.end_s


def test_a_step_waits_until_saved_blocks_are_out_of_their_frames():
    outcome, tier, _ = serve("recompute", 0.5)
    assert tier.saved > 0
    assert tier.saving_s == pytest.approx(0.5 * tier.saved)
    assert outcome.end_s == pytest.approx(outcome.busy_s + tier.saving_s)


def test_a_load_takes_the_links_time_and_its_request_waits_for_it():
    """The first prompt is evicted by the second, and asked for again when nothing else runs: a block is left."""
    trace = [TracedRequest(0, 0.0, 80, 1, (7,)), TracedRequest(1, 50.0, 80, 1), TracedRequest(2, 100.0, 80, 1, (7,))]
    first_token_s = []
    for block_s in (0.0, 0.02):
        outcome, tier, _ = serve("auto", block_s, trace, frames=21)
        assert tier.loaded == 18
        assert outcome.served[2].num_cached_tokens == 76
        first_token_s.append(outcome.served[2].ttft_s)
    # What the second prompt has left is saved first, to make room.
    assert first_token_s[1] - first_token_s[0] == pytest.approx((18 + 18) * 0.02, abs=0.05)


def test_a_small_tier_forgets_what_was_used_least_recently():
    outcome, tier, again = serve("swap", 0.001, capacity=4)
    assert outcome.preemptions > 0
    assert tier.loaded < serve("swap", 0.001)[1].loaded
    assert again > serve("swap", 0.001)[2]


def test_a_load_runs_beside_steps_and_ends_no_sooner_for_that():
    """The last request loads while another one generates, which takes a block only every fourth step."""
    before = [TracedRequest(0, 0.0, 80, 1, (7,)), TracedRequest(1, 50.0, 220, 1)]
    beside = [TracedRequest(2, 100.0, 4, 60), TracedRequest(3, 100.3, 80, 1, (7,))]
    outcome, tier, _ = serve("auto", 0.1, [*before, *beside], frames=60)
    generating, loading = outcome.served[2:]
    assert tier.loaded > 10
    assert loading.ttft_s >= 0.1 * (tier.loaded + tier.loaded), "as many blocks make room"
    assert generating.first_token_s < loading.first_token_s < generating.finished_s
