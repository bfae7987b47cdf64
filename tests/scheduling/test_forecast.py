"""The forecast: what is known to come is kept free, and nobody waits for ever for what may come."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduler_bench import make_request

from pagemill.memory.manager import MemoryManager
from pagemill.scheduling.admission import _holds_apart
from pagemill.scheduling.forecast import (
    ENOUGH,
    KEPT,
    AnswerLengths,
    Chances,
    Forecast,
    Growing,
    TenantLengths,
    surely_fits,
)
from pagemill.scheduling.scheduler import Scheduler
from pagemill.scheduling.step_plan import StepResult
from pagemill.simulate.engine import END_TOKEN
from pagemill.simulate.simulator import replay
from pagemill.simulate.step_time import COSTS, KVShape, StepTimes
from pagemill.simulate.trace import TracedRequest
from pagemill.tenant_limits import TenantLimits

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


def survival(lengths: AnswerLengths, has: float, more: float) -> float:
    return Chances([lengths]).survival(np.array(0), np.array(has), np.array(more)).item()


def test_answers_that_end_early_are_expected_to():
    lengths = AnswerLengths()
    for _ in range(200):
        lengths.note(100, cut=False)
    assert survival(lengths, 0, 10) > 0.95
    assert survival(lengths, 90, 10) > 0.95
    assert survival(lengths, 0, 101) < 0.05
    assert lengths.curve.mean == pytest.approx(100, abs=5)


def test_answers_that_were_cut_are_expected_to_reach_that_limit_and_say_little_of_longer_ones():
    lengths = AnswerLengths()
    for _ in range(50):
        lengths.note(900, cut=True)
    assert survival(lengths, 0, 901) > 0.9
    assert survival(lengths, 0, 5000) < 0.05


@pytest.mark.parametrize("limit", [1, 40])
def test_answers_that_a_low_limit_cuts_change_nothing_beyond_it(limit):
    """Beside answers of two lengths, of which one is below the higher limit."""
    lengths, beside = AnswerLengths(), AnswerLengths()
    for _ in range(60):
        for answers in (lengths, beside):
            answers.note(30, cut=False)
            answers.note(400, cut=False)
        beside.note(limit, cut=True)
    for more in (100, 390, 401, 3000):
        assert survival(beside, limit + 1, more) == pytest.approx(survival(lengths, limit + 1, more), rel=0.02)


ANSWERS = st.lists(st.tuples(st.integers(1, 3000), st.booleans()), max_size=2 * KEPT)


@given(st.tuples(ANSWERS, ANSWERS))
def test_chances_are_chances_and_fall(answers):
    kinds = [AnswerLengths(), AnswerLengths()]
    for lengths, ended in zip(kinds, answers, strict=True):
        for answer in ended:
            lengths.note(*answer)
    both, more = Chances(kinds), np.array([0.0, 1.0, 50.0, 700.0, 9000.0])
    for place, lengths in enumerate(kinds):
        chances = both.survival(np.array(place), np.array([[0.0], [400.0], [5000.0]]), more)
        assert (chances > 0).all()
        assert (chances <= 1 + 1e-9).all()
        assert (np.diff(chances, axis=1) <= 1e-9).all()
        assert (chances == Chances([lengths]).survival(np.array(0), np.array([[0.0], [400.0], [5000.0]]), more)).all()


@given(st.lists(st.tuples(st.integers(1, 9), st.booleans()), max_size=12), st.integers(1, 11))
def test_what_cuts_an_answer_passes_its_weight_to_the_longer_ones(answers, tokens):
    """One after the other, by the redistribution to the right of Efron (1967); the assumed ones one token apart."""
    lengths = AnswerLengths()
    for answer in answers:
        lengths.note(*answer)
    weights = [(at + 0.25, 4 * ((1 + at / 512) ** -3 - (1 + (at + 1) / 512) ** -3)) for at in range(12)]
    weights.append((12.25, 4 * (1 + 12 / 512) ** -3))
    weights += [(length + 0.5 * cut, 1.0) for length, cut in answers]
    for at in sorted({length + 0.5 for length, cut in answers if cut}):
        total = sum(weight for place, weight in weights if place >= at)
        longer = sum(weight for place, weight in weights if place > at)
        weights = [
            (place, weight * total / longer if place > at else weight) for place, weight in weights if place != at
        ]
    survive = sum(weight for place, weight in weights if place >= tokens)
    assert survival(lengths, 0, tokens) == pytest.approx(survive / (4 + len(answers)))


def test_the_mean_is_that_of_the_chances():
    lengths = AnswerLengths()
    for number in range(40):
        lengths.note(10 * number, cut=number % 3 == 0)
    steps = np.arange(0, 200_000, 0.25) + 0.125
    chances = Chances([lengths]).survival(np.array(0), np.array(0.0), steps)
    assert lengths.curve.mean == pytest.approx(0.25 * chances.sum(), rel=1e-2)


def test_a_tenant_is_expected_to_answer_as_it_has_before_and_a_new_one_as_all_do():
    lengths = TenantLengths()
    for _ in range(ENOUGH):
        lengths.note("brief", 10, cut=False)
        lengths.note("long", 2000, cut=False)
    assert survival(lengths.of("brief"), 0, 1000) < 0.05
    assert survival(lengths.of("long"), 0, 1000) > 0.85
    lengths.note("new", 10, cut=False)
    assert 0.4 < survival(lengths.of("new"), 0, 1000) < 0.6


@pytest.mark.parametrize("tenant", ["default", "other"])
def test_requests_of_one_token_leave_long_answers_their_room(tenant):
    """Of one's own tenant, or of another: as many answers that may become long, and do not, come to their ends."""
    ended = []
    for scored in (0, 3):
        one = scheduler(400)
        one.set_tenant("other", TenantLimits())
        for number in range(100):
            one.add(make_request(f"chat{number}", [number] * 8, 1000))
        for step in range(60):
            for number in range(scored):
                one.add(make_request(f"scored{step}-{number}", [200 + step, number], 1, tenant=tenant))
            plan = one.schedule(float(step))
            flight = one.state.batch.flights[0]
            sampled = [flight.entries[position].sequence for position, _ in flight.samples]
            tokens = [[END_TOKEN if sequence.num_output_tokens == 9 else 1] for sequence in sampled]
            one.commit(StepResult(tokens, [None] * len(tokens)), float(step), plan.step)
        ended.append(100 - sum(name.startswith("chat") for name in one.request_ids()))
    alone, beside = ended
    assert alone > 30
    assert beside > 0.8 * alone


