"""Quantized linear layers keep the model: perplexity of a real text, computed through the engine."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from drive import drive, request

from pagemill.sampling.params import SamplingParams

TEXT = Path(__file__).parents[2] / "benchmarks/peers/alice.txt"


def perplexity(core, tokens: list[int]) -> float:
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=1, ignore_eos=True)
    logprobs = drive(core, [request("text", tokens, params)]).logprobs["text", 0][1 : len(tokens)]
    return math.exp(-sum(each.logprobs[0] for each in logprobs) / len(logprobs))


@pytest.mark.parametrize("quantization", ["gguf", "int8"])
def test_perplexity_is_within_half_a_percent(make_engine, tokenizer, quantization):
    tokens = tokenizer.encode(TEXT.read_text()[20_000:22_000])
    exact = perplexity(make_engine(), tokens)
    core = make_engine(quantization=quantization)
    assert quantization in core.ready.description
    assert perplexity(core, tokens) == pytest.approx(exact, rel=0.005)
