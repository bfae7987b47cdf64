"""The controller: bounds, hysteresis, and that nobody starves, whatever it is told."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagemill.memory.manager import MemoryManager
from pagemill.scheduling.controller import CALM, LEAST_PROMPT_TOKENS, MOST_KEPT, PATIENCE, RAISE, Controller
from pagemill.scheduling.scheduler import Scheduler
from pagemill.simulate.simulator import replay
from pagemill.simulate.step_time import COSTS, KVShape, StepTimes
from pagemill.simulate.trace import TracedRequest

MOST_TOKENS, MOST_SEQS = 256, 32


def controller(target_s=1.0) -> Controller:
    return Controller(target_s, max_num_batched_tokens=MOST_TOKENS, max_num_seqs=MOST_SEQS)


def limits(one: Controller) -> tuple[int, int]:
    return one.prompt_tokens, one.max_running


@given(st.lists(st.tuples(st.floats(0, 100), st.integers(0, MOST_TOKENS), st.integers(0, 40), st.integers(0, 3))))
def test_limits_stay_within_their_bounds(steps):
    one, preemptions = controller(), 0
    for seconds, prompt_tokens, running, preempted in steps:
        preemptions += preempted
        one.note_step(seconds, prompt_tokens, running, running)
        one.note_memory(preemptions, frames=100)
        assert LEAST_PROMPT_TOKENS <= one.prompt_tokens <= MOST_TOKENS
        assert 1 <= one.max_running <= MOST_SEQS
        assert 0 <= one.watermark <= MOST_KEPT * 100


@given(st.floats(0.05, 0.7), st.floats(0.0005, 0.009))
def test_it_settles_below_the_target_and_then_changes_nothing(decode_s, token_s):
    one = controller()
    seen = []
    for _ in range(100):
        taken = one.prompt_tokens
        seconds = decode_s + token_s * taken
        one.note_step(seconds, taken, 8, 8)
        seen.append((seconds, *limits(one)))
    assert len(set(seen[50:])) == 1
    assert seen[-1][0] <= 1.0
    assert one.prompt_tokens == MOST_TOKENS or seen[-1][0] >= CALM


@given(st.floats(0.05, 0.99), st.floats(0.0005, 0.05))
def test_no_raise_of_prompt_tokens_makes_a_step_too_long(decode_s, token_s):
    one = controller()
    short = False
    for _ in range(100):
        taken = one.prompt_tokens
        seconds = decode_s + token_s * taken
        assert not (short and seconds > 1.0)
        short = seconds < CALM
        one.note_step(seconds, taken, 8, 8)


def test_fewer_run_where_prompts_are_not_what_takes_long_and_more_again_later():
    one = controller()
    for _ in range(100):
        one.note_step(0.1 * one.max_running, 0, one.max_running, one.max_running)
    assert one.max_running in (8, 9, 10)
    assert one.prompt_tokens == MOST_TOKENS
    for _ in range(1000):
        one.note_step(0.01 * one.max_running, 0, one.max_running, one.max_running)
    assert one.max_running == MOST_SEQS


LONG, CALM_S, SHORT = 2.0, 0.9, 0.1
"""Steps of a target of one second."""


def running_after(steps) -> list[int]:
    """The limit on running sequences, lowered to 28 first, after each of these (seconds, running) without prompts."""
    one, after = controller(), []
    for seconds, running in [(LONG, MOST_SEQS)] * PATIENCE + steps:
        one.note_step(seconds, 0, running, running)
        after.append(one.max_running)
    return after[PATIENCE:]


def test_only_several_long_steps_in_a_row_let_fewer_run():
    few = PATIENCE - 1
    for between in (CALM_S, SHORT):
        steps = [(LONG, 28)] * few + [(between, 27)] + [(LONG, 28)] * few
        assert running_after(steps) == [28] * len(steps)
    assert running_after([(LONG, 28)] * PATIENCE) == [28] * few + [25]


def test_only_several_short_steps_in_a_row_with_all_running_let_more_run():
    few = PATIENCE - 1
    for between in ((CALM_S, 28), (LONG, 28), (SHORT, 27)):
        steps = [(SHORT, 28)] * few + [between] + [(SHORT, 28)] * few
        assert running_after(steps) == [28] * len(steps)
    assert running_after([(SHORT, 28)] * PATIENCE) == [28] * few + [29]


def test_tokens_of_prompts_that_nobody_wanted_do_not_become_more():
    one = controller()
    one.note_step(LONG, MOST_TOKENS, 8, 8)
    lowered = one.prompt_tokens
    one.note_step(SHORT, lowered - 1, 8, 8)
    assert one.prompt_tokens == lowered < MOST_TOKENS
    one.note_step(SHORT, lowered, 8, 8)
    assert one.prompt_tokens == lowered + lowered // RAISE


@pytest.mark.parametrize(("seconds", "left"), [(1.28, 125), (1.5999, 100), (50.0, 100)])
def test_a_long_step_lowers_tokens_of_prompts_in_proportion_and_at_most_to_half(seconds, left):
    """So that the next step would take 80 % of the target."""
    one = controller()
    one.note_step(seconds, 200, 8, 8)
    assert limits(one) == (left, MOST_SEQS)


def test_without_a_target_nothing_changes():
    one = controller(math.inf)
    for _ in range(20):
        one.note_step(100.0, 0, 8, 8)
    assert (*limits(one), one.watermark) == (MOST_TOKENS, MOST_SEQS, 0)


def test_a_step_in_which_nothing_generates_says_nothing():
    one = controller()
    one.note_step(100.0, MOST_TOKENS, 0, 8)
    assert limits(one) == (MOST_TOKENS, MOST_SEQS)


def test_preemptions_keep_blocks_free_for_a_while():
    one = controller()
    kept = []
    for preemptions in (0, 1, 3, 3, 3, *[3] * 10):
        one.note_memory(preemptions, frames=100)
        kept.append(one.watermark)
    assert kept[:5] == [0, 1, 4, 3, 2]
    assert kept[-1] == 0


@pytest.mark.parametrize("target_s", [10.0, None, math.inf])
def test_what_a_scheduler_preempts_keeps_blocks_free_at_admission(target_s):
    """Three sequences grow beyond the pool, without anybody foreseeing it; with a target, that is noticed."""
    scheduler = Scheduler(
        MemoryManager(12, 4, [None]),
        max_num_seqs=4,
        max_num_batched_tokens=32,
        eos_token_ids=frozenset(),
        ageing_s=10.0,
        target_tpot_s=target_s,
    )
    times = StepTimes({**dict.fromkeys(COSTS, 0.0), "step": 1.0}, KVShape((None,), 2, 64, 2), {})
    kept = []
    trace = [TracedRequest(n, 0.0, 5, 20) for n in range(3)]
    scheduler.state.lengths = None
    replay(trace, scheduler, times, [lambda *_: kept.append(scheduler.controller.watermark)])
    assert scheduler.preemptions
    assert (max(kept) > 0) == (target_s != math.inf)


@settings(max_examples=30, deadline=None)
@given(
    st.sampled_from([1e-6, 0.5, 1.1, 1.5, 3.0, None]),
    st.integers(11, 64),
    st.lists(st.tuples(st.integers(1, 25), st.integers(1, 12), st.floats(0, 3)), min_size=1, max_size=20),
)
def test_every_request_gets_its_tokens_whatever_the_target(target_s, frames, requests):
    at, trace = 0.0, []
    for number, (prompt, output, wait_s) in enumerate(requests):
        at += wait_s
        trace.append(TracedRequest(number, at, prompt, output))
    scheduler = Scheduler(
        MemoryManager(frames, 4, [None]),
        max_num_seqs=4,
        max_num_batched_tokens=32,
        eos_token_ids=frozenset(),
        ageing_s=10.0,
        target_tpot_s=target_s,
    )
    times = StepTimes(
        {**dict.fromkeys(COSTS, 0.0), "step": 0.4, "row": 0.2, "token to 32": 0.02}, KVShape((None,), 2, 64, 2), {}
    )
    outcome = replay(trace, scheduler, times)
    assert [one.num_tokens for one in outcome.served] == [request.output_len for request in trace]
    # The longest wait has a bound: each step brings a prompt on, or generates.
    assert outcome.steps <= sum(1 + -(-prompt // LEAST_PROMPT_TOKENS) + output for prompt, output, _ in requests) + (
        sum(one.starts - 1 for one in outcome.served) * 4
    )


@pytest.mark.parametrize("target_s", [1e-6, 0.9])
def test_a_step_takes_few_tokens_of_prompts_beside_those_that_generate(target_s):
    scheduler = Scheduler(
        MemoryManager(512, 16, [None]),
        max_num_seqs=8,
        max_num_batched_tokens=256,
        eos_token_ids=frozenset(),
        ageing_s=10.0,
        target_tpot_s=target_s,
    )
    times = StepTimes({**dict.fromkeys(COSTS, 0.0), "step": 0.1, "token beyond": 0.01}, KVShape((None,), 2, 64, 2), {})
    trace = [TracedRequest(0, 0.0, 16, 200), *(TracedRequest(n, 5.0 * n, 1000, 2) for n in range(1, 6))]
    beside = []

    def note(plan, seconds):
        generating = (plan.query_lens == 1).sum()
        if 0 < generating < plan.num_tokens:
            beside.append((plan.num_tokens - generating, seconds))

    outcome = replay(trace, scheduler, times, [note])
    assert all(one.num_tokens == one.request.output_len for one in outcome.served)
    late = beside[10:]
    assert bool(late) == (target_s == 0.9), "nobody meets the other target, so one sequence runs at a time"
    if target_s == 0.9:
        assert sum(seconds <= target_s for _, seconds in late) > 0.8 * len(late)
        assert max(tokens for tokens, _ in late) > 4 * LEAST_PROMPT_TOKENS
