"""Belady's rule finds the most that any choice finds, and no policy of the real memory manager finds more."""

from __future__ import annotations

from itertools import combinations

import pytest
from benchmarks.replay.best_eviction import Visit, best_hits
from benchmarks.replay.eviction import replay_policy, visit_of
from hypothesis import given, settings
from hypothesis import strategies as st

from pagemill.arguments import arguments_of
from pagemill.config import EngineConfig
from pagemill.memory.eviction import POLICIES
from pagemill.simulate.trace import MOONCAKE_BLOCK, TracedRequest


@st.composite
def traces(draw, most_requests, most_blocks):
    """Prompts that are paths in a tree: each follows an earlier one for a while, then goes its own way."""
    paths: list[tuple[int, ...]] = []
    fresh = 0
    requests = []
    for number in range(draw(st.integers(1, most_requests))):
        base = draw(st.sampled_from(paths)) if paths else ()
        path = base[: draw(st.integers(0, len(base)))]
        for _ in range(draw(st.integers(0 if path else 1, max(1, most_blocks - len(path))))):
            path = (*path, fresh)
            fresh += 1
        path = path[:most_blocks]
        paths.append(path)
        short = draw(st.sampled_from([0, 0, 1, 200]))
        prompt_len = MOONCAKE_BLOCK * len(path) - short
        requests.append(TracedRequest(number, float(number), prompt_len, draw(st.sampled_from([1, 2, 600])), path))
    return requests


def most_hits(visits: list[Visit], capacity: int) -> int:
    """By trying every set of blocks that could be kept after every request."""
    reachable = {frozenset[int](): 0}
    for visit in visits:
        after: dict[frozenset[int], int] = {}
        for kept, hits in reachable.items():
            for index in range(visit.num_wanted):
                if visit.chain[index] not in kept:
                    break
                hits += 1
            others = kept - set(visit.chain)
            room = capacity - visit.num_held
            for count in range(min(room, len(others)) + 1):
                for chosen in combinations(sorted(others), count):
                    state = frozenset(chosen) | frozenset(visit.chain)
                    after[state] = max(after.get(state, 0), hits)
        reachable = after
    return max(reachable.values())


@settings(max_examples=150, deadline=None)
@given(traces(7, 3), st.integers(0, 3))
def test_nothing_finds_more(trace, extra):
    visits = [visit_of(request) for request in trace]
    capacity = max(visit.num_held for visit in visits) + extra
    assert sum(best_hits(visits, capacity)) == most_hits(visits, capacity)


@settings(max_examples=100, deadline=None)
@given(traces(25, 4), st.integers(0, 12), st.sampled_from(sorted(POLICIES)))
def test_no_policy_finds_more(trace, extra, name):
    visits = [visit_of(request) for request in trace]
    capacity = max(visit.num_held for visit in visits) + extra
    found = replay_policy(trace, visits, capacity, POLICIES[name](0.1))
    assert all(hits <= visit.num_wanted for hits, visit in zip(found, visits, strict=True))
    assert sum(found) <= sum(best_hits(visits, capacity))


def test_a_cache_that_holds_everything_finds_everything():
    trace = [TracedRequest(i, float(i), 1100, 1, (0, 1, 2 + i)) for i in range(5)]
    visits = [visit_of(request) for request in trace]
    assert best_hits(visits, 100) == replay_policy(trace, visits, 100, POLICIES["lru"](0.0)) == [0, 2, 2, 2, 2]


def test_what_the_future_is_worth():
    a, b, c = ((10 * i, 10 * i + 1) for i in (1, 2, 3))
    visits = [Visit(chain, 2, 2) for chain in (a, b, c, a, b)]
    # Room for one beside the one that is served: a is kept through b and c, or b through c and a.
    assert sum(best_hits(visits, 4)) == 2
    assert sum(best_hits(visits, 5)) == 3
    with pytest.raises(ValueError, match="holds 2 blocks"):
        best_hits(visits, 1)


def test_a_block_that_is_computed_again_anyway_is_not_kept_until_then():
    # The fourth prompt is all of one block, which it has to compute: keeping block 1 until then would be in vain.
    visits = [Visit((1,), 1, 1), Visit((2,), 1, 1), Visit((3,), 1, 1), Visit((1,), 0, 1), Visit((2,), 1, 1)]
    assert best_hits(visits, 2) == [0, 0, 0, 0, 1]


def test_all_policies_of_the_configuration_are_replayed():
    assert tuple(POLICIES) == arguments_of(EngineConfig)["eviction_policy"].choices