def columns(growing):
    return np.array(growing, dtype=np.float64).reshape(-1, len(Growing._fields)).T


SEQUENCE = st.tuples(st.integers(0, 40), st.integers(0, 200), st.integers(1, 300), st.booleans(), st.integers(0, 1))


@given(
    st.lists(SEQUENCE, min_size=1, max_size=12),
    st.lists(st.tuples(st.integers(1, 400), st.booleans()), max_size=8),
    st.integers(0, 2000),
)
def test_what_surely_fits_is_foreseen_to(sequences, answers, available):
    kinds = [AnswerLengths(), AnswerLengths()]
    for answer in answers:
        kinds[1].note(*answer)
    growing = [
        Growing(0, -(-(prompt + has) // BLOCK), 0, prompt + has, has, most, sure, kind)
        for prompt, has, most, sure, kind in sequences
    ]
    *running, new = [one._replace(held=one.entries) for one in growing]
    new = new._replace(held=0, coming=new.entries)
    blocks = sum(-(-(one.length + one.most) // BLOCK) for one in growing)
    held, all_sure = sum(one.held for one in running), all(one.sure for one in growing)
    if surely_fits(new.coming + blocks, available + held, all_sure):
        assert Forecast(Chances(kinds), columns(running), available, BLOCK, [None]).fits([new])
    enough = next(count for count in range(10_000) if surely_fits(new.coming + blocks, count + held, all_sure))
    assert Forecast(Chances(kinds), columns(running), enough, BLOCK, [None]).fits([new])


def test_a_window_bounds_what_a_sequence_grows_by():
    grows = Growing(held=4, entries=4, coming=0, length=16, has=1, most=1000, sure=True, kind=0)
    new = grows._replace(held=0, coming=4)
    windowed = Forecast(Chances([AnswerLengths()]), columns([grows]), 40, BLOCK, [16])
    full = Forecast(Chances([AnswerLengths()]), columns([grows]), 40, BLOCK, [None])
    assert windowed.fits([new])
    assert not full.fits([new])


@given(st.lists(SEQUENCE, min_size=1, max_size=12), st.integers(0, 400))
def test_where_all_lengths_are_sure_blocks_are_counted(sequences, available):
    growing = [
        Growing(0, -(-(prompt + has) // BLOCK), 0, prompt + has, has, most, sure=True, kind=0)
        for prompt, has, most, _, _ in sequences
    ]
    *running, new = [one._replace(held=one.entries) for one in growing]
    room = available + sum(one.held for one in running)
    expected = np.mean([one.has + one.most for one in growing])

    def fits(step: float) -> bool:
        blocks = sum(-(-(one.length + step - 1) // BLOCK) for one in growing if step <= one.most)
        return blocks <= room * (0.7 + 0.3 * max(0.0, 1 - step / expected))

    every = range(1, 1 + max(one.most for one in growing))
    found = Forecast(Chances([AnswerLengths()]), columns(running), available, BLOCK, [None]).fits(
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
