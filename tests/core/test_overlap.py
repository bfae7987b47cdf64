"""Steps that overlap change no answer: a step is planned, applied and submitted while the one before it runs."""

from __future__ import annotations

import random

import pytest
from drive import Run, drive, request
from tests.eager_drafter import Eager

from pagemill.errors import EngineDeadError
from pagemill.sampling.params import BeamSearchParams, SamplingParams
from shallow import FRAME_BYTES

pytestmark = pytest.mark.shallow
WAYS = {
    "calm": {},
    "small steps": {"max_num_batched_tokens": 37, "max_num_seqs": 5},
    "small pool": {"kv_memory": 26 * FRAME_BYTES, "max_num_batched_tokens": 64, "target_tpot_ms": "off"},
    "host tier": {
        "kv_memory": 26 * FRAME_BYTES,
        "kv_host_memory": 80 * FRAME_BYTES,
        "preemption_mode": "swap",
        "target_tpot_ms": "off",
        "max_num_batched_tokens": 64,
    },
    "n-grams": {"speculative_config": {"method": "ngram"}},
}


@pytest.fixture(scope="module")
def requests(prompts, tokenizer):
    joined = [token for prompt in prompts for token in prompt]
    shared = joined[:100]
    greedy = {"temperature": 0.0, "ignore_eos": True}
    stops = [token for word in (" the", ",", ".", "\n") for token in tokenizer.encode(word)[:1]]
    cases = [
        ([*shared, *prompts[2]], SamplingParams(**greedy, max_tokens=20)),
        (joined[:200], SamplingParams(**greedy, max_tokens=16, logprobs=2)),
        ([*shared, *prompts[3]], SamplingParams(temperature=1.0, n=3, seed=10, max_tokens=20)),
        (
            prompts[9],
            SamplingParams(temperature=0.7, repetition_penalty=1.3, presence_penalty=0.5, seed=9, max_tokens=24),
        ),
        (prompts[4], SamplingParams(temperature=0.9, seed=7, max_tokens=40, stop_token_ids=stops)),
        (prompts[5], SamplingParams(temperature=1.5, seed=8, max_tokens=60, stop_token_ids=stops, min_tokens=5)),
        (prompts[1], SamplingParams(**greedy, max_tokens=1)),
        (joined[20:90], SamplingParams(temperature=0.0, max_tokens=0, prompt_logprobs=1)),
        (prompts[6], SamplingParams(temperature=0.0, max_tokens=24, structured_outputs={"regex": "[a-z ]{2,16}"})),
        (prompts[7], SamplingParams(**greedy, max_tokens=9, bad_words_token_ids=[prompts[1][:2]])),
    ]
    made = [request(f"r{i}", prompt, params) for i, (prompt, params) in enumerate(cases)]
    search = BeamSearchParams(3, max_tokens=8, ignore_eos=True)
    made.append(request("beams", prompts[8], SamplingParams(n=3), beam=search))
    return made


@pytest.fixture(scope="module")
def expected(requests, make_engine):
    return drive(make_engine(enable_prefix_caching=False), requests)


def answers(run: Run):
    """All that comes of requests. The order in which the beams of a search end is that of their scores."""
    ends = {key: (last.finish_reason, last.stop_reason, last.cumulative_logprob) for key, last in run.last.items()}
    return run.tokens, run.logprobs, ends


