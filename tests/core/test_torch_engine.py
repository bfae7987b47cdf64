"""The engine on plain torch operators and attention: the way of every device that has no kernels of its own."""

from __future__ import annotations

import pytest
from drive import drive, request

from pagemill.attention.torch_backend import TorchAttention
from pagemill.config import EngineConfig
from pagemill.engine import build
from pagemill.engine.core import EngineCore
from pagemill.kvcache import device_pool
from pagemill.kvcache.layout import block_major
from pagemill.ops.torch_ops import TorchOps
from pagemill.sampling.params import SamplingParams


@pytest.fixture
def torch_engine(monkeypatch):
    """make_engine, but with what a device without kernels gets: torch, and the block-major pool."""
    monkeypatch.setattr(build, "select_ops", lambda device, num_threads: TorchOps())
    monkeypatch.setattr(build, "select_attention", lambda device: TorchAttention())
    monkeypatch.setattr(device_pool, "layer_major", block_major)

    def make(**settings):
        return EngineCore(EngineConfig(model="smollm2-135m", check_invariants=True, **settings))

    return make


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8"])
def test_torch_engine_gives_the_tokens_of_the_kernels(torch_engine, make_engine, prompts, kv_cache_dtype):
    params = [
        SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True),
        SamplingParams(temperature=1.0, top_k=20, n=3, seed=3, max_tokens=8, ignore_eos=True),
    ]
    requests = [request(f"r{i}", prompts[i], params[i % 2]) for i in range(6)]
    settings = {"dtype": "float32", "max_model_len": 256, "max_num_batched_tokens": 32, "max_num_seqs": 16}
    settings["kv_cache_dtype"] = kv_cache_dtype
    core = torch_engine(kv_memory="20MiB", **settings)
    assert "torch" in core.ready.description
    run = drive(core, requests)
    assert drive(make_engine(**settings), requests).tokens == run.tokens
    again = drive(core, requests)
    assert again.tokens == run.tokens
    assert sum(again.cached.values()) > 0
