"""The pacer: prompts leave a step short beside generating sequences, and nobody starves, whatever it is told."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagemill.scheduling.pacing import LEAST_PROMPT_TOKENS, PROBE_AFTER, STRETCH, TELLING_TOKENS, Pacer

MOST = 512


@given(st.lists(st.tuples(st.floats(0, 100), st.integers(0, MOST), st.integers(0, 40), st.integers(0, 300))))
def test_prompts_get_their_tokens_whatever_it_is_told(steps):
    pacer, without = Pacer(MOST), 0
    for seconds, prompt_tokens, generating, batch in steps:
        tokens = pacer.prompt_tokens(generating, batch)
        assert tokens == 0 or LEAST_PROMPT_TOKENS <= tokens <= MOST
        without = without + 1 if tokens == 0 else 0
        assert without <= 1, "two steps in a row were kept from prompts"
        pacer.note_step(seconds, min(tokens, prompt_tokens), generating)


def test_it_is_told_nothing_and_keeps_nothing_back_but_one_step_in_many():
    pacer = Pacer(MOST)
    seen = [pacer.prompt_tokens(4, 8) for _ in range(2 * PROBE_AFTER + 2)]
    assert set(seen) == {0, MOST}
    assert seen.count(0) == 2


@given(st.floats(0.001, 0.1), st.floats(1e-5, 1e-3), st.integers(1, 60), st.integers(0, 60))
def test_a_step_takes_at_most_so_many_times_what_the_whole_batch_takes_without_prompts(step_s, token_s, few, waiting):
    """Every token takes as long as any other, beside what each step takes."""
    pacer, batch, tokens = Pacer(MOST), few + waiting, 0
    pacer.note_step(token_s * MOST, MOST, 0)
    for _ in range(2 * PROBE_AFTER):
        tokens = pacer.prompt_tokens(few, batch)
        pacer.note_step(step_s + token_s * (tokens + few), tokens, few)
    seconds, most = step_s + token_s * (tokens + few), STRETCH * (step_s + token_s * batch)
    assert seconds <= 1.02 * most or tokens == LEAST_PROMPT_TOKENS
    assert seconds >= 0.95 * (most - token_s) or tokens == MOST


def test_prompts_take_more_where_few_generate_and_many_wait():
    pacer = Pacer(MOST)
    pacer.note_step(0.5, MOST, 0)
    pacer.prompt_tokens(4, 4)
    pacer.note_step(0.05, 0, 4)
    assert LEAST_PROMPT_TOKENS < pacer.prompt_tokens(4, 4) < pacer.prompt_tokens(4, 100) - 100


def test_steps_of_few_prompt_tokens_alone_say_little():
    pacer = Pacer(MOST)
    pacer.note_step(0.5, MOST, 0)
    pacer.note_step(0.05, 0, 4)
    before = pacer.prompt_tokens(4, 4)
    for _ in range(20):
        pacer.note_step(0.5, TELLING_TOKENS - 1, 0)
    assert pacer.prompt_tokens(4, 4) == before


def test_the_first_step_that_tells_takes_the_place_of_a_guess():
    pacer = Pacer(MOST)
    pacer.note_step(0.5, 4, 0)
    assert not pacer.tells
    pacer.note_step(0.5, 0, 4)
    pacer.note_step(0.51, 40, 4)
    assert pacer.tells
    assert pacer.token_s == pytest.approx(0.01 / 40)
