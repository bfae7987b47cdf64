"""Engines whose weights lie in mapped files: the same tokens, in one process and in several, and room left for them."""

from __future__ import annotations

import pytest
import torch
from drive import drive, request
from transformers import AutoModelForCausalLM, LlamaConfig

from pagemill.config import EngineConfig
from pagemill.engine.core import EngineCore
from pagemill.errors import ConfigError
from pagemill.executor import worker
from pagemill.sampling.params import SamplingParams

SMALL = {"dtype": "bfloat16", "max_model_len": 64, "max_num_seqs": 2, "num_threads": 1, "kv_memory": "1MiB"}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=96, hidden_size=64, intermediate_size=130, num_hidden_layers=2,
                         num_attention_heads=4, num_key_value_heads=2, initializer_range=0.3)  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return str(folder)


def answer(core):
    prompts = [[*range(3, 30)], [*range(40, 50)]]
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=2)
    run = drive(core, [request(f"r{i}", prompt, params) for i, prompt in enumerate(prompts)])
    return run.tokens, run.logprobs


@pytest.mark.parametrize(
    ("how", "files"),
    [
        ({}, 1),
        ({"quantization": "int8"}, 1),
        ({"tensor_parallel_size": 2}, 2),
        ({"speculative_config": {"method": "draft_model"}}, 1),  # whose weights are the model's
    ],
    ids=["one", "int8", "ranks", "draft"],
)
def test_engines_answer_alike(model, how, files, tmp_path):
    if "speculative_config" in how:
        how = {"speculative_config": how["speculative_config"] | {"model": model}}
    expected = answer(EngineCore(EngineConfig(model, **SMALL, **{k: v for k, v in how.items() if k == "quantization"})))
    for _ in range(2):
        core = EngineCore(
            EngineConfig(model, weights_disk_memory="64MiB", weights_disk_path=tmp_path / "w", **SMALL, **how)
        )
        assert answer(core) == expected
        core.executor.close()
        assert [file.suffix for file in (tmp_path / "w").iterdir()] == [".weights"] * files


def test_mapped_weights_are_not_free_memory(model, tmp_path, monkeypatch):
    monkeypatch.setattr(worker, "host_memory", lambda: (1 << 30, 2 << 30))
    settings = SMALL | {"weights_disk_memory": 64 << 20, "weights_disk_path": tmp_path}
    core = EngineCore(EngineConfig(model, **settings))
    (file,) = tmp_path.iterdir()
    assert core.executor.memory() == ((1 << 30) - file.stat().st_size, 2 << 30)
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"weights_disk_path is '.*', where no folder can be made") as caught:
        EngineCore(EngineConfig(model, **(settings | {"weights_disk_path": tmp_path / "file"})))
    assert caught.value.param == "weights_disk_path"
