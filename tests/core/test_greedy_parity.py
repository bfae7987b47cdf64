"""Greedy continuations of real prompts by the real model equal those of transformers, dense and in fp32."""

from __future__ import annotations

import torch
from drive import drive, request

from pagemill.sampling.params import SamplingParams

OUTPUT_TOKENS = 16
CLOSE = 1e-3
"""Two logits of the reference that lie closer than this may change places."""


def test_greedy_continuations_equal_the_dense_reference(make_engine, prompts, reference):
    """Each token is held against the reference's choice after the same tokens; flips between close ones are counted."""
    assert len(prompts) >= 32
    core = make_engine(max_num_batched_tokens=128)
    params = SamplingParams(temperature=0.0, max_tokens=OUTPUT_TOKENS, ignore_eos=True)
    run = drive(core, [request(str(i), prompt, params) for i, prompt in enumerate(prompts)])
    flips = []
    for i, prompt in enumerate(prompts):
        output = run.tokens[str(i), 0]
        assert len(output) == OUTPUT_TOKENS
        with torch.no_grad():
            logits = reference(torch.tensor([prompt + output[:-1]])).logits[0, len(prompt) - 1 :]
        best = logits.max(dim=-1)
        for step, token in enumerate(output):
            if token != int(best.indices[step]):
                flips.append((i, step, float(best.values[step] - logits[step, token])))
    assert all(gap < CLOSE for _, _, gap in flips), f"not the reference's choice: {flips}"
    assert len(flips) <= 2, f"more flips than rounding explains: {flips}"
