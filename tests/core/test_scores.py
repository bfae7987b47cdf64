"""Prompts that are scored and not answered: log probabilities are transformers', and nothing is sampled."""

from __future__ import annotations

import pytest
import torch
from drive import drive, request

from pagemill.sampling.params import SamplingParams

TOLERANCE = 5e-4
"""As of logits (test_smollm2)."""


def scored(tops: int = 3) -> SamplingParams:
    return SamplingParams(max_tokens=0, prompt_logprobs=tops, detokenize=False)


def test_log_probabilities_are_transformers(make_engine, prompts, reference):
    core = make_engine(max_num_batched_tokens=32)  # several chunks, several prompts in one step
    asked = {f"r{i}": prompt for i, prompt in enumerate([*prompts[:4], prompts[4] * 3])}
    run = drive(core, [request(name, prompt, scored()) for name, prompt in asked.items()])
    for name, prompt in asked.items():
        assert run.tokens[name, 0] == []
        assert run.last[name, 0].finish_reason == "length"
        first, *found = run.logprobs[name, 0]
        assert (first, len(found)) == (None, len(prompt) - 1)
        with torch.no_grad():
            expected = torch.log_softmax(reference(torch.tensor([prompt])).logits[0, :-1], -1)
        for row, token, entry in zip(expected, prompt[1:], found, strict=True):
            assert entry.token_ids[0] == token
            assert entry.rank == pytest.approx(1 + int((row > row[token]).sum()), abs=1)  # of tokens that nearly tie
            assert entry.logprobs == pytest.approx(row[entry.token_ids].tolist(), abs=TOLERANCE)
            assert entry.logprobs[1:] == pytest.approx(row.topk(3).values.tolist(), abs=TOLERANCE)
    stats = core.stats()
    assert (stats.generated_tokens, stats.frames_active) == (0, 0)


def test_a_score_is_that_of_a_request_that_goes_on(make_engine, prompts):
    core, prompt = make_engine(), prompts[0]
    longer = SamplingParams(temperature=0.0, max_tokens=3, prompt_logprobs=2, detokenize=False)
    run = drive(core, [request("scored", prompt, scored(2)), request("answered", prompt, longer)])
    assert run.logprobs["scored", 0] == run.logprobs["answered", 0][: len(prompt)]


def test_a_prompt_that_is_only_computed_is_found_by_the_next(make_engine, prompts):
    core, prompt = make_engine(), prompts[0] * 4
    drive(core, [request("warm", prompt, SamplingParams(max_tokens=0, detokenize=False))])
    again = SamplingParams(temperature=0.0, max_tokens=1, detokenize=False)
    assert drive(core, [request("again", prompt, again)]).cached["again"] == (len(prompt) - 1) // 16 * 16
