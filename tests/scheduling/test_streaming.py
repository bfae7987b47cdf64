"""Contexts longer than the pool: what is streamed, what stays, and who may begin beside them."""

from __future__ import annotations

from itertools import chain, repeat

import pytest
from scheduler_bench import LOWER, Bench, expected, expected_of_search, make_request, make_search

from pagemill.errors import KVMemoryError, RequestTooLargeError
from pagemill.scheduling.unstreaming import PATIENCE

FRAMES, BUDGET = 12, 16
"""Frames of 4 tokens; the most that a step writes is 4 blocks, or 5."""


@pytest.mark.parametrize("windows", [(None,), (None, 6), (9, None, None)])
@pytest.mark.parametrize("depth", [1, 2])
def test_a_context_several_times_the_pool_is_computed(windows, depth):
    bench = Bench(frames=FRAMES * len(windows), windows=windows, budget=BUDGET, lower=200, depth=depth)
    request = make_request("long", [3, 4] * 90, 40, ignore_eos=True)
    bench.scheduler.add(request)
    bench.step()
    while bench.scheduler.has_work():
        bench.step()
    assert bench.outputs["long", 0] == expected(request, 0)
    assert bench.scheduler.preemptions == 0
    bench.assert_all_free()


def test_what_can_not_be_streamed_is_refused():
    bench = Bench(frames=FRAMES, budget=BUDGET, lower=20)
    bench.scheduler.add(make_request("fits", [3] * 120, 9))
    with pytest.raises(RequestTooLargeError, match="pool has 12"):
        bench.scheduler.add(make_request("larger", [3] * 120, 10))
    windowed = Bench(frames=FRAMES, budget=BUDGET, windows=(60,), lower=100)
    with pytest.raises(RequestTooLargeError, match="pool has 12"):
        windowed.scheduler.add(make_request("window", [3] * 120, 9))
    bench.run()


def test_a_search_counts_on_no_lower_frames_since_what_beams_share_is_not_streamed():
    bench = Bench(frames=FRAMES, budget=6, lower=60)
    with pytest.raises(RequestTooLargeError, match=r"takes 13 KV blocks .* pool has 12"):
        bench.scheduler.add(make_search("larger", [1] * 19, 9, 3))
    searches = [make_search(f"fits{prompt_len}", [1] * prompt_len, 9, 3) for prompt_len in (16, 20)]
    for search in searches:
        bench.scheduler.add(search)
    with pytest.raises(KVMemoryError, match=r"'fits20' .* takes 11 blocks"):
        bench.scheduler.resize(10, bench.now)
    bench.run()
    for search in searches:
        assert bench.found[search.request_id] == expected_of_search(search)


def test_residency_is_reported_and_the_oldest_blocks_go():
    bench = Bench(frames=FRAMES, budget=BUDGET, lower=100)
    bench.scheduler.add(make_request("long", [3, 4] * 40, 30, ignore_eos=True))
    while len(bench.outputs.get(("long", 0), [])) < 29:
        bench.step()
    (sequence,) = bench.scheduler.state.running
    frames = bench.memory.frames(sequence.table, 0)
    below = [frame >= 1000 for frame in frames]
    assert below == sorted(below, reverse=True)
    assert bench.memory.residency(sequence.table) == (below.count(False), below.count(True)) == (FRAMES, 15)
    assert bench.memory.stats().blocks_streamed == 15
    bench.run()
    assert sequence.residency == (FRAMES, 16)


def test_a_long_context_makes_room_for_others_without_losing_anything():
    bench = Bench(frames=FRAMES, budget=BUDGET, lower=100)
    long = make_request("long", [3, 4] * 40, 60, ignore_eos=True)
    bench.scheduler.add(long)
    while not bench.outputs:
        bench.step()
    short = make_request("short", [8] * 15, 5, ignore_eos=True)
    bench.scheduler.add(short)
    steps = bench.steps
    while ("short", 0) not in bench.reasons:
        bench.step()
    assert bench.steps - steps < 9
    assert ("long", 0) not in bench.reasons
    bench.run()
    assert bench.scheduler.preemptions == 0
    for request in (long, short):
        assert bench.outputs[request.request_id, 0] == expected(request, 0)


