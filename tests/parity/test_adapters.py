"""LoRA adapters on small random models: held to merged weights and to themselves alone, and what is refused."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from random_models import CASES
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from harness import PagedSequences, load_on
from lora_adapters import merged, save_adapter, shapes_of
from pagemill.errors import AdapterError, CorruptWeightsError
from pagemill.executor.backend import select_backend, torch_backend
from pagemill.models.decoder import Decoder
from pagemill.models.loading import load_model
from pagemill.models.loading.adapter import AdapterLoader

BY_NAME = {case.name: case for case in CASES}
PLENTY = 1 << 40


def loader_of(model, ops, max_rank=64):
    return AdapterLoader(model.spec, model.names, ops, model.dtype, torch.device("cpu"), max_rank)


def load_torch(folder):
    on = torch_backend(torch.device("cpu"))
    return load_model(folder, dtype="float32", ops=on.ops, attention=on.attention, decoder=on.decoder), on.ops


def load_cpu(folder, dtype="float32"):
    return load_on("cpu", folder, dtype=dtype), select_backend("cpu").ops


def hidden_states(decoder, prompts, chosen, forward=None):
    """The hidden states of all prompts in one step, where prompt i has the adapter `chosen[i]`; None is the model."""
    sequences = PagedSequences(decoder, prompts)
    token_ids, batch = sequences.batch([(row, len(prompt)) for row, prompt in enumerate(prompts)])
    row_of = torch.repeat_interleave(torch.tensor([len(prompt) for prompt in prompts]))
    adapters = [
        (adapter, torch.nonzero(torch.isin(row_of, torch.tensor([i for i, c in enumerate(chosen) if c is adapter]))))
        for adapter in dict.fromkeys(each for each in chosen if each is not None)
    ]
    tokens = [(adapter, index.flatten()) for adapter, index in adapters]
    found = (forward or type(decoder).forward)(decoder, token_ids, batch, sequences.pool, None, tokens)
    return list(torch.split(found, [len(prompt) for prompt in prompts]))


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Models by name, each with the shapes of what adapters may add to."""
    made = {}
    for name in ("llama-bias", "qwen2", "qwen3"):
        BY_NAME[name].save(folder := tmp_path_factory.mktemp(name))
        made[name] = folder, shapes_of(AutoConfig.from_pretrained(folder))
    return made


@pytest.mark.parametrize("name", ["llama-bias", "qwen2", "qwen3"])
@pytest.mark.parametrize(("load", "rslora"), [(load_torch, False), (load_cpu, True)])
def test_answers_are_those_of_merged_weights(folders, name, load, rslora, tmp_path):
    folder, shapes = folders[name]
    path = save_adapter(tmp_path / "adapter", shapes, rank=6, alpha=12, use_rslora=rslora)
    together = tmp_path / "merged"
    shutil.copytree(folder, together)
    adapter = load_file(path / "adapter_model.safetensors")
    weights = merged(load_file(folder / "model.safetensors"), adapter, 12 / (6**0.5 if rslora else 6))
    save_file(weights, together / "model.safetensors", {"format": "pt"})
    prompts = BY_NAME[name].prompts()
    (model, ops), (expected, _) = load(folder), load(together)
    loaded = loader_of(model, ops).load(path, PLENTY)
    states = hidden_states(model.decoder, prompts, [loaded] * len(prompts))
    for ours, theirs, base in zip(
        states,
        hidden_states(expected.decoder, prompts, [None] * len(prompts)),
        hidden_states(model.decoder, prompts, [None] * len(prompts)),
        strict=True,
    ):
        scale = theirs.abs().max()
        assert (ours - theirs).abs().max() < 2e-4 * scale
        assert (ours - base).abs().max() > 0.1 * scale


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_row_has_the_same_bits_in_any_company(folders, dtype, tmp_path):
    folder, shapes = folders["qwen2"]
    model, ops = load_cpu(folder, dtype)
    some = {name: shape for name, shape in shapes.items() if "q_proj" in name or "down" in name}
    kinds = [
        (shapes, 8, torch.float32),
        (shapes, 16, torch.bfloat16),
        (some, 3, torch.float32),
        (shapes, 20, torch.float16),
    ]
    adapters = [
        loader_of(model, ops).load(save_adapter(tmp_path / str(seed), of, rank=r, seed=seed, dtype=held), PLENTY)
        for seed, (of, r, held) in enumerate(kinds)
    ]
    assert len({adapter.digest for adapter in adapters}) == 4
    prompts = [*BY_NAME["qwen2"].prompts(), [5], [9, 11, 4]]
    chosen = [adapters[0], adapters[1], None, adapters[2], adapters[3], adapters[0]]
    mixed = hidden_states(model.decoder, prompts, chosen)
    by_operators = hidden_states(model.decoder, prompts, chosen, Decoder.forward)
    for prompt, adapter, found, other in zip(prompts, chosen, mixed, by_operators, strict=True):
        assert torch.equal(found, hidden_states(model.decoder, [prompt], [adapter])[0])
        assert torch.equal(found, other)
        assert found.isfinite().all()