@pytest.mark.parametrize("every", [0, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "way", [way if way == "host tier" else pytest.param(way, marks=pytest.mark.slow) for way in WAYS]
)
def test_no_answer_changes(requests, expected, make_engine, way, every):
    core = make_engine(late=True, max_model_len=352, **WAYS[way])
    for _ in range(2):  # then with what is cached
        run = drive(core, requests, every=every)
        assert answers(run) == answers(expected)
    assert core.executor.overlapped > 10
    if way in ("small pool", "host tier") and not every:
        assert core.stats().preemptions > 0
    core.close()


def test_drafts_of_some_steps_change_no_answer(requests, expected, make_engine):
    core = make_engine(late=True, speculative_config={"method": "ngram"})
    drafter = core.scheduler.drafter = Eager(seed=3)
    propose, of = drafter.propose, {key[0]: run for key, run in expected.tokens.items()}

    def guess(room, rows, budget, limit_s, branches):
        """Right ones and wrong ones."""
        drafts = propose(room, rows, budget, limit_s, branches)
        for sequence, (tokens,) in drafts.items():
            answer = of[sequence.request.request_id]
            at = sequence.num_output_tokens
            tokens[:] = [*answer[at : at + len(tokens) - 1], *[5] * len(tokens)][: len(tokens)]
        return drafts

    drafter.propose = guess
    run = drive(core, requests)
    assert answers(run) == answers(expected)
    assert core.executor.overlapped > 5
    assert core.stats().accepted_tokens > 0


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2, 3))])
def test_whatever_happens_between_steps(requests, expected, make_engine, seed):
    """Aborts, ends by the front end, other sizes of the pool, a reset, and steps that fail in parts."""
    draw = random.Random(seed)
    core, run = make_engine(late=True, kv_memory=60 * FRAME_BYTES, max_model_len=352, max_num_batched_tokens=64), Run()
    inner, disturbed, broken = core.executor.inner.run, set(), []

    def breaking(plan):
        if len(plan.rows) > 1 and draw.random() < 0.2:
            broken.append(plan.step)
            raise RuntimeError("the device hiccups")
        return inner(plan)

    core.executor.inner.run = breaking
    waiting = draw.sample(requests, len(requests))
    while waiting or core.has_work():
        if waiting and draw.random() < 0.5:
            core.add_request(waiting.pop())
        live = core.scheduler.request_ids()
        what = draw.choice(["abort", "finish", "resize", "resize", "reset", *[""] * 12])
        if what in ("abort", "finish") and live and len(disturbed) < 3:
            disturbed.add(name := draw.choice(live))
            core.abort([name]) if what == "abort" else core.finish([(name, 0)])
        elif what == "resize":
            core.resize(draw.choice([40, 60, 90]) * FRAME_BYTES)
        elif what == "reset":
            core.reset_prefix_cache()
        run.take(core.step())
    assert broken
    assert core.executor.voided
    assert core.executor.overlapped > 10
    assert core.stats().frames_active == 0
    for key, tokens in expected.tokens.items():
        if key[0] in disturbed:
            assert run.tokens.get(key, []) == tokens[: len(run.tokens.get(key, []))]
        else:
            assert (run.tokens[key], run.logprobs[key]) == (tokens, expected.logprobs[key])
    core.close()


MARK = 40_000
GREEDY = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True)


@pytest.fixture
def marked(prompts):
    return [request(f"r{i}", prompts[i] + [MARK] * (i == 2), GREEDY) for i in range(6)]


def test_a_row_that_breaks_its_step_fails_alone_and_the_step_behind_it_runs_again(marked, make_engine):
    core = make_engine(late=True, enable_prefix_caching=False)
    want = drive(core, marked).tokens
    inner = core.executor.inner.run

    def breaking(plan):
        row = next((one.row for one in core.scheduler.state.running if one.request.request_id == "r2"), -1)
        if (row, len(marked[2].prompt_token_ids) + 2) in zip(plan.rows.tolist(), plan.starts.tolist(), strict=True):
            raise RuntimeError("device assert")
        return inner(plan)

    core.executor.inner.run = breaking
    run = drive(core, marked)
    assert core.executor.voided == 1
    assert [key for key, last in run.last.items() if last.finish_reason == "error"] == [("r2", 0)]
    assert run.tokens.pop(("r2", 0)) == want.pop(("r2", 0))[:3]
    assert run.tokens == want


