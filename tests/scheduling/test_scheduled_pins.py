"""Pinned prefixes: never computed again, and counted once in what a request may need."""

from __future__ import annotations

import pytest
from scheduler_bench import Bench, expected, make_request, make_search

from pagemill.errors import KVMemoryError, PinLimitError, RequestTooLargeError
from pagemill.namespace import Namespace


def test_a_pinned_prefix_is_never_computed_again():
    bench = Bench(frames=20, budget=64)
    prefix = [1, 2, 3, 4] * 5
    bench.scheduler.add(make_request("pin", prefix, 1, pin="system"))
    bench.run_steps()
    assert [(pin.name, pin.num_tokens) for pin in bench.scheduler.pins.list()] == [("system", 20)]
    assert bench.memory.stats().frames_active == bench.scheduler.pins.num_frames == 5
    for i in range(4):
        bench.scheduler.add(make_request(f"flood{i}", [20 + i] * 40, 2, ignore_eos=True))
    bench.run_steps()
    computed = bench.device.computed_tokens
    bench.scheduler.add(make_request("r", [*prefix, 7, 8], 2, ignore_eos=True))
    bench.run_steps()
    assert bench.device.computed_tokens - computed == 3
    bench.now += 30
    bench.scheduler.add(make_request("later", [5], 1))
    bench.run_steps()
    assert bench.scheduler.pins.list() == []
    bench.assert_all_free()


@pytest.mark.parametrize("steps", [0, 1])
def test_a_pin_whose_request_ends_first_pins_nothing(steps):
    bench = Bench(frames=20, budget=8)
    bench.scheduler.add(make_request("pin", [1, 2, 3, 4] * 5, 1, pin="system"))
    for _ in range(steps):
        bench.step()
    assert bench.scheduler.pins.num_frames == 5
    bench.scheduler.abort("pin", bench.now)
    assert bench.scheduler.pins.num_frames == 0
    bench.run_steps()
    assert bench.scheduler.pins.list() == []


def test_pins_and_requests_never_shut_each_other_out():
    bench = Bench(frames=20, budget=64)
    bench.scheduler.add(make_request("large", [9] * 44, 5, ignore_eos=True))  # 12 blocks
    with pytest.raises(
        PinLimitError,
        match=r"leaves too little: the request 'large' .* takes 12 blocks, .* could count on 11 beside 9 pinned",
    ):
        bench.scheduler.add(make_request("pin", [1, 2, 3] * 12, 1, pin="a"))
    with pytest.raises(
        PinLimitError, match=r"and 10 more may be pinned: max_pinned_share \(0.5\) of the pool is 10 of 20"
    ):
        bench.scheduler.add(make_request("pin", [1, 2] * 22, 1, pin="a"))
    bench.scheduler.add(make_request("pin", [1, 2] * 14, 1, pin="a"))
    with pytest.raises(RequestTooLargeError, match=r"takes 14 KV blocks .* has 20, of which pins leave 13"):
        bench.scheduler.add(make_request("larger", [8] * 52, 5))
    with pytest.raises(PinLimitError, match="5 of them new, and 3 more may be pinned"):
        bench.scheduler.add(make_request("second", [3] * 20, 1, pin="b"))
    bench.run_steps()
    assert bench.scheduler.least_frames == 7
    with pytest.raises(KVMemoryError, match="pins hold 7"):
        bench.scheduler.resize(6, bench.now)
    bench.scheduler.add(make_request("again", [1, 2] * 16, 1, pin="a"))  # in the place of the first: one block more
    bench.run_steps()
    assert bench.scheduler.pins.num_frames == 8
    bench.scheduler.pins.unpin("a", Namespace(), bench.now)
    bench.scheduler.add(make_request("larger", [8] * 52, 5))
    bench.run()


