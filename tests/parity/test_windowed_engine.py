"""Engines on models of layers with sliding windows, random weights."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from random_models import CASES, VOCAB, WINDOW, reference_logits
from transformers import AutoModelForCausalLM

from pagemill.config import EngineConfig
from pagemill.engine.core import EngineCore
from pagemill.engine.messages import EngineRequest, SequenceOutput
from pagemill.executor import share
from pagemill.models.loading import load_model
from pagemill.sampling.params import SamplingParams
from pagemill.sampling.pooling_params import PoolingParams

BLOCK, LENGTH, TOKENS, PROMPTS = 8, 89, 5, 5
GROUPS = {"mistral": (0, 1), "qwen2": (1, 1), "gemma3": (1, 2)}
"""Layer groups with full attention, and with windows."""


@pytest.fixture(params=GROUPS)
def model(request, tmp_path, monkeypatch):
    monkeypatch.setattr(share, "load_model", load_model)  # which shares one model among other tests
    (case,) = (case for case in CASES if case.name == request.param)
    case.save(tmp_path / "model")
    return request.param, str(tmp_path / "model")


@pytest.fixture
def prompts() -> list[list[int]]:
    return [[3 + (7 * at + at * at * (3 + seed)) % (VOCAB - 3) for at in range(LENGTH)] for seed in range(PROMPTS)]


def make(path: str, **settings) -> EngineCore:
    return EngineCore(
        EngineConfig(
            model=path, block_size=BLOCK, dtype="float32", max_model_len=96, max_num_batched_tokens=32, max_num_seqs=4,
            check_invariants=True, **settings,
        )
    )  # fmt: skip


def ask(core: EngineCore, prompt: list[int]) -> list[SequenceOutput]:
    params = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True, logprobs=5)
    core.add_request(EngineRequest(request_id="r", prompt_token_ids=prompt, params=params, arrival_s=0.0))
    outputs = []
    while core.has_work():
        outputs += core.step()
    assert not [output.error for output in outputs if output.error]
    return outputs


def test_prompts_in_chunks_go_on_as_in_transformers(model, prompts):
    name, path = model
    core = make(path, kv_memory="64MiB")
    assert len(core.memory.windows) == sum(GROUPS[name])
    for prompt in prompts:
        tokens = [token for output in ask(core, prompt) for token in output.new_token_ids]
        (logits,) = reference_logits(path, [prompt + tokens[:-1]])
        assert logits[LENGTH - 1 :].argmax(-1).tolist() == tokens
    core.close()


def test_of_a_stored_prompt_what_its_next_token_sees_is_loaded_and_not_a_bit_differs(model, prompts):
    name, path = model
    full, windowed = GROUPS[name]
    plain = make(path, kv_memory="64MiB", enable_prefix_caching=False)
    expected, block_bytes = ask(plain, prompts[0]), plain.stats().block_bytes
    plain.close()
    core = make(path, kv_memory=(13 * full + 9 * windowed) * block_bytes, kv_host_memory="64MiB")
    for prompt in prompts:
        ask(core, prompt)
    core.tiers.transfers.flush()
    assert core.stats().blocks_loaded == 0
    again = ask(core, prompts[0])
    assert [(each.new_token_ids, each.logprobs) for each in again] == [
        (each.new_token_ids, each.logprobs) for each in expected
    ]
    found = LENGTH // BLOCK
    assert again[-1].num_cached_tokens == found * BLOCK
    seen = found - (found * BLOCK - WINDOW + 1) // BLOCK
    assert core.stats().blocks_loaded == full * found + windowed * seen
    assert core.stats().blocks_missed == core.stats().frames_active == 0
    core.close()


@pytest.mark.parametrize("way", ["MEAN", "LAST"])
def test_embeddings_are_transformers(model, prompts, way):
    _, path = model
    core, reference = make(path, kv_memory="64MiB"), AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    pooling = PoolingParams(pooling_type=way, normalize=False)
    for prompt in prompts[:2]:
        params = SamplingParams(max_tokens=0, detokenize=False)
        core.add_request(
            EngineRequest(request_id="r", prompt_token_ids=prompt, params=params, pooling=pooling, arrival_s=0.0)
        )
        outputs = []
        while core.has_work():
            outputs += core.step()
        with torch.no_grad():
            states = reference.eval().model(torch.tensor([prompt])).last_hidden_state[0]
        wanted = states.mean(0) if way == "MEAN" else states[-1]
        assert np.abs(np.frombuffer(outputs[-1].pooled, np.float32) - wanted.numpy()).max() <= 1e-4
    core.close()