def test_attention_of_a_mixture_of_experts_is_adapted(tmp_path):
    BY_NAME["qwen3-moe"].save(tmp_path / "model")
    shapes = {k: v for k, v in shapes_of(AutoConfig.from_pretrained(tmp_path / "model")).items() if "self_attn" in k}
    model, ops = load_cpu(tmp_path / "model")
    adapter = loader_of(model, ops).load(save_adapter(tmp_path / "adapter", shapes), PLENTY)
    (plain,), (adapted,) = (hidden_states(model.decoder, [[5, 6, 7]], [each]) for each in (None, adapter))
    assert not torch.equal(plain, adapted)
    path = save_adapter(tmp_path / "experts", {"model.layers.0.mlp.experts.0.up_proj": (96, 64)})
    with pytest.raises(AdapterError, match=r"mlp\.experts\.0\.up_proj.*may only add to"):
        loader_of(model, ops).load(path, PLENTY)


def test_how_training_began_matters_not(folders, tmp_path):
    folder, shapes = folders["llama-bias"]
    model, ops = load_torch(folder)
    path = save_adapter(tmp_path, shapes, init_lora_weights="eva", eva_config={"rho": 2.0})
    assert loader_of(model, ops).load(path, PLENTY).nbytes


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"peft_type": "LOHA"}, "'LOHA'; only LORA"),
        ({"use_dora": True}, "DoRA"),
        ({"bias": "all"}, "biases"),
        ({"lora_bias": True}, "biases"),
        ({"modules_to_save": ["lm_head"]}, "merge it"),
        ({"trainable_token_indices": [1]}, "merge it"),
        ({"rank_pattern": {"q_proj": 4}}, "rank_pattern"),
        ({"init_lora_weights": "pissa"}, "'pissa', which changes the base"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out = True"),
        ({"something_new": 1}, "something_new = 1"),
        ({"r": 8.5}, "r = 8.5"),
        ({"r": 65}, r"rank 65, over max_lora_rank \(64\)"),
        ({"r": 4}, "but rank 4 and this model"),
        ({"lora_alpha": None}, "lora_alpha = None"),
        ({"lora_alpha": float("inf")}, "lora_alpha = inf"),
    ],
)
def test_what_is_not_served_is_refused_in_words(folders, changes, words, tmp_path):
    folder, shapes = folders["llama-bias"]
    model, ops = load_torch(folder)
    path = save_adapter(tmp_path, dict(list(shapes.items())[:2]), **changes)
    with pytest.raises(AdapterError, match=words):
        loader_of(model, ops).load(path, PLENTY)


def test_damaged_and_foreign_adapters_are_refused(folders, tmp_path):
    folder, shapes = folders["llama-bias"]
    model, ops = load_torch(folder)

    def refused(words, path, error=AdapterError, free=PLENTY):
        with pytest.raises(error, match=words):
            loader_of(model, ops).load(path, free)

    def saved(name, of, **changes):
        return save_adapter(tmp_path / name, of, **changes)

    query = "model.layers.0.self_attn.q_proj"
    whole = saved("whole", {query: shapes[query]})
    refused("adapter_config.json in .*/nowhere", tmp_path / "nowhere")
    refused("1 MiB to be loaded|0 MiB are free", whole, free=100)
    refused("it was made for some/model", saved("wide", {query: (shapes[query][0], 65)}))
    refused("which has 4 layers", saved("deep", {"model.layers.4.self_attn.q_proj": shapes[query]}))
    refused("may only add to down_proj, gate_proj", saved("head", {"lm_head": (160, 64)}))
    refused("embed_tokens", saved("embedding", {"model.embed_tokens": (160, 64)}))
    tensors = load_file(whole / "adapter_model.safetensors")
    for name, words, change in [
        ("half", "only .*lora_A", {f"base_model.model.{query}.lora_B.weight": None}),
        ("nan", "finite matrix", {f"base_model.model.{query}.lora_A.weight": torch.full((8, 64), torch.nan)}),
        ("dora", "magnitude", {f"base_model.model.{query}.lora_magnitude_vector": torch.ones(64)}),
    ]:
        path = saved(name, {query: shapes[query]})
        kept = {key: value for key, value in (tensors | change).items() if value is not None}
        save_file(kept, path / "adapter_model.safetensors")
        refused(words, path)
    short = (whole / "adapter_model.safetensors").read_bytes()[:-5]
    (whole / "adapter_model.safetensors").write_bytes(short)
    refused("truncated", whole, CorruptWeightsError)
    (whole / "adapter_model.safetensors").unlink()
    refused("no adapter_model.safetensors", whole)
    for text in ("[]", "{", "x" * (1 << 21), json.dumps({}), "[" * 100_000):
        (whole / "adapter_config.json").write_text(text)
        refused("cannot be read|peft_type", whole)
