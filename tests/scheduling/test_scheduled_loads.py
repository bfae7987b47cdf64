"""Blocks that are loaded from a lower tier instead of computed."""

from __future__ import annotations

from itertools import chain, count, repeat

from scheduler_bench import Bench, expected, make_request

from pagemill.memory.digest import extend_chain
from pagemill.scheduling import loading
from pagemill.scheduling.sequence import Precedence, Sequence


def run_one_after_another(tier_loses) -> Bench:
    """A prompt of eight blocks; one that needs all frames but one; the first again."""
    bench = Bench(frames=17, tier=1)
    assert bench.tier is not None
    bench.tier.random.random = lambda: next(tier_loses)  # type: ignore[method-assign]
    first = [1, 2, 3, 4] * 8 + [9]
    for name, prompt in (("first", first), ("flood", list(range(20)) * 3), ("again", first)):
        bench.scheduler.add(make_request(name, prompt, 2, ignore_eos=True))
        bench.run()
    assert bench.outputs["again", 0] == bench.outputs["first", 0]
    return bench


def test_what_was_evicted_is_loaded_instead_of_computed():
    bench = run_one_after_another(repeat(0.0))
    assert bench.tier is not None
    assert bench.tier.arrived == 7
    assert bench.device.computed_tokens == 34 + 61 + 2


def test_what_a_load_lost_is_computed():
    bench = run_one_after_another(chain([0.0] * 3, [1.0], repeat(0.0)))
    assert bench.device.computed_tokens == 34 + 61 + 34 - 4 * 4


def test_of_a_prompt_whose_windows_went_down_what_the_pool_still_has_is_not_loaded():
    """Blocks that a window has left are evicted first, full ones before it stay: both are found together."""
    bench = Bench(frames=20, windows=(None, 12), tier=1)
    assert bench.tier is not None
    bench.tier.random.random = lambda: 0.0  # type: ignore[method-assign]
    first = make_request("first", [1, 2, 3, 4] * 6 + [9], 2, ignore_eos=True)
    bench.scheduler.add(first)
    bench.run()
    digests: list[bytes] = []
    extend_chain(digests, first.root, first.prompt_token_ids, 4)
    others = count()
    while bench.memory.peek(digests, first.root) == 6:
        bench.scheduler.add(make_request(f"other{next(others)}", [10 + next(others)] * 5, 1))
        bench.run()
    lacking = bench.memory.missing(digests)
    assert bench.memory.peek(digests, first.root) == 0
    assert 0 < len(lacking) < 4, "most of it is in the pool"
    computed = bench.device.computed_tokens
    bench.scheduler.add(make_request("again", first.prompt_token_ids, 2, ignore_eos=True))
    bench.run()
    assert bench.outputs["again", 0] == expected(first, 0)
    assert bench.tier.arrived == len(lacking)
    assert bench.device.computed_tokens - computed == 1 + 1


def test_no_store_is_asked_while_there_is_no_room_beside_the_cached_blocks_that_a_load_would_hold():
    bench = Bench(frames=24, block_size=4, budget=128, tier=1, policy="lfu")
    assert bench.tier is not None
    document = [20 + i for i in range(65)]
    bench.scheduler.add(make_request("first", document, 1))
    bench.run_steps()
    bench.scheduler.add(make_request("runs", [500 + i for i in range(40)], 30, ignore_eos=True))
    for _ in range(3):
        bench.step()
    again = make_request("again", document, 4, ignore_eos=True, arrival_s=5.0)
    digests: list[bytes] = []
    extend_chain(digests, again.root, document, 4)
    assert 0 < bench.memory.peek(digests, again.root) < len(digests)
    asked = bench.tier.asked
    bench.scheduler.add(again)
    for _ in range(12):
        bench.step()
    assert (bench.scheduler.num_running, bench.tier.asked) == (1, asked)
    bench.run()
    assert bench.outputs["again", 0] == expected(again, 0)


def test_a_context_that_streams_loads_what_the_pool_and_the_streamed_frames_have_lost():
    """The blocks that it has found in the pool are part of what it needs there, and count once."""
    bench = Bench(frames=24, budget=16, lower=60, tier=1)
    assert bench.tier is not None
    bench.tier.random.random = lambda: 0.0  # type: ignore[method-assign]
    document = [1, 2, 3, 4] * 40 + [9]
    bench.scheduler.add(make_request("first", document, 1))
    bench.run()
    bench.scheduler.add(make_request("other", [30 + i % 7 for i in range(21)], 1))
    bench.run()
    bench.scheduler.add(make_request("runs", [40] * 8, 20, ignore_eos=True))
    for _ in range(2):
        bench.step()
    arrived = bench.tier.arrived
    again = make_request("again", document, 2, ignore_eos=True)
    bench.scheduler.add(again)
    bench.run()
    assert bench.tier.arrived > arrived
    assert bench.outputs["again", 0] == expected(again, 0)


def test_blocks_that_did_not_arrive_are_remembered_up_to_a_limit(monkeypatch):
    """Here those who would have asked for them next are gone; the last one is computed once, then loaded again."""
    monkeypatch.setattr(loading, "MOST_MISSED", 3)
    asked: list[int] = []

    def stored(digests, found, preempted) -> int:
        asked.append(len(digests))
        return len(digests)

    loads = loading.Loading(Bench().memory, 16, stored)

    def load(salt: int) -> None:
        request = make_request(f"r{salt}", [salt] * 13, 1)
        sequence = Sequence(request, 0, Precedence(0.0, 0, 0), request.prompt_token_ids)
        extend_chain(sequence.digests, request.root, sequence.tokens, 4)
        if (begun := loads.begin(sequence, 0, 0, None, 0.0)) is not None:
            (one,) = loads.take_begun()
            loads.finish(begun.id, [False] * len(one.blocks), 0.0)

    for salt in range(5):
        load(salt)
    asked.clear()
    for salt in (0, 4, 4):
        load(salt)
    assert asked == [3, 0, 3]