@pytest.mark.parametrize("lower", [0, 4])
def test_a_pinned_prefix_counts_once_for_who_begins_with_it(lower):
    bench = Bench(frames=20, budget=16, lower=lower)
    prefix = [1, 2] * 14  # 7 blocks
    bench.scheduler.add(make_request("pin", prefix, 1, pin="p"))
    bench.run_steps()
    most = (20 + lower) * 4 + 1
    with pytest.raises(RequestTooLargeError, match=r"takes 14 KV blocks of 4 tokens beside 7 pinned, but the pool has"):
        bench.scheduler.add(make_request("larger", prefix + [9] * 2, most + 1 - 30))
    with pytest.raises(RequestTooLargeError, match=r"takes 20 KV blocks of 4 tokens, but the pool has 20, of which"):
        bench.scheduler.add(make_request("other", [9] * 30, most - 30))
    full = make_request("full", prefix + [9] * 2, most - 30, ignore_eos=True)
    bench.scheduler.add(full)
    unsaid = make_request("unsaid", prefix + [8] * 2, 200, ignore_eos=True)
    unsaid.params.max_tokens = None
    bench.scheduler.add(unsaid)
    with pytest.raises(KVMemoryError, match=r"'full' .* takes 13 blocks, .* could count on 12"):
        bench.scheduler.resize(19, bench.now)
    bench.run_steps()
    assert unsaid.max_len == most
    for request in (full, unsaid):
        assert bench.outputs[request.request_id, 0] == expected(request, 0)
    bench.assert_all_free()


def test_what_another_engine_has_answered_is_part_of_what_must_fit():
    bench = Bench(frames=20, budget=16)
    bench.scheduler.add(make_request("pin", [1, 2] * 14, 1, pin="p"))
    bench.run_steps()
    refused, taken = (make_request("goes on", [9] * 10, 300, ignore_eos=True) for _ in range(2))
    for each in (refused, taken):
        each.params.max_tokens, each.answered = None, [5] * 60
    with pytest.raises(RequestTooLargeError, match=r"takes 18 KV blocks of 4 tokens, but the pool has 20, of which"):
        bench.scheduler.add(refused)
    bench.scheduler.pins.unpin("p", Namespace(), bench.now)
    bench.scheduler.add(taken)
    assert taken.max_len == 20 * 4 + 1


@pytest.mark.parametrize(
    ("windows", "pinned", "most"), [((None, 6), 7 + 2, 32 * 4 + 1), ((40, None), 7 + 7, 20 * 4 + 1), ((6,), 2, 500)]
)
def test_with_windows_too_a_pinned_prefix_counts_once_for_who_goes_on_behind_it(windows, pinned, most):
    bench = Bench(frames=40, windows=windows, budget=16)
    prefix = [1, 2] * 14
    bench.scheduler.add(make_request("pin", prefix, 1, pin="p"))
    bench.run_steps()
    assert bench.scheduler.pins.num_frames == pinned
    full = make_request("full", prefix + [9] * 2, most - 30, ignore_eos=True)
    bench.scheduler.add(full)
    if windows != (6,):
        with pytest.raises(RequestTooLargeError):
            bench.scheduler.add(make_request("larger", prefix + [9] * 2, most + 1 - 30))
        with pytest.raises(RequestTooLargeError):
            bench.scheduler.add(make_request("leaves it", prefix[:-1] + [9] * 3, most - 30))
        with pytest.raises(KVMemoryError, match="'full'"):
            bench.scheduler.resize(39, bench.now)
    bench.run()
    assert bench.outputs["full", 0] == expected(full, 0)


def test_who_leaves_one_of_the_pins_that_it_begins_with_fits_whichever_of_them_ends():
    bench = Bench(frames=40, windows=(None, 6), budget=16)
    prefix = [1, 2] * 14
    for name, prompt in (("short", prefix), ("long", prefix + [3] * 8)):
        bench.scheduler.add(make_request(name, prompt, 1, pin=name))
        bench.run_steps()
    request = make_request("goes on elsewhere", prefix + [3] * 4 + [9], 120 - 33, ignore_eos=True)
    with pytest.raises(RequestTooLargeError):
        bench.scheduler.add(request)
    bench.scheduler.pins.unpin("long", Namespace(), bench.now)
    bench.scheduler.add(request)
    with pytest.raises(PinLimitError, match="leaves too little"):
        bench.scheduler.add(make_request("again", prefix + [3] * 8, 1, pin="long"))
    bench.scheduler.pins.unpin("short", Namespace(), bench.now)
    bench.run()
    assert bench.outputs["goes on elsewhere", 0] == expected(request, 0)


def test_who_finds_a_pin_and_goes_on_with_less_than_a_step_needs_no_more_than_is_new():
    bench = Bench(frames=23, windows=(None, 40), budget=64)
    prefix = [1, 2] * 22
    bench.scheduler.pins.share = 0.95
    bench.scheduler.add(make_request("pin", prefix, 1, pin="p"))
    bench.run_steps()
    assert bench.scheduler.pins.num_frames == 11 + 10
    request = make_request("r", [*prefix, 9], 3, ignore_eos=True)
    bench.scheduler.add(request)
    bench.run()
    assert bench.outputs["r", 0] == expected(request, 0)