def test_what_is_shared_or_pinned_stays_in_the_pool():
    bench = Bench(frames=FRAMES, budget=BUDGET, lower=100)
    prefix = [5, 6] * 8
    bench.scheduler.add(make_request("pin", prefix, 1, pin="p"))
    bench.run_steps()
    bench.scheduler.add(make_request("long", prefix + [7] * 60, 5, ignore_eos=True))
    while bench.scheduler.has_work():
        bench.step()
        for sequence in bench.scheduler.state.running:
            assert all(frame < 1000 for frame in bench.memory.frames(sequence.table, 0)[:4])
    bench.run()


def test_what_a_window_sees_stays_in_the_pool():
    bench = Bench(frames=10, budget=4, windows=(None, 24), lower=100)
    request = make_request("long", [3, 4] * 60, 30, ignore_eos=True)
    bench.scheduler.add(request)
    streamed = 0
    while bench.scheduler.has_work():
        bench.step()
        for sequence in bench.scheduler.state.running:
            assert all(frame < LOWER for frame in bench.memory.frames(sequence.table, 0)[1::2])
            streamed = max(streamed, bench.memory.residency(sequence.table).streamed)
    assert streamed > 30, "of 37 entries"
    assert bench.outputs["long", 0] == expected(request, 0)
    bench.assert_all_free()


def test_blocks_that_would_stream_again_come_back_ever_more_rarely():
    """Short requests come and go beside a context; each of them needs what the context's blocks would come back to."""
    bench = Bench(frames=64, budget=BUDGET, lower=200)
    bench.scheduler.add(make_request("long", [3, 4] * 110, 590, ignore_eos=True))
    streamed, returns = 0, 0
    for step in range(590):
        if step % 40 == 39:
            bench.scheduler.add(make_request(f"short{step}", [5, step] * 22, 6, ignore_eos=True))
        bench.step()
        long = next(one for one in bench.scheduler.state.running if one.request.request_id == "long")
        before, streamed = streamed, bench.memory.residency(long.table).streamed
        returns += streamed < before
    assert 0 < returns < 12
    bench.run()


def test_blocks_come_back_when_the_pool_has_had_room_for_a_while():
    """Two contexts do not fit side by side; when one has ended, the other's blocks come up, and stay."""
    bench = Bench(frames=64, budget=BUDGET, lower=100)
    long = make_request("long", [3, 4] * 60, 90, ignore_eos=True)
    bench.scheduler.add(long)
    bench.scheduler.add(make_request("other", [5, 6] * 40, 50, ignore_eos=True))
    streamed = []
    while bench.scheduler.has_work():
        bench.step()
        if len(bench.scheduler.state.requests) == 1 and bench.scheduler.state.running:
            streamed.append(bench.memory.residency(bench.scheduler.state.running[0].table).streamed)
    assert bench.outputs["long", 0] == expected(long, 0)
    bench.assert_all_free()
    assert min(streamed[: PATIENCE - 1]) == max(streamed[: PATIENCE - 1]) > 3, "not at once"
    assert streamed[PATIENCE + 2 :] == sorted(streamed[PATIENCE + 2 :]), "none comes back twice"
    assert streamed[PATIENCE + 2] == 0


def test_a_context_that_waited_goes_on_where_its_blocks_lie():
    bench = Bench(frames=FRAMES, budget=BUDGET, lower=100)
    first = make_request("first", [3, 4] * 40, 4, ignore_eos=True)
    bench.scheduler.add(first)
    bench.run()
    computed = bench.device.computed_tokens
    again = make_request("again", [3, 4] * 40 + [9] * 8, 4, ignore_eos=True)
    bench.scheduler.add(again)
    bench.run()
    assert bench.outputs["again", 0] == expected(again, 0)
    assert bench.device.computed_tokens - computed == 8 + 3, "80 tokens were found again, most of them below the pool"


def one_after_another(tier_loses, windows=(None,), lower=24) -> tuple[Bench, int]:
    """A context of 21 blocks in a pool of 12; another, for which all of it is evicted; the first again. And how many
    tokens that computed."""
    bench = Bench(frames=FRAMES * len(windows), windows=windows, budget=BUDGET, lower=lower, tier=1)
    assert bench.tier is not None
    bench.tier.random.random = lambda: next(tier_loses)  # type: ignore[method-assign]
    first = [3, 4, 5, 6] * 20 + [7]
    for name, prompt in (("first", first), ("flood", [8, 9, *range(20)] * 6 + [3] * 8), ("again", first)):
        computed = bench.device.computed_tokens
        request = make_request(name, prompt, 3, ignore_eos=True)
        bench.scheduler.add(request)
        bench.run()
        assert bench.outputs[name, 0] == expected(request, 0)
    return bench, bench.device.computed_tokens - computed


