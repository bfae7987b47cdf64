"""The contiguous allocators that paging is held against are allocators: runs never overlap, and all come back."""

from __future__ import annotations

import pytest
from benchmarks.replay.allocators import CONTIGUOUS, contiguous, paged
from benchmarks.replay.contiguous import PLACEMENTS, Buddy, FirstFit, WholeBatches, root_of
from hypothesis import given, settings
from hypothesis import strategies as st

from pagemill.planner.replica import Setup
from pagemill.simulate.simulator import replay
from pagemill.simulate.step_time import COSTS, KVShape, StepTimes
from pagemill.simulate.trace import TracedRequest

SHAPE = KVShape((None, None), 2, 64, 2)
TIMES = StepTimes({**dict.fromkeys(COSTS, 0.0), "step": 1.0}, SHAPE, {})


@settings(max_examples=100, deadline=None)
@given(
    st.sampled_from(sorted(PLACEMENTS)),
    st.integers(1, 200),
    st.lists(st.tuples(st.integers(1, 40), st.integers(0, 50)), max_size=60),
)
def test_runs_do_not_overlap_and_all_come_back(name, slots, actions):
    placement = PLACEMENTS[name](slots)
    largest = max(count for count in range(slots + 1) if count == 0 or placement.fits_when_empty(count))
    held = []
    for count, back in actions:
        if held and back % 3 == 0:
            placement.give(held.pop(back % len(held)))
        elif (extent := placement.take(count)) is not None:
            assert extent[1] >= count
            held.append(extent)
        taken = [slot for start, length in held for slot in range(start, start + length)]
        assert len(taken) == len(set(taken))
        assert all(0 <= slot < slots for slot in taken)
    for extent in held:
        placement.give(extent)
    assert placement.take(largest) is not None, "with all given back, the largest run fits again"


def test_first_fit_has_holes_that_do_not_fit():
    memory = FirstFit(30)
    runs = [memory.take(10) for _ in range(3)]
    memory.give(runs[0])
    memory.give(runs[2])
    assert memory.take(11) is None, "20 slots are free, in two holes"
    assert memory.take(4) == (0, 4)
    memory.give(runs[1])
    assert memory.take(26) == (4, 26)


def test_buddies_are_powers_of_two():
    memory = Buddy(24)
    assert memory.take(5) == (16, 8) or memory.take(5) is not None
    assert memory.take(9) == (0, 16)
    assert memory.take(1) is None
    assert not memory.fits_when_empty(17)


@pytest.mark.parametrize("kind", ["paged", *CONTIGUOUS])
def test_the_same_scheduler_serves_all(kind):
    trace = [TracedRequest(i, 0.1 * i, 20 + 7 * i % 31, 1 + 11 * i % 40) for i in range(60)]
    setup = Setup(kv_bytes=512 * 1024, max_num_seqs=32, max_num_batched_tokens=64)
    longest = max(request.length for request in trace)
    row = paged(trace, setup, TIMES) if kind == "paged" else contiguous(trace, longest, setup, TIMES, *kind)
    assert row.refused == 0
    assert row.parts["tokens"] > 0
    assert sum(row.parts.values()) == pytest.approx(1)
    if kind != "paged":
        assert row.preempted == 0, "whoever has entered has all it needs"
        assert row.mean_running <= paged(trace, setup, TIMES).mean_running
    if kind == ("maximum", "first fit"):
        slots = setup.kv_bytes // int(SHAPE.slot_bytes)
        assert row.most_running == slots // longest


def test_what_can_never_fit_is_refused():
    trace = [TracedRequest(0, 0.0, 600, 3), TracedRequest(1, 0.0, 20, 3)]
    setup = Setup(kv_bytes=512 * 1024)
    assert contiguous(trace, 603, setup, TIMES, "exact", "first fit").refused == 1
    assert contiguous(trace, 603, setup, TIMES, "maximum", "first fit").refused == 2
    assert paged(trace, setup, TIMES).refused == 1


def test_whole_batches_end_with_their_longest_answer():
    """The fourth comes too late and waits for the longest of the others, though it had room; so do their answers."""
    trace = [TracedRequest(number, number // 3, 10, length) for number, length in enumerate((2, 6, 3, 4))]
    setup = Setup(kv_bytes=int(64 * SHAPE.slot_bytes))
    seen = []
    memory = WholeBatches(64, FirstFit(64), lambda root: 16)
    scheduler = setup.scheduler(memory, caching=False)
    outcome = replay(trace, scheduler, TIMES, [lambda plan, seconds: seen.append(memory.reserved)], root=root_of)
    assert [memory.ends[root_of(request)] for request in trace] == [6, 6, 6, 10]
    assert [one.first_token_s for one in outcome.served] == [1, 1, 1, 7]
    assert seen == [48] * 6 + [16] * 4
    assert memory.reserved == 0