@pytest.mark.parametrize("windows", [(None,), (None, 6), (40, None)])
def test_who_begins_with_a_pin_fits_without_it_too(windows):
    """Whatever becomes of the pin: it ends, or its request does before it is there."""
    bench = Bench(frames=20 * len(windows), windows=windows, budget=16)
    prefix = [1, 2] * 14
    for ending in ("unpin", "abort"):
        bench.scheduler.add(make_request(f"pin-{ending}", prefix, 1, pin="p"))
        if ending == "unpin":
            bench.run_steps()
        full = make_request(f"full-{ending}", [*prefix, 9], 81 - 29, ignore_eos=True)
        bench.scheduler.add(full)
        bench.step()
        bench.scheduler.abort(f"pin-{ending}", bench.now)
        bench.scheduler.pins.unpin("p", Namespace(), bench.now)
        bench.run()
        assert bench.outputs[full.request_id, 0] == expected(full, 0)


def test_with_windows_a_pinned_prefix_counts_in_full():
    """A prompt that leaves the pin before its end finds nothing of it: its window's blocks are not there."""
    bench = Bench(frames=24, budget=64, windows=(None, 6))
    bench.scheduler.add(make_request("pin", [1, 2] * 14, 1, pin="p"))
    bench.run_steps()
    assert bench.scheduler.pins.num_frames == 9
    with pytest.raises(RequestTooLargeError, match=r"takes 16 KV blocks .* of which pins leave 15"):
        bench.scheduler.add(make_request("larger", [1, 2] * 10 + [9] * 9, 4))
    bench.scheduler.add(make_request("fits", [1, 2] * 10 + [9] * 7, 2, ignore_eos=True))
    bench.run()


def test_who_shares_blocks_with_a_sequence_whose_logits_are_not_finite_goes_on_and_pins_stay():
    bench = Bench(frames=20, budget=64)
    prompt = [20 + i for i in range(29)]
    bad = make_request("bad", prompt, 20, ignore_eos=True)
    bench.scheduler.add(bad)
    bench.step()
    bench.scheduler.add(make_request("pin", prompt[:12], 1, pin="system"))
    beside = make_request("beside", [*prompt, 7], 20, ignore_eos=True)
    bench.scheduler.add(beside)
    bench.step()
    bench.step()
    (row,) = [one.row for one in bench.scheduler.state.running if one.request is bad]
    bench.device.not_finite.add(row)
    bench.step()
    assert bench.reasons["bad", 0] == "error"
    bench.device.not_finite.clear()
    (pin,) = bench.scheduler.pins.list()
    assert bench.memory.peek(pin.digests, bad.root) == 3
    bench.run_steps()
    assert bench.outputs["beside", 0] == expected(beside, 0)
    bench.scheduler.add(make_request("again", [*prompt, 8], 1))
    bench.run_steps()
    assert bench.scheduler.prefix_hit_tokens == 12 + 28 + 28


def test_nobody_finds_what_only_a_sequence_had_whose_logits_are_not_finite():
    bench = Bench(frames=20, budget=64)
    prompt = [20 + i for i in range(29)]
    bench.scheduler.add(make_request("first", prompt[:9], 1))
    bench.run_steps()
    bench.scheduler.add(make_request("bad", prompt, 20, ignore_eos=True))
    bench.step()
    bench.device.not_finite.add(bench.scheduler.state.running[0].row)
    bench.step()
    bench.device.not_finite.clear()
    bench.scheduler.add(make_request("again", prompt, 1))
    bench.run_steps()
    assert bench.scheduler.prefix_hit_tokens == 8


@pytest.mark.parametrize("failing", [1, 2, 3])
def test_nobody_finds_what_only_beams_had_whose_logits_are_not_finite(failing):
    bench = Bench(frames=60, budget=64)
    search = make_search("search", range(1, 20), 12, 3)
    bench.scheduler.add(search)
    for _ in range(6):
        bench.step()
    beams = bench.scheduler.state.running
    digests = list(beams[0].digests)
    assert (len(beams), bench.memory.peek(digests, search.root)) == (3, len(digests))
    bench.device.not_finite.update(beam.row for beam in beams[:failing])
    bench.step()
    assert bench.reasons["search", 0] == "error"
    assert bench.memory.peek(digests, search.root) == 0
