"""Blocks of running sequences are moved together, on a real model: no bit changes, and nothing wrong is found."""

from __future__ import annotations

import pytest
from drive import drive, request

from pagemill.memory.compaction import Compaction
from pagemill.sampling.params import SamplingParams
from shallow import FRAME_BYTES

pytestmark = pytest.mark.shallow
SMALL = {"kv_memory": 60 * FRAME_BYTES, "max_model_len": 400, "max_num_batched_tokens": 64, "block_size": 16}


@pytest.fixture(scope="module")
def requests(prompts):
    """Two long answers among short ones, which come and go."""
    joined = [token for prompt in prompts for token in prompt] * 2

    def one(number):
        long = number < 2
        params = SamplingParams(temperature=0.0, max_tokens=120 if long else 8, ignore_eos=True)
        return request(f"r{number}", joined[31 * number : 31 * number + (20 if long else 70)], params)

    return [one(number) for number in range(24)]


@pytest.fixture(scope="module")
def expected(requests, make_engine):
    """Serves the requests while no block moves."""
    still = make_engine(**SMALL, kv_compaction="off")
    run = drive(still, requests, every=6, record=True)
    assert (still.stats().compactions, still.stats().compaction_copies) == (0, 0)
    return run


@pytest.fixture(autouse=True)
def eager(monkeypatch):
    """Sequences this short are seldom worth a move."""
    monkeypatch.setattr(Compaction, "payback_steps", 2)


def test_no_bit_changes(requests, expected, make_engine):
    moving = make_engine(**SMALL)
    run = drive(moving, requests, every=6, record=True)
    assert moving.stats().compactions > 0
    assert moving.stats().compaction_copies >= 2 * moving.stats().compactions
    assert run.tokens == expected.tokens
    for key, logits in run.logits.items():
        assert logits.equal(expected.logits[key]), key


def test_what_did_not_arrive_is_not_found(requests, expected, make_engine, monkeypatch):
    core = make_engine(**SMALL)
    copy, fail = core.executor.pool.frames.copy, [True]

    def failing(source, target):
        if core.stats().compactions and fail:
            fail.clear()
            raise RuntimeError("the device is lost")
        return copy(source, target)

    monkeypatch.setattr(core.executor.pool.frames, "copy", failing)
    run = drive(core, requests, every=6)
    assert not fail
    failed = {key for key, last in run.last.items() if last.finish_reason == "error"}
    assert failed
    for number in (0, 1):  # what is found of it may be what the failed run has left
        prompt = requests[number].prompt_token_ids + expected.tokens[f"r{number}", 0][:80]
        params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
        again = drive(core, [request(f"again{number}", prompt, params)])
        assert again.tokens[f"again{number}", 0] == expected.tokens[f"r{number}", 0][80:100]
    for key, tokens in run.tokens.items():
        if key not in failed:
            assert tokens == expected.tokens[key]
