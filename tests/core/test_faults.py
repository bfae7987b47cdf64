"""What goes wrong in a step fails the requests that cause it, gives back all they held, and leaves the others alone."""

from __future__ import annotations

import pytest
import torch
from drive import drive, request

from pagemill.errors import (
    EmptyPromptError,
    InvalidRequestError,
    KVMemoryError,
    PromptTooLongError,
    RequestTooLargeError,
)
from pagemill.sampling.params import SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True)


MARK = 40_000
"""A token that only the prompt of r2 has, and that no continuation comes to."""


@pytest.fixture
def core(make_engine):
    return make_engine(enable_prefix_caching=False)


@pytest.fixture
def requests(prompts):
    return [request(f"r{i}", prompts[i] + [MARK] * (i == 2), GREEDY) for i in range(6)]


def poison(core, monkeypatch, act):
    """Lets `act(token_ids, hidden)` meddle with the forward pass."""
    forward = core.executor.decoder.forward

    def meddling(token_ids, batch, *rest):
        return act(token_ids, batch, forward(token_ids, batch, *rest))

    monkeypatch.setattr(core.executor.decoder, "forward", meddling)


def assert_only_r2_failed(run, expected, error_type) -> None:
    assert run.last["r2", 0].error.error_type == error_type
    assert [key for key, last in run.last.items() if last.finish_reason == "error"] == [("r2", 0)]
    assert {key: tokens for key, tokens in run.tokens.items() if key[0] != "r2"} == {
        key: tokens for key, tokens in expected.items() if key[0] != "r2"
    }


def test_answers_that_begin_from_one_row_are_the_same_when_the_step_is_run_in_parts(core, prompts, monkeypatch):
    """As many answers as the prompt has tokens: there are as many samples as rows of hidden states."""
    three = SamplingParams(n=3, temperature=0.9, seed=1, max_tokens=5, ignore_eos=True, logprobs=1)
    requests = [request("three", prompts[0][:3], three), request("other", prompts[1], GREEDY)]
    expected = drive(core, requests)
    run, broken = core.executor.run, []

    def breaking(plan):
        if len(plan.rows) > 1:
            broken.append(plan.step)
            raise RuntimeError("the device hiccups")
        return run(plan)

    monkeypatch.setattr(core.executor, "run", breaking)
    again = drive(core, requests)
    assert broken
    assert (again.tokens, again.logprobs) == (expected.tokens, expected.logprobs)


def test_a_row_that_breaks_the_step_fails_alone(core, requests, monkeypatch):
    expected = drive(core, requests).tokens

    def act(token_ids, batch, hidden):
        if MARK in token_ids.tolist():
            raise RuntimeError("device assert")
        return hidden

    poison(core, monkeypatch, act)
    run = drive(core, requests)
    assert_only_r2_failed(run, expected, "StepFailedError")
    assert "RuntimeError: device assert" in run.last["r2", 0].error.message


def test_logits_that_are_not_finite_fail_their_request_only(core, requests, monkeypatch):
    expected = drive(core, requests).tokens

    def act(token_ids, batch, hidden):
        return torch.where((token_ids == MARK).unsqueeze(-1), torch.full_like(hidden, float("nan")), hidden)

    poison(core, monkeypatch, act)
    assert_only_r2_failed(drive(core, requests), expected, "NonFiniteLogitsError")


def test_what_was_computed_for_logits_that_are_not_finite_is_not_found(make_engine, prompts, monkeypatch):
    """A kernel may multiply a weight of zero by a later token's value: what lies before that token is suspect too."""
    core = make_engine(max_num_batched_tokens=64)
    joined = [token for prompt in prompts for token in prompt]
    shared, own = joined[:48], joined[100:180]
    drive(core, [request("first", shared + own[:1], GREEDY)])
    seen = []

    def act(token_ids, batch, hidden):
        seen.extend(token_ids.tolist())
        return torch.full_like(hidden, float("nan")) if MARK in seen else hidden

    with monkeypatch.context() as patch:
        poison(core, patch, act)
        run = drive(core, [request("bad", [*shared, *own[:40], MARK, *own[40:]], GREEDY)])
    assert run.last["bad", 0].error.error_type == "NonFiniteLogitsError"
    assert drive(core, [request("again", shared + own, GREEDY)]).cached["again"] == 0


def test_an_error_of_a_step_says_which_argument_it_is_about(core, prompts):
    none_left = SamplingParams(allowed_token_ids=core.ready.eos_token_ids, min_tokens=1)
    (last,) = drive(core, [request("r", prompts[0], none_left)]).last.values()
    assert (last.error.error_type, last.error.param) == ("SamplingParamsError", "allowed_token_ids")


def test_an_interrupted_step_gives_everything_back(core, requests, monkeypatch):
    def act(token_ids, batch, hidden):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        poison(core, patch, act)
        for one in requests:
            core.add_request(one)
        with pytest.raises(KeyboardInterrupt):
            core.step()
    assert core.stats().frames_active == 0
    assert core.stats().running == 0
    assert len(drive(core, requests).tokens) == 6


