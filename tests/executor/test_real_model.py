"""The real model on a device that checks: the greedy tokens of LocalExecutor, in batches, with preemptions, forks and
prefix hits, with graphs and without."""

from __future__ import annotations

import pytest
import torch
from late import Late
from static_attention import StaticAttention
from test_gpu_executor import on_cpu

from core.drive import request
from pagemill.config import EngineConfig
from pagemill.executor import graphs
from pagemill.executor.backend import torch_backend
from pagemill.executor.load import open_executor
from pagemill.sampling.params import SamplingParams
from pagemill.text.tokenizer import Tokenizer

SETTINGS = {
    "model": "smollm2-135m",
    "dtype": "float32",
    "max_model_len": 64,
    "max_num_batched_tokens": 32,
    "max_num_seqs": 8,
    "kv_memory": "9MiB",
    "target_tpot_ms": "off",
    "check_invariants": True,
}
TEXTS = [
    "The capital of France is",
    "The capital of France is Paris. The capital of Italy is Rome, and that of Spain",
    "Once upon a time, in a land far away, there lived a",
]
GREEDY = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)
FORKED = SamplingParams(temperature=0.7, seed=5, n=3, max_tokens=5, ignore_eos=True)


@pytest.mark.parametrize("enforce_eager", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_greedy_tokens_are_those_of_the_host(device, monkeypatch, enforce_eager):
    monkeypatch.setattr(graphs, "WORTH_IT", 1)
    device.nbytes = 16 << 20
    config = EngineConfig(**SETTINGS, enforce_eager=enforce_eager)
    tokenizer = Tokenizer.load(config)
    prompts = [tokenizer.encode(text * 5)[: 18 if i == 2 else 12] for i, text in enumerate(TEXTS)]
    requests = [request(f"r{i}", prompt, GREEDY) for i, prompt in enumerate(prompts)]
    requests.append(request("forked", prompts[1], FORKED))
    backend = torch_backend(torch.device("cpu"))._replace(attention=StaticAttention())
    late = Late(config, open_executor(config, backend=backend, device=device), depth=2)
    late.add(requests)
    while len(late.tokens) < len(requests):
        late.step()
    late.resize(5)  # fewer than what runs has taken
    tokens = dict(late.run())
    late.tokens.clear()
    late.add(requests[2:3])
    assert late.run()["r2", 0] == tokens["r2", 0]
    assert late.scheduler.prefix_hit_tokens > 0
    assert late.scheduler.preemptions > 0
    assert bool(device.graphs) != enforce_eager
    assert tokens == on_cpu(config, requests)
