"""Beam search on the real model: the sequences are those of transformers, the bits those of the same tokens alone."""

from __future__ import annotations

import pytest
import torch
from drive import Run, drive, record_logits, request

from harness import FRAME_BYTES
from pagemill.engine.messages import EngineRequest
from pagemill.sampling.params import BeamSearchParams, SamplingParams

CHAT = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
TEXTS = [
    CHAT.format("What is 2 + 2? Answer in one word."),
    CHAT.format("Name a colour."),
    "The capital of France is",
    "def fibonacci(n):\n    if n < 2:\n        return",
]
"""After the first two, answers end within a few tokens."""

CASES = [
    {"beam_width": 1},
    {"beam_width": 2},
    {"beam_width": 4},
    {"beam_width": 4, "early_stopping": True},
    {"beam_width": 3, "early_stopping": "never"},
    {"beam_width": 4, "length_penalty": 0.0},
    {"beam_width": 3, "length_penalty": 2.0, "early_stopping": "never"},
    {"beam_width": 3, "length_penalty": -1.0},
    {"beam_width": 5, "ignore_eos": True},
]
MAX_TOKENS = 14
PAD = 1
CLOSE = 1e-3
"""Of sums of up to 14 log probabilities, whose logits differ by 1.3e-4 at most (tests/parity/test_smollm2.py)."""


def search(name: str, prompt: list[int], params: BeamSearchParams) -> EngineRequest:
    """As the front end makes it."""
    rows = SamplingParams(n=params.beam_width, max_tokens=params.max_tokens, ignore_eos=params.ignore_eos)
    return EngineRequest(request_id=name, prompt_token_ids=prompt, params=rows, arrival_s=0.0, beam=params)


def found(run: Run, name: str, width: int) -> list[tuple[list[int], float | None, str | None]]:
    lasts = [run.last[name, index] for index in range(width)]
    return [(last.new_token_ids, last.cumulative_logprob, last.finish_reason) for last in lasts]


@pytest.fixture(scope="module")
def prompts_of_search(tokenizer):
    return [tokenizer.encode(text) for text in TEXTS]


@pytest.fixture(scope="module")
def searches(prompts_of_search):
    return [
        search(f"{case}-{i}", prompt, BeamSearchParams(max_tokens=MAX_TOKENS, **params))
        for case, params in enumerate(CASES)
        for i, prompt in enumerate(prompts_of_search)
        if i == case % len(TEXTS)
    ]


@pytest.fixture(scope="module")
def alone(make_engine, searches):
    """Every search by itself, without the prefix cache."""
    core = make_engine(enable_prefix_caching=False)
    run = Run()
    for one in searches:
        done = drive(core, [one])
        run.last |= done.last
    return run


def test_sequences_and_scores_are_those_of_transformers(alone, searches, reference, make_engine):
    eos = make_engine().ready.eos_token_ids
    reasons = set()
    for one in searches:
        params = one.beam
        with torch.no_grad():
            expected = reference.generate(
                torch.tensor([one.prompt_token_ids]),
                attention_mask=torch.ones(1, len(one.prompt_token_ids), dtype=torch.long),
                do_sample=False,
                num_beams=params.beam_width,
                num_return_sequences=params.beam_width,
                max_new_tokens=MAX_TOKENS,
                length_penalty=params.length_penalty,
                early_stopping=params.early_stopping,
                eos_token_id=None if params.ignore_eos else eos,
                pad_token_id=PAD,
                output_scores=True,
                return_dict_in_generate=True,
            )
        scores = getattr(expected, "sequences_scores", None)
        for index, (tokens, cum_logprob, reason) in enumerate(found(alone, one.request_id, params.beam_width)):
            theirs = expected.sequences[index, len(one.prompt_token_ids) :].tolist()
            assert tokens == theirs[: len(tokens)], f"{params}, sequence {index}"
            assert set(theirs[len(tokens) :]) <= {PAD}
            if scores is not None:
                their_sum = float(scores[index]) * len(tokens) ** params.length_penalty
                assert cum_logprob == pytest.approx(their_sum, abs=CLOSE)
            reasons.add(reason)
            assert reason == ("stop" if tokens[-1] in eos and not params.ignore_eos else "length")
    assert reasons == {"stop", "length"}


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"max_num_batched_tokens": 512, "max_num_seqs": 64}, marks=pytest.mark.slow),
        {"max_num_batched_tokens": 6, "max_num_seqs": 6},
        {"kv_memory": 16 * FRAME_BYTES, "max_model_len": 128, "max_num_seqs": 64},
        {
            "kv_memory": 16 * FRAME_BYTES,
            "max_model_len": 128,
            "max_num_seqs": 64,
            "enable_prefix_caching": False,
        },
    ],
    ids=["together", "small steps", "preempted", "preempted without a cache"],
)
def test_any_company_gives_the_same_sequences_and_sums(alone, searches, make_engine, settings, prompts):
    core = make_engine(**settings, target_tpot_ms="off")
    others = [
        request(f"other-{i}", prompts[i], SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True))
        for i in range(4)
    ]
    run = drive(core, [*searches, *others], every=2)
    assert bool(core.stats().preemptions) == ("kv_memory" in settings)
    for one in searches:
        width = one.beam.beam_width
        assert found(run, one.request_id, width) == found(alone, one.request_id, width)


def test_a_beams_logits_are_those_of_its_tokens_alone(make_engine, prompts_of_search):
    """The last step's logits of every beam, by its tokens, against a prompt of the same tokens."""
    core = make_engine()
    run = Run()
    seen = {}
    sample = core.executor.sampler.sample

    def recording(logits, rows):
        flight = core.scheduler.state.batch.flights[-1]
        for i, (position, _) in enumerate(flight.samples):
            seen[tuple(flight.entries[position].sequence.tokens)] = logits[i].clone()
        return sample(logits, rows)

    core.executor.sampler.sample = recording
    drive(core, [search("s", prompts_of_search[2], BeamSearchParams(4, 18, ignore_eos=True))])
    core.executor.sampler.sample = sample
    longest = max(map(len, seen))
    last = [tokens for tokens in seen if len(tokens) == longest]
    assert len(last) == 4
    fresh = make_engine(enable_prefix_caching=False)
    record_logits(fresh, run)
    for i, tokens in enumerate(last):
        drive(fresh, [request(f"{i}", list(tokens), SamplingParams(temperature=0.0, max_tokens=1))])
        assert torch.equal(run.logits[f"{i}", 0, longest], seen[tokens])


def test_a_failed_beam_fails_its_search_alone(make_engine, prompts_of_search, monkeypatch):
    core = make_engine()
    sample = core.executor.sampler.sample
    steps = 0

    def damaged(logits, rows):
        nonlocal steps
        steps += 1
        if steps == 6:
            logits[2] = float("nan")
        return sample(logits, rows)

    monkeypatch.setattr(core.executor.sampler, "sample", damaged)
    params = BeamSearchParams(3, 12, ignore_eos=True)
    run = drive(core, [search("fails", prompts_of_search[2], params), search("goes on", prompts_of_search[3], params)])
    reasons = {key: last.finish_reason for key, last in run.last.items()}
    assert reasons == {("fails", i): "error" for i in range(3)} | {("goes on", i): "length" for i in range(3)}
    assert "not finite" in run.last["fails", 1].error.message