@pytest.mark.parametrize(("windows", "lower"), [((None,), 24), ((None, None), 48)])
def test_a_stored_context_longer_than_the_pool_is_loaded(windows, lower):
    bench, computed = one_after_another(repeat(0.0), windows, lower)
    assert computed == 1 + 2
    assert bench.tier is not None
    assert bench.tier.arrived > 12 * len(windows), "more than the pool holds"
    assert bench.scheduler.prefix_hit_tokens == 80


@pytest.mark.parametrize(
    ("windows", "frames", "lower", "seen"),
    [((None, 6), 18, 22, 2), ((9, None, None), 36, 48, 2), ((None, 24), 24, 24, 6)],
)
def test_a_stored_context_of_layers_with_windows_is_loaded_and_what_they_see_is_in_the_pool(
    windows, frames, lower, seen
):
    """And nothing before that."""
    bench = Bench(frames=frames, windows=windows, budget=BUDGET, lower=lower, tier=1)
    assert bench.tier is not None
    bench.tier.random.random = lambda: 0.0  # type: ignore[method-assign]
    first = make_request("first", [3, 4, 5, 6] * 20 + [7], 3, ignore_eos=True)
    for request in (first, *(make_request(f"flood{k}", [8 + k, *range(20)] * 6 + [3] * 8, 3) for k in range(4))):
        bench.scheduler.add(request)
        bench.run()
    computed = bench.device.computed_tokens
    again = make_request("again", first.prompt_token_ids, 3, ignore_eos=True)
    bench.scheduler.add(again)
    while bench.scheduler.has_work():
        bench.step()
        for sequence in bench.scheduler.state.running:
            of_entries = bench.memory.frames(sequence.table, 0)
            below = {at % len(windows) for at, frame in enumerate(of_entries) if frame >= LOWER}
            assert below == {group for group, window in enumerate(windows) if window is None}
    assert bench.outputs["again", 0] == expected(again, 0)
    assert bench.device.computed_tokens - computed == 1 + 2
    assert bench.tier.arrived == 20 * windows.count(None) + seen
    bench.run()


def test_what_a_load_of_a_long_context_lost_is_computed():
    bench, computed = one_after_another(chain([0.0] * 6, [1.0], repeat(0.0)))
    assert computed == 81 + 2 - 6 * 4
    assert bench.scheduler.prefix_hit_tokens == 24


def test_of_a_loaded_context_the_newest_blocks_are_in_the_pool():
    bench, _ = one_after_another(repeat(0.0))
    assert bench.tier is not None
    bench.scheduler.add(make_request("another", [9, 8, *range(20)] * 6 + [3] * 8, 3, ignore_eos=True))
    bench.run()
    bench.scheduler.add(make_request("anew", [3, 4, 5, 6] * 20 + [7], 3, ignore_eos=True))
    while not (loads := [load for _, load in bench.tier.under_way]):
        bench.step()
    below = [frame >= 1000 for frame in loads[0].frames]
    assert below == [True] * 9 + [False] * 11, "of 12 frames in the pool, one is for what is computed"
    bench.run()


def test_who_needs_what_lower_frames_have_lost_fails_and_nobody_else():
    bench = Bench(frames=FRAMES, budget=BUDGET, lower=100)
    long = make_request("long", [3, 4] * 40, 30, ignore_eos=True)
    bench.scheduler.add(long)
    while len(bench.outputs.get(("long", 0), [])) < 3:
        bench.step()
    short = make_request("short", [8] * 9, 9, ignore_eos=True)
    bench.scheduler.add(short)
    while ("short", 0) not in bench.outputs:
        bench.step()
    bench.lose(set(bench.memory.streamed.numbers))
    assert bench.reasons == {("long", 0): "error"}
    assert bench.memory.stats().blocks_streamed == 0
    bench.run()
    assert bench.outputs["short", 0] == expected(short, 0)
    computed = bench.device.computed_tokens
    again = make_request("again", [3, 4] * 40, 3, ignore_eos=True)
    bench.scheduler.add(again)
    bench.run()
    assert bench.outputs["again", 0] == expected(again, 0)
    assert bench.device.computed_tokens - computed == 80 + 2, "what hangs on lost blocks is not found either"


