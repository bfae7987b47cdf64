"""The real SmolLM2-135M: logits over real text equal transformers' dense float32 ones from the same GGUF file."""

from __future__ import annotations

import math

import pytest
import torch
from transformers import AutoTokenizer

from harness import PagedSequences, load_on
from pagemill.hub.registry import REGISTRY

MODEL = REGISTRY["smollm2-135m"].file
TOLERANCE = 5e-4
"""30 wide layers add up more rounding than the small models of test_families (measured: 1.3e-4)."""
PROMPTS = [
    "The capital of France is Paris, and the capital of Italy is",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return fibonacci(n - 1) +",
    "<|im_start|>user\nWhy is the sky blue?<|im_end|>\n<|im_start|>assistant\n",
    "A block table maps the positions of a sequence to frames of memory, much like a page table in an operating "
    "system. When a block is full, it may be shared between sequences that begin in the same way, and",
]

pytestmark = pytest.mark.skipif(not MODEL.is_file(), reason=f"{MODEL} is not there; `pagemill pull smollm2-135m`")


@pytest.fixture(scope="module")
def expected(reference):
    """Token ids of the prompts and their logits."""
    tokenizer = AutoTokenizer.from_pretrained(MODEL.parent, gguf_file=MODEL.name)
    prompts = [tokenizer(text)["input_ids"] for text in PROMPTS]
    with torch.no_grad():
        return prompts, [reference(torch.tensor([ids]), use_cache=False).logits[0] for ids in prompts]


@pytest.fixture(scope="module")
def model():
    return load_on("cpu", MODEL, dtype="float32")


def test_logits(expected, model):
    prompts, logits = expected
    assert model.dtype == torch.float32
    assert model.eos_token_ids == (2, 0)
    assert torch.cat(logits).std() > 1
    ours = PagedSequences(model.decoder, prompts).run_mixed()
    for a, b in zip(ours, logits, strict=True):
        assert (a - b).abs().max() <= TOLERANCE


def test_it_predicts_the_text(expected, model):
    """The model reads: a wrong RoPE or a permuted head would still give plausible logits, but not this likelihood."""
    prompts, _ = expected
    logits = PagedSequences(model.decoder, prompts[-1:]).run()[0]
    chances = torch.log_softmax(logits[:-1], -1).gather(1, torch.tensor(prompts[-1][1:]).unsqueeze(1))
    assert -chances.mean() < 0.5 * math.log(model.spec.vocab_size)