def test_a_plan_that_can_not_be_carried_out_fails_its_requests_and_the_engine_goes_on(core, requests, monkeypatch):
    def broken(*_):
        raise RuntimeError("out of device memory")

    with monkeypatch.context() as patch:
        patch.setattr(core.executor, "apply", broken)
        run = drive(core, requests)
    assert {last.error.error_type for last in run.last.values()} == {"StepFailedError"}
    assert "RuntimeError: out of device memory" in run.last["r0", 0].error.message
    assert {last.finish_reason for last in drive(core, requests).last.values()} == {"length"}


def fail_once(monkeypatch, owner, name, error, *, behind=False) -> None:
    """Lets a method raise an error, the first time that it is called; behind: once it has done its work."""
    method = getattr(owner, name)

    def failing(*args):
        monkeypatch.setattr(owner, name, method)
        if behind:
            method(*args)
        raise error

    monkeypatch.setattr(owner, name, failing)


@pytest.mark.parametrize("late", [False, True])
def test_what_fails_while_evicted_blocks_are_saved_fails_only_the_step(make_engine, requests, monkeypatch, late):
    core = make_engine(late=late, kv_host_memory="64MiB")
    expected = drive(core, requests).tokens
    fail_once(monkeypatch, core.tiers, "save", RuntimeError("no luck"))
    run = drive(core, requests)
    assert {last.error.error_type for last in run.last.values() if last.error} == {"StepFailedError"}
    assert "RuntimeError: no luck" in run.last["r0", 0].error.message
    assert core.stats().frames_active == 0
    assert drive(core, requests).tokens == expected
    core.close()


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("error", [KeyboardInterrupt, TimeoutError])
def test_an_interrupt_between_planning_a_step_and_running_it_leaves_no_step_behind(
    make_engine, requests, monkeypatch, late, error
):
    core = make_engine(late=late)
    expected = drive(core, requests).tokens
    for one in requests:
        core.add_request(one)
    core.step()
    fail_once(monkeypatch, core.scheduler, "schedule", error, behind=True)
    with pytest.raises(error):
        core.step()
    core.abort([one.request_id for one in requests])
    assert not core.has_work()
    assert core.stats().frames_active == 0
    assert drive(core, requests).tokens == expected


def test_abort_gives_everything_back_and_leaves_the_others(core, requests):
    expected = drive(core, requests).tokens
    for one in requests:
        core.add_request(one)
    outputs = core.step()
    core.abort(["r1", "r4", "never seen"])
    while core.has_work():
        outputs += core.step()
    tokens = {f"r{i}": [t for o in outputs if o.request_id == f"r{i}" for t in o.new_token_ids] for i in range(6)}
    for i in (0, 2, 3, 5):
        assert tokens[f"r{i}"] == expected[f"r{i}", 0]
    assert len(tokens["r1"]) <= 1
    assert core.stats().frames_active == 0


def test_a_request_id_in_use_is_refused(core, requests):
    core.add_request(requests[0])
    with pytest.raises(InvalidRequestError, match="'r0' is in use"):
        core.add_request(requests[0])
    core.close()
    assert not core.has_work()


@pytest.mark.parametrize(
    ("length", "kind", "words"),
    [
        (0, EmptyPromptError, "has no tokens; give it at least one"),
        (64, PromptTooLongError, "has 64 tokens, .* shorten the prompt to 63 tokens"),
    ],
)
def test_a_prompt_without_tokens_or_room_for_an_answer_is_refused(make_engine, length, kind, words):
    core = make_engine(max_model_len=64)
    with pytest.raises(kind, match=words):
        core.add_request(request("r", [5] * length, GREEDY))
    assert not core.has_work()
    core.add_request(request("r", [5] * 63, GREEDY))
    core.close()


def test_a_pool_too_small_for_one_sequence_is_refused(make_engine):
    with pytest.raises(
        KVMemoryError, match=r"the KV pool has 14 blocks .* one sequence needs 64 .* raise kv_memory, give "
    ):
        make_engine(kv_memory="10MiB", max_model_len=1024)


def test_a_request_that_can_never_fit_is_refused_and_the_engine_goes_on(make_engine, prompts):
    core = make_engine(kv_memory="10MiB", max_model_len=None)
    with pytest.raises(
        RequestTooLargeError, match=r"may grow to 405 tokens, which takes 26 KV blocks .* the pool has 14"
    ):
        core.add_request(request("big", prompts[0], SamplingParams(max_tokens=400)))
    assert drive(core, [request("small", prompts[0], GREEDY)]).last["small", 0].finish_reason == "length"


def test_the_longest_sequence_is_what_the_pool_takes_and_no_token_more(make_engine, prompts):
    core = make_engine(kv_memory="10MiB", max_model_len=None)
    longest = core.ready.longest_sequence
    assert longest == 14 * 16 + 1  # the last token needs no place
    assert f"{longest} of max_model_len={core.ready.max_model_len} fit" in core.ready.description
    room = longest - len(prompts[0])
    core.add_request(request("fits", prompts[0], SamplingParams(max_tokens=room)))
    with pytest.raises(RequestTooLargeError):
        core.add_request(request("over", prompts[0], SamplingParams(max_tokens=room + 1)))
    core.close()
