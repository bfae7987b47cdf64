"""The forecast: what is known to come is kept free, and nobody waits for ever for what may come."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagemill.memory.manager import MemoryManager
from pagemill.scheduling.admission import _holds_apart
from pagemill.scheduling.forecast import KEPT, AnswerLengths, Forecast, Growing, surely_fits
from pagemill.scheduling.scheduler import Scheduler
from pagemill.simulate.engine import END_TOKEN
from pagemill.simulate.simulator import replay
from pagemill.simulate.step_time import COSTS, KVShape, StepTimes
from pagemill.simulate.trace import TracedRequest

BLOCK = 4


def scheduler(frames, target_s=None, **settings) -> Scheduler:
    return Scheduler(
        MemoryManager(frames, BLOCK, [None]),
        max_num_seqs=16,
        max_num_batched_tokens=64,
        eos_token_ids=frozenset({END_TOKEN}),
        ageing_s=10.0,
        target_tpot_s=target_s,
        **settings,
    )


TIMES = StepTimes({**dict.fromkeys(COSTS, 0.0), "step": 0.1, "token to 128": 0.001}, KVShape((None,), 2, 64, 2), {})

REQUESTS = st.lists(st.tuples(st.integers(1, 30), st.integers(1, 30), st.floats(0, 3)), min_size=1, max_size=20)


def traced(requests) -> list[TracedRequest]:
    at, trace = 0.0, []
    for number, (prompt, output, wait_s) in enumerate(requests):
        at += wait_s
        trace.append(TracedRequest(number, at, prompt, output))
    return trace


@settings(max_examples=40, deadline=None)
@given(st.integers(15, 80), REQUESTS)
def test_where_all_lengths_are_known_nobody_is_preempted(frames, requests):
    trace = traced(requests)
    outcome = replay(trace, scheduler(frames), TIMES)
    assert [one.num_tokens for one in outcome.served] == [request.output_len for request in trace]
    assert outcome.preemptions == 0


@settings(max_examples=40, deadline=None)
@given(st.integers(30, 80), REQUESTS, st.sampled_from([1, 40, 90]))
def test_everyone_is_served_where_lengths_are_not_known(frames, requests, max_tokens):
    trace = traced(requests)
    one = scheduler(frames)
    outcome = replay(trace, one, TIMES, max_tokens=max_tokens)
    assert [served.num_tokens for served in outcome.served] == [request.output_len for request in trace]
    one.memory.check()


@pytest.mark.parametrize("max_tokens", [None, 1])
def test_of_equal_requests_hardly_a_token_is_computed_again(max_tokens):
    """A pool for 30 of 160 that come at once; without foresight, a fifth of the tokens."""
    trace, again = [TracedRequest(number, 0.0, 16, 40) for number in range(160)], []
    for target_s in (math.inf, None):
        one = scheduler(14 * 6, target_s)
        replay(trace, one, TIMES, max_tokens=max_tokens)
        again.append(one.state.recomputed_tokens / sum(request.length for request in trace))
    without, foreseen = again
    assert without > 0.05
    assert foreseen < 0.02


def test_answers_that_end_early_are_expected_to():
    lengths, has = AnswerLengths(), np.array([0.0, 90.0])
    for _ in range(200):
        lengths.note(100, at_limit=False)
    before, after = (
        lengths.survival(has, np.array([10.0, 10.0]), has),
        lengths.survival(has, np.array([101.0]), 0 * has),
    )
    assert (before > 0.95).all()
    assert after[0] < 0.05
    assert lengths.mean == pytest.approx(100, abs=5)


def test_answers_that_reach_their_limits_are_expected_to_where_their_request_sets_one():
    lengths, zero = AnswerLengths(), np.zeros(1)
    for _ in range(50):
        lengths.note(900, at_limit=True)
    far = np.array([5000.0])
    assert lengths.survival(zero, far, zero + 1)[0] > 0.95
    assert lengths.survival(zero, far, zero)[0] < 0.05


@given(st.lists(st.tuples(st.integers(1, 3000), st.booleans()), max_size=2 * KEPT))
def test_chances_are_chances_and_fall(answers):
    lengths = AnswerLengths()
    for answer in answers:
        lengths.note(*answer)
    more = np.array([0.0, 1.0, 50.0, 700.0, 9000.0])
    for limited in (0.0, 1.0):
        chances = lengths.survival(np.array([[0.0], [400.0], [5000.0]]), more, np.array([[limited]]))
        assert (chances > 0).all()
        assert (chances <= 1 + 1e-9).all()
        assert (np.diff(chances, axis=1) <= 1e-9).all()


def columns(growing):
    return np.array(growing, dtype=np.float64).reshape(-1, len(Growing._fields)).T


SEQUENCE = st.tuples(st.integers(0, 40), st.integers(0, 200), st.integers(1, 300), st.booleans(), st.booleans())


@given(
    st.lists(SEQUENCE, min_size=1, max_size=12),
    st.lists(st.tuples(st.integers(1, 400), st.booleans()), max_size=8),
    st.integers(0, 2000),
)
def test_what_surely_fits_is_foreseen_to(sequences, answers, available):
    lengths = AnswerLengths()
    for answer in answers:
        lengths.note(*answer)
    growing = [
        Growing(0, -(-(prompt + has) // BLOCK), 0, prompt + has, has, most, sure, limited)
        for prompt, has, most, sure, limited in sequences
    ]
    *running, new = [one._replace(held=one.entries) for one in growing]
    new = new._replace(held=0, coming=new.entries)
    blocks = sum(-(-(one.length + one.most) // BLOCK) for one in growing)
    held, all_sure = sum(one.held for one in running), all(one.sure for one in growing)
    if surely_fits(new.coming + blocks, available + held, all_sure):
        assert Forecast(lengths, columns(running), available, BLOCK, [None]).fits([new])
    enough = next(count for count in range(10_000) if surely_fits(new.coming + blocks, count + held, all_sure))
    assert Forecast(lengths, columns(running), enough, BLOCK, [None]).fits([new])


def test_a_window_bounds_what_a_sequence_grows_by():
    grows = Growing(held=4, entries=4, coming=0, length=16, has=1, most=1000, sure=True, limited=True)
    new = grows._replace(held=0, coming=4)
    windowed = Forecast(AnswerLengths(), columns([grows]), 40, BLOCK, [16])
    full = Forecast(AnswerLengths(), columns([grows]), 40, BLOCK, [None])
    assert windowed.fits([new])
    assert not full.fits([new])


@given(st.lists(SEQUENCE, min_size=1, max_size=12), st.integers(0, 400))
def test_where_all_lengths_are_sure_blocks_are_counted(sequences, available):
    growing = [
        Growing(0, -(-(prompt + has) // BLOCK), 0, prompt + has, has, most, sure=True, limited=limited)
        for prompt, has, most, _, limited in sequences
    ]
    *running, new = [one._replace(held=one.entries) for one in growing]
    room = available + sum(one.held for one in running)
    expected = np.mean([one.has + one.most for one in growing])

    def fits(step: float) -> bool:
        blocks = sum(-(-(one.length + step - 1) // BLOCK) for one in growing if step <= one.most)
        return blocks <= room * (0.7 + 0.3 * max(0.0, 1 - step / expected))

    every = range(1, 1 + max(one.most for one in growing))
    found = Forecast(AnswerLengths(), columns(running), available, BLOCK, [None]).fits(
        [new._replace(held=0, coming=new.entries)]
    )
    assert found or not all(map(fits, every))
    assert not found or all(fits(one.most) for one in growing)


def test_blocks_that_two_tables_hold_do_not_come_free_with_one():
    memory = MemoryManager(8, BLOCK, [None])
    table = memory.open([], [], b"root", 0.0, 0).table
    memory.reserve(table, BLOCK)
    memory.commit(table, BLOCK, [1] * BLOCK, [])
    assert _holds_apart(memory)
    memory.fork(table, BLOCK)
    assert not _holds_apart(memory)
    assert not _holds_apart(MemoryManager(8, BLOCK, [None, 8]))