def test_a_plan_that_cannot_be_applied_ends_its_rows_after_the_step_before_it(marked, make_engine):
    core, run = make_engine(late=True), Run()
    want = drive(core, marked[:2]).tokens
    apply = core.executor.inner.apply
    for one in marked[:2]:
        core.add_request(one)
    for _ in range(4):
        run.take(core.step())
    had = [len(tokens) for tokens in run.tokens.values()]
    core.executor.inner.apply = lambda plan: 1 / 0
    run.take(core.step())
    core.executor.inner.apply = apply
    assert [len(tokens) for tokens in run.tokens.values()] == [count + 1 for count in had]
    assert {last.error.error_type for last in run.last.values()} == {"StepFailedError"}
    assert all(tokens == want[key][: len(tokens)] for key, tokens in run.tokens.items())
    assert core.stats().frames_active == 0
    assert drive(core, marked[:2]).tokens == want


@pytest.mark.parametrize("error", [KeyboardInterrupt, EngineDeadError("gone")])
@pytest.mark.parametrize("where", ["apply", "submit", "collect"])
def test_what_is_more_than_a_fault_loses_all_steps_in_flight(marked, make_engine, error, where):
    core = make_engine(late=True)
    for one in marked:
        core.add_request(one)
    core.step()
    real = getattr(core.executor.inner, where)

    def broken(_):
        setattr(core.executor.inner, where, real)
        raise error

    setattr(core.executor.inner, where, broken)
    with pytest.raises(KeyboardInterrupt if error is KeyboardInterrupt else EngineDeadError):
        core.step()
    assert (core.stats().running, core.stats().frames_active) == (0, 0)
    if error is KeyboardInterrupt:
        assert len(drive(core, marked).tokens) == 6
    core.close()


def test_a_last_step_is_taken_in_at_once(marked, make_engine):
    core = make_engine(late=True)
    core.add_request(marked[0])
    outputs = []
    while not any(output.finish_reason for output in outputs):
        outputs = core.step()
    for _ in range(2):
        if core.has_work():
            core.step()
    assert not core.has_work()
    core.add_request(marked[1])
    core.step()
    core.abort(["r1"])
    assert core.has_work(), "a step is in flight"
    core.step()
    assert not core.has_work()
    assert core.stats().frames_active == 0


def test_a_load_that_a_plan_has_begun_in_vain_ends_before_the_pool_shrinks(prompts, make_engine):
    """Its blocks would be moved, and it would bring what it brings to where they were."""
    long = [token for prompt in prompts for token in prompt][:200]
    core = make_engine(late=True, max_model_len=352, kv_memory=30 * FRAME_BYTES, kv_host_memory=80 * FRAME_BYTES)
    first = drive(core, [request("long", long, GREEDY)])
    for other in (long[::-1], long[100:] + long[:100]):
        drive(core, [request("other", other, GREEDY)])
    assert core.stats().blocks_saved > 0
    core.add_request(request("ends", prompts[1], SamplingParams(temperature=0.0, max_tokens=1)))
    core.step()
    core.add_request(request("long again", long, GREEDY))
    core.step()
    assert core.scheduler.num_loading == 1
    core.resize(24 * FRAME_BYTES)
    assert core.scheduler.num_loading == 0
    core.memory.check()
    outputs = []
    while core.has_work():
        outputs += core.step()
    again = [token for each in outputs if each.request_id == "long again" for token in each.new_token_ids]
    assert again == first.tokens["long", 0]
    core.close()


def test_a_step_takes_from_one_end_to_the_next(marked, make_engine, monkeypatch):
    core, noted, now = make_engine(late=True), [], [100.0]
    monkeypatch.setattr("pagemill.engine.step_loop.time.monotonic", lambda: now[0])
    core.scheduler.note_step = lambda plan, seconds: noted.append(seconds)
    core.add_request(marked[0])
    core.step()
    for _ in range(3):
        now[0] += 2.0
        core.step()
    assert noted == [2.0] * 3
