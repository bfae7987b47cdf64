"""Embeddings equal those made of transformers' hidden states, and go through the engine like any other request."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from drive import drive, request

from pagemill.sampling.params import SamplingParams
from pagemill.sampling.pooling_params import PoolingParams

TOLERANCE = 1e-4
"""Of vectors of length 1; measured: 2e-5."""
NOTHING = SamplingParams(temperature=0.0, max_tokens=0, detokenize=False)
WAYS = [("MEAN", True), ("LAST", True), ("MEAN", False), ("LAST", False)]


def embed(core, prompts, way="MEAN", normalize=True) -> list[np.ndarray]:
    pooling = PoolingParams(pooling_type=way, normalize=normalize)
    run = drive(core, [request(f"r{i}", prompt, NOTHING, pooling=pooling) for i, prompt in enumerate(prompts)])
    assert {output.finish_reason for output in run.last.values()} == {"stop"}
    return [np.frombuffer(run.last[f"r{i}", 0].pooled, np.float32) for i in range(len(prompts))]


def expected(reference, prompt, way, normalize) -> np.ndarray:
    with torch.no_grad():
        states = reference.model(torch.tensor([prompt])).last_hidden_state[0].double()
    vector = states.mean(0) if way == "MEAN" else states[-1]
    return (vector / vector.norm() if normalize else vector).float().numpy()


@pytest.fixture
def texts(prompts) -> list[list[int]]:
    return [*prompts[:4], prompts[4] * 4, prompts[5][:1]]


@pytest.mark.parametrize(("way", "normalize"), WAYS)
def test_they_are_transformers(make_engine, texts, reference, way, normalize):
    core = make_engine(max_num_batched_tokens=32)  # several chunks, several prompts in one step
    for text, vector in zip(texts, embed(core, texts, way, normalize), strict=True):
        wanted = expected(reference, text, way, normalize)
        assert vector.shape == wanted.shape == (core.ready.hidden_size,)
        assert np.abs(vector - wanted).max() <= TOLERANCE * np.linalg.norm(wanted)
    assert core.stats().frames_active == 0


def test_only_the_last_token_goes_on_from_cached_prefixes(make_engine, texts):
    core, text = make_engine(), texts[4]
    fresh = {way: embed(core, [text], way)[0] for way in ("MEAN", "LAST")}
    drive(core, [request("warm", text, NOTHING)])
    found = core.stats().prefix_hit_tokens
    assert np.array_equal(embed(core, [text], "MEAN")[0], fresh["MEAN"])
    assert core.stats().prefix_hit_tokens == found, "skipped tokens would be missing in the mean"
    assert np.array_equal(embed(core, [text], "LAST")[0], fresh["LAST"])
    assert core.stats().prefix_hit_tokens == found + (len(text) - 1) // 16 * 16


def test_preemption_changes_no_vector(make_engine, texts):
    prompts = [texts[4][:-at] for at in range(1, 5)]
    roomy, tight = make_engine(), make_engine(kv_memory=f"{make_engine().executor.facts.frame_bytes * 9 / 2**20}MiB",
                                              max_model_len=128, max_num_batched_tokens=16)  # fmt: skip
    answering = request("other", prompts[0][:20], SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True))
    pooling = PoolingParams(pooling_type="MEAN")
    asked = [request(f"r{i}", prompt, NOTHING, pooling=pooling) for i, prompt in enumerate(prompts)]
    run = drive(tight, [answering, *asked])
    for i, vector in enumerate(embed(roomy, prompts)):
        assert np.allclose(np.frombuffer(run.last[f"r{i}", 0].pooled, np.float32), vector, atol=1e-6)


def test_hidden_states_that_are_not_finite_fail_their_request_alone(make_engine, texts, monkeypatch):
    core = make_engine()
    forward = core.executor.decoder.forward

    def broken(token_ids, *args):
        hidden = forward(token_ids, *args)
        hidden[0, 0] = float("nan")
        return hidden

    monkeypatch.setattr(core.executor.decoder, "forward", broken)
    pooling = PoolingParams(pooling_type="MEAN")
    run = drive(core, [request(name, texts[0], NOTHING, pooling=pooling) for name in ("one", "other")])
    ends = {name: output for (name, _), output in run.last.items()}
    assert "hidden states" in ends["one"].error.message
    assert (ends["other"].error, ends["one"].pooled) == (None, None)
    assert core.stats().frames_active == 0
