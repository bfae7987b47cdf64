"""Engines on models with latent attention, random weights: what a token takes in the cache, tokens that do not depend
on what else runs, and what is refused."""

from __future__ import annotations

import math

import pytest
import torch
from random_models import CASES, VOCAB, reference_logits
from safetensors.torch import load_file, save_file

from harness import PagedSequences, load_on
from pagemill.config import EngineConfig
from pagemill.engine.core import EngineCore
from pagemill.engine.messages import EngineRequest
from pagemill.errors import ConfigError, UnsupportedModelError
from pagemill.executor import share
from pagemill.kvcache.kv_format import kv_format
from pagemill.kvcache.layer_groups import group_layers
from pagemill.kvcache.layout import block_major, layer_major
from pagemill.models.families import ModelConfig, find_family
from pagemill.models.loading import load_model
from pagemill.models.loading.normal_config import complete
from pagemill.sampling.params import SamplingParams

NAMES = ("deepseek-v2-lite", "deepseek-v2", "deepseek-v3")
BLOCK, TOKENS = 8, 24
PLACE = 3 * (32 + 16) * BLOCK * 4
"""Bytes of a block's keys and values: 3 layers, a latent of 32 and a shared key of 16, in float32."""
DEEPSEEK_V3 = {
    "rope_parameters": {
        "rope_type": "yarn", "rope_theta": 10000, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096, "beta_fast": 32, "beta_slow": 1,
    },
    "num_nextn_predict_layers": 1,
}  # fmt: skip


def saved(name: str, folder) -> str:
    (case,) = (case for case in CASES if case.name == name)
    case.save(folder)
    return str(folder)


@pytest.fixture
def make(monkeypatch):
    monkeypatch.setattr(share, "load_model", load_model)  # which shares one model among other tests
    made = []

    def make(path: str, **settings) -> EngineCore:
        common = {"block_size": BLOCK, "max_model_len": 96, "kv_memory": "4MiB", "dtype": "float32"}
        made.append(EngineCore(EngineConfig(model=path, check_invariants=True, **(common | settings))))
        return made[-1]

    yield make
    for core in made:
        core.close()


def prompts() -> list[list[int]]:
    """Some with a common prefix of three blocks."""
    each = [[3 + (7 * at + at * at * (3 + row)) % (VOCAB - 3) for at in range(9 + 11 * row)] for row in range(5)]
    return [each[4][: 3 * BLOCK] + prompt if row % 2 else prompt for row, prompt in enumerate(each)]


def generate(core: EngineCore, asked: list[list[int]]) -> list[list[int]]:
    params = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)
    for row, prompt in enumerate(asked):
        core.add_request(EngineRequest(request_id=str(row), prompt_token_ids=prompt, params=params, arrival_s=0.0))
    tokens: dict[str, list[int]] = {str(row): [] for row in range(len(asked))}
    while core.has_work():
        for output in core.step():
            assert output.error is None
            tokens[output.request_id] += output.new_token_ids
    return [*tokens.values()]


@pytest.mark.parametrize("name", NAMES)
def test_tokens_are_transformers_and_do_not_depend_on_what_else_runs(make, tmp_path, name):
    path, asked = saved(name, tmp_path / "model"), prompts()
    alone = make(path, enable_prefix_caching=False, max_num_seqs=1)
    expected = [generate(alone, [prompt])[0] for prompt in asked]
    for prompt, tokens in zip(asked, expected, strict=True):
        (logits,) = reference_logits(path, [prompt + tokens[:-1]])
        assert logits[len(prompt) - 1 :].argmax(-1).tolist() == tokens
    together = make(path, max_num_batched_tokens=32, max_num_seqs=4)
    assert generate(together, asked) == expected
    assert generate(together, asked) == expected
    assert together.stats().prefix_hit_tokens > 0
    tight = make(path, kv_memory=13 * together.stats().block_bytes, kv_host_memory="1MiB", target_tpot_ms="off")
    assert generate(tight, asked) == expected
    assert tight.stats().preemptions > 0


def test_a_token_takes_a_latent_and_a_shared_key_and_nothing_twice(make, tmp_path):
    stats = make(saved("deepseek-v2", tmp_path / "model")).stats()
    assert PLACE <= stats.block_bytes <= PLACE * 17 // 16
    settings = complete("deepseek_v3", DEEPSEEK_V3, tmp_path)
    spec = find_family("deepseek_v3", None).describe(ModelConfig(settings), None)
    groups = group_layers([None] * len(spec.layers))
    shape = share.frame_shape(spec, groups, 16, kv_format("bfloat16"))
    for layout in (layer_major, block_major):
        found = layout(shape, 1)
        assert found.place_bytes == 16 * (512 + 64) * 2
        assert 61 * found.place_bytes <= found.frame_bytes <= 61 * found.place_bytes + 4096  # 70 KB per token
    assert spec.scale == pytest.approx(192**-0.5 * (0.1 * math.log(40) + 1) ** 2)
    assert spec.max_position == 163840


def test_narrow_formats_hold_latents_or_say_why_not(make, tmp_path):
    path = saved("deepseek-v3", tmp_path / "model")
    assert make(path, kv_cache_dtype="fp8").stats().block_bytes < PLACE // 3
    for name in ("int8", "int4", "int8/int4", "int4_mixed"):
        with pytest.raises(ConfigError, match=f"'{name}' cannot be used: its scales fit.*; use 'fp8' or 'auto'"):
            make(path, kv_cache_dtype=name)


def test_ranks_are_refused(make, tmp_path):
    with pytest.raises(ConfigError, match=r"latent attention .deepseek_v2. run on one rank only"):
        make(saved("deepseek-v2", tmp_path / "model"), tensor_parallel_size=2)


def test_layers_that_only_draft_are_left_out(tmp_path):
    path = saved("deepseek-v3", tmp_path)
    before = PagedSequences(load_on("cpu", path, dtype="float32").decoder, prompts()).run()
    stored = load_file(tmp_path / "model.safetensors")
    more = {name.replace(".2.", ".3."): each.clone() for name, each in stored.items() if ".layers.2." in name}
    save_file(
        {**stored, **more, "model.layers.3.eh_proj.weight": torch.ones(2, 2)},
        tmp_path / "model.safetensors",
        {"format": "pt"},
    )
    after = PagedSequences(load_on("cpu", path, dtype="float32").decoder, prompts()).run()
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    with pytest.raises(UnsupportedModelError, match="does not use"):
        load_on("cpu", path, dtype="float32", hf_overrides={"num_nextn_predict_layers": 0})


@pytest.mark.parametrize(
    ("model_type", "setting", "value"),
    [
        ("deepseek_v2", "norm_topk_prob", True),
        ("deepseek_v2", "topk_method", "noaux_tc"),
        ("deepseek_v3", "scoring_func", "softmax"),
        ("deepseek_v3", "attention_bias", True),
        ("deepseek_v3", "moe_layer_freq", 2),
    ],
)
def test_what_is_computed_otherwise_is_refused(tmp_path, model_type, setting, value):
    settings = complete(model_type, {"num_experts_per_tok": 2, setting: value}, tmp_path)
    with pytest.raises(UnsupportedModelError, match=f"{setting} is {value!r}"):
        find_family(model_type, None).describe(ModelConfig(settings), None)
