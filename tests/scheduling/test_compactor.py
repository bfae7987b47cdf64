"""Who is looked at for compaction, how long it is expected to go on, and that nobody's tokens change."""

from __future__ import annotations

from itertools import pairwise

import pytest
from scheduler_bench import Bench, expected, make_request

from pagemill.scheduling.compactor import REST, steps_left


def churned(payback_steps):
    """One long answer among short ones that come and go, in a pool that has to evict."""
    bench = Bench(frames=40, budget=64, payback_steps=payback_steps)
    long = make_request("long", [1] * 6, 100, ignore_eos=True)
    bench.scheduler.add(long)
    others = []
    for number in range(30):
        others.append(make_request(f"r{number}", [2, number, 3] * 3, 8 + number % 5, ignore_eos=True))
        bench.scheduler.add(others[-1])
        for _ in range(3):
            bench.step()
    return bench, [long, *others]


@pytest.mark.parametrize("payback_steps", [None, 0.5])
def test_a_long_answer_lies_together_and_says_the_same(payback_steps):
    bench, requests = churned(payback_steps)
    if payback_steps is not None:
        assert bench.memory.compaction.sequences > 0
    table = bench.scheduler.state.requests["long"][0].table
    frames = bench.memory.frames(table, 0)
    apart = sum(there != here + 1 for here, there in pairwise(frames))
    assert (apart <= 6) == (payback_steps is not None), f"{apart} of {len(frames) - 1} steps lead elsewhere"
    bench.run()
    for request in requests:
        assert bench.outputs[request.request_id, 0] == expected(request, 0)


def test_whoever_may_end_is_expected_to_go_on_as_long_as_it_has():
    bench = Bench()
    bench.scheduler.add(make_request("certain", [1] * 5, 40, ignore_eos=True))
    prompt = next([token] * 5 for token in range(2, 50) if len(expected(make_request("", [token] * 5, 40), 0)) > 20)
    bench.scheduler.add(make_request("open", prompt, 40))
    for _ in range(8):
        bench.step()
    certain, other = (bench.scheduler.state.requests[name][0] for name in ("certain", "open"))
    assert (certain.num_output_tokens, steps_left(certain)) == (8, 32)
    assert steps_left(other) == other.num_output_tokens == 8


def test_after_a_look_in_vain_it_rests():
    bench = Bench(payback_steps=1)
    looked = []
    bench.memory.compaction.compact = lambda table, *_: looked.append(table) or 0
    for number in range(3):
        bench.scheduler.add(make_request(f"r{number}", [number] * 5, 60, ignore_eos=True))
    for _ in range(9 * (REST + 1)):
        bench.step()
    assert len(looked) in range(7, 10)
    assert len(set(map(id, looked))) == 3, "each in its turn"