def test_of_a_cached_context_what_lower_frames_have_lost_is_computed():
    bench = Bench(frames=FRAMES, budget=BUDGET, lower=100)
    bench.scheduler.add(make_request("first", [3, 4] * 40, 4, ignore_eos=True))
    bench.run()
    first = bench.memory.streamed.first
    held = sorted(frame for frame in bench.memory.core.blocks.frame if frame >= first)
    bench.lose({held[5]})
    computed = bench.device.computed_tokens
    again = make_request("again", [3, 4] * 40, 4, ignore_eos=True)
    bench.scheduler.add(again)
    bench.run()
    assert bench.outputs["again", 0] == expected(again, 0)
    assert bench.device.computed_tokens - computed == 80 - 5 * 4 + 3


def test_a_pin_ends_with_what_lower_frames_have_lost_of_it():
    bench = Bench(frames=FRAMES, budget=BUDGET, lower=100)
    bench.scheduler.pins.share = 1.0
    bench.scheduler.add(make_request("pin", [5, 6] * 14, 1, pin="p"))
    while not bench.scheduler.state.running:
        bench.step()
    bench.scheduler.add(make_request("other", [8] * 20, 1))
    bench.run_steps()
    (pin,) = bench.scheduler.pins.list()
    below = {frame for frame in bench.memory.frames(pin.table, 0) if frame >= bench.memory.streamed.first}
    assert below, "the pin's sequence made room for the other one"
    bench.lose(below)
    assert not bench.scheduler.pins.list()
    assert bench.scheduler.pins.num_frames == 0
    bench.run()


def test_a_load_that_goes_on_behind_what_was_lost_brings_nothing():
    bench, _ = one_after_another(repeat(0.0))
    assert bench.tier is not None
    bench.scheduler.add(make_request("another", [9, 8, *range(20)] * 6 + [3] * 8, 3, ignore_eos=True))
    bench.run()
    again = make_request("anew", [3, 4, 5, 6] * 20 + [7], 3, ignore_eos=True)
    bench.scheduler.add(again)
    while not (loads := [load for _, load in bench.tier.under_way]):
        bench.step()
    hits = bench.scheduler.prefix_hit_tokens
    bench.lose({max(loads[0].frames)})
    bench.run()
    assert bench.scheduler.prefix_hit_tokens == hits
    assert bench.outputs["anew", 0] == expected(again, 0)
    assert not bench.scheduler.state.loading.lost, "of a load that has ended"


def test_what_was_lost_before_the_beginning_of_a_load_is_not_found_when_that_ends():
    bench, _ = one_after_another(repeat(0.0))
    assert bench.tier is not None
    bench.scheduler.add(make_request("short", [9, 8] * 20, 3, ignore_eos=True))
    bench.run()
    again = make_request("anew", [3, 4, 5, 6] * 20 + [7], 3, ignore_eos=True)
    bench.scheduler.add(again)
    while not (loads := [load for _, load in bench.tier.under_way]):
        bench.step()
    assert len(loads[0].blocks) < 20, "the first blocks were streamed, and still are"
    bench.lose(set(bench.memory.streamed.numbers))
    bench.run()
    assert bench.outputs["anew", 0] == expected(again, 0)


def test_where_pins_have_lower_frames_others_have_more_of_the_pool():
    bench = Bench(frames=8, budget=4, lower=40)
    bench.scheduler.add(make_request("before", [1, 2] * 40, 20, ignore_eos=True))
    bench.run_steps()
    bench.scheduler.add(make_request("pin", [1, 2] * 8, 1, pin="pin"))
    bench.run_steps()
    assert bench.memory.stats().blocks_streamed == 4, "what is pinned"
    request = make_request("long", [3, 4] * 85, 5, ignore_eos=True)
    bench.scheduler.add(request)
    bench.run_steps()
    assert bench.outputs["long", 0] == expected(request, 0)
    bench.assert_all_free()
