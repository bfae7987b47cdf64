"""What a load yields: forms of checkpoints, dtypes, overrides, progress, fingerprint, memory."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from small_llama import edit_config, edit_weights, load, logits, save_llama

from pagemill.errors import ConfigError, ModelConfigError, UnknownArgumentError
from pagemill.models.families import ModelConfig, find_family
from pagemill.models.loading import load as loading
from pagemill.models.loading import open_checkpoint
from pagemill.models.loading.fingerprint import fingerprint


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture
def copy(folder, tmp_path):
    """A copy that a test may damage."""
    return shutil.copytree(folder, tmp_path / "copy")


def test_shards_equal_one_file(folder, tmp_path):
    sharded = save_llama(tmp_path, shard="30KB")
    assert len(list(sharded.glob("*.safetensors"))) > 3
    assert torch.equal(logits(load(sharded)), logits(load(folder)))


def test_tied_embeddings_need_no_head_and_either_may_be_stored(tmp_path):
    tied = save_llama(tmp_path, tie_word_embeddings=True)
    model = load(tied)
    embedding = _tensors(tied)["model.embed_tokens.weight"]
    assert "lm_head.weight" not in _tensors(tied)
    edit_weights(tied, lm_head__weight=embedding)
    both = load(tied)
    edit_weights(tied, model__embed_tokens__weight=None)
    for other in (both, load(tied)):
        assert other.decoder.weights.embedding is None
        assert torch.equal(logits(other), logits(model))


@pytest.mark.parametrize("at", [0, -1])
def test_a_head_that_differs_counts_although_it_is_called_tied(tmp_path, at, caplog):
    folder = save_llama(tmp_path, tie_word_embeddings=False)
    head = _tensors(folder)["model.embed_tokens.weight"].clone()
    head[at, at] += 1
    edit_weights(folder, lm_head__weight=head)
    expected = logits(load(folder))
    edit_config(folder, tie_word_embeddings=True)
    assert torch.equal(logits(load(folder)), expected)
    assert "differs from the embedding" in caplog.text


def base_model(folder, *without):
    """Renames the weights as a model without its head has them, and leaves some out."""
    tensors = {name.removeprefix("model."): weight for name, weight in _tensors(folder).items() if name not in without}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.mark.parametrize("tied", [True, False])
def test_weights_named_as_a_base_model_has_them(tmp_path, tied):
    folder = save_llama(tmp_path, tie_word_embeddings=tied)
    expected = load(folder)
    found = load(base_model(folder))
    assert found.has_head
    assert torch.equal(logits(found), logits(expected))


def test_a_base_model_without_a_head_makes_hidden_states(tmp_path):
    folder = save_llama(tmp_path, tie_word_embeddings=False)
    whole, base = load(folder), load(base_model(folder, "lm_head.weight"))
    assert (whole.has_head, base.has_head) == (True, False)
    for model in (whole, base):
        model.decoder.logits = lambda hidden: hidden
    assert torch.equal(logits(base), logits(whole))


def test_eos_ids_of_both_configurations(copy):
    (copy / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 2]}))
    assert load(copy).eos_token_ids == (7, 2)
    (copy / "generation_config.json").unlink()
    assert load(copy).eos_token_ids == (2,)


@pytest.mark.parametrize("token", ["<|im_end|>", {"content": "<|im_end|>"}], ids=type)
def test_the_tokenizers_end_is_an_end_too(copy, token):
    """As vLLM has it: those who teach a base model to chat often change the tokenizer alone."""
    (copy / "tokenizer_config.json").write_text(json.dumps({"eos_token": token}))
    assert load(copy).eos_token_ids == (2,)
    added = [{"id": 5, "content": "<|im_start|>"}, {"id": 9, "content": "<|im_end|>", "special": True}]
    (copy / "tokenizer.json").write_text(json.dumps({"version": "1.0", "added_tokens": added, "model": {}}))
    assert load(copy).eos_token_ids == (2, 9)
    (copy / "tokenizer.json").write_text("{")
    assert load(copy).eos_token_ids == (2,)


def test_a_configuration_is_completed_once(folder, copy, tmp_path, monkeypatch):
    """Later loads do without transformers, unless what is kept is damaged or the configuration is another."""
    monkeypatch.setenv("PAGEMILL_HOME", str(tmp_path / "home"))
    made = open_checkpoint(folder, {}).config
    (kept,) = (tmp_path / "home" / "configurations").iterdir()
    monkeypatch.setitem(sys.modules, "transformers.models.auto.configuration_auto", None)
    assert open_checkpoint(folder, {}).config == made
    edit_config(copy, rope_theta=5000.0)
    with pytest.raises(ImportError):
        open_checkpoint(copy, {})
    kept.write_bytes(kept.read_bytes()[:-1])
    with pytest.raises(ImportError):
        open_checkpoint(folder, {})


def test_progress_counts_every_byte_once(folder):
    calls = []
    load(folder, progress=lambda done, total: calls.append((done, total)))
    done = [d for d, _ in calls]
    assert done == sorted(set(done))
    assert {total for _, total in calls} == {done[-1]}
    assert done[-1] == sum(p.nbytes for p in _tensors(folder).values())


def _tensors(folder):
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")


def test_fingerprint(folder, copy):
    mark = load(folder).fingerprint
    assert len(mark) == 32
    assert load(copy).fingerprint == mark
    assert load(copy, dtype="bfloat16").fingerprint != mark
    assert load(copy, hf_overrides={"rope_theta": 5000.0}).fingerprint != mark
    weight = _tensors(copy)["model.embed_tokens.weight"]
    weight[3, 3] += 1
    edit_weights(copy, model__embed_tokens__weight=weight)
    assert load(copy).fingerprint != mark


def test_fingerprints_tell_models_apart_by_any_row(tmp_path):
    """As where somebody has repaired the rows of tokens that were not trained."""
    save_llama(tmp_path, num_hidden_layers=2, vocab_size=5000, max_position_embeddings=128)
    checkpoint = open_checkpoint(tmp_path, {})
    spec = find_family("llama", None).describe(ModelConfig(checkpoint.config), None)
    marks = {fingerprint(checkpoint, spec, torch.float32)}
    with (tmp_path / "model.safetensors").open("r+b") as file:
        for info in checkpoint.tensors.values():
            for place in np.linspace(0, info.nbytes - 1, 5, dtype=int).tolist():
                file.seek(info.begin + place)
                (byte,) = file.read(1)
                file.seek(info.begin + place)
                file.write(bytes([byte ^ 1]))
                file.flush()
                marks.add(fingerprint(checkpoint, spec, torch.float32))
    assert len(marks) == 5 * len(checkpoint.tensors) + 1


def test_max_model_len(folder):
    assert load(folder).max_model_len == 128
    assert load(folder, max_model_len=50).max_model_len == 50
    with pytest.raises(ConfigError, match=r"max_model_len is 129, over the 128"):
        load(folder, max_model_len=129)
    assert load(folder, max_model_len=129, hf_overrides={"max_position_embeddings": 512}).max_model_len == 129


@pytest.mark.parametrize(
    "override",
    [
        {"rope_theta": 100.0},
        {"rope_scaling": {"type": "linear", "factor": 4.0}},
        {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}},
        {"rms_norm_eps": 0.1},
    ],
    ids=lambda override: next(iter(override)),
)
def test_overrides_have_their_effect(folder, override):
    assert not torch.allclose(logits(load(folder, hf_overrides=override)), logits(load(folder)), atol=1e-3)


def test_overrides_say_the_same_in_any_spelling(folder):
    scaling = {"factor": 4.0}
    old = load(folder, hf_overrides={"rope_scaling": {"type": "linear", **scaling}, "rope_theta": 500.0}).spec
    new = {"rope_parameters": {"rope_type": "linear", "rope_theta": 500.0, **scaling}}
    assert load(folder, hf_overrides=new).spec == old


@pytest.mark.parametrize(
    "override",
    [
        {"rope_scaling": "yarn"},
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": "8192"}},
    ],
    ids=["no table", "a text for a length"],
)
def test_overrides_of_another_type_are_refused(folder, override):
    with pytest.raises(ModelConfigError, match=r"rope_scaling is 'yarn'|validate_rope"):
        load(folder, hf_overrides=override)


def test_an_unknown_override_suggests_the_nearest(folder):
    with pytest.raises(UnknownArgumentError, match="did you mean 'rope_theta'"):
        load(folder, hf_overrides={"rope_thetta": 1.0})


def test_configuration_of_an_old_transformers(copy):
    """rope_theta and rope_scaling at top level, torch_dtype, no head_dim."""
    edit_config(copy, rope_parameters="remove", head_dim="remove", rope_theta=500.0,
                rope_scaling={"type": "linear", "factor": 2.0}, torch_dtype="float32")  # fmt: skip
    spec = load(copy).spec
    assert spec.head_dim == 16
    assert spec.max_position == 256
    assert spec.ropes[0].inv_freq[1] == pytest.approx(500.0 ** (-1 / 8) / 2)


CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("features", "stored", "expected"),
    [
        ({"avx512_bf16"}, torch.bfloat16, torch.bfloat16),
        ({"amx_bf16"}, torch.bfloat16, torch.bfloat16),
        ({"avx2", "f16c"}, torch.bfloat16, torch.float32),
        ({"avx512_fp16"}, torch.float16, torch.float16),
        ({"avx512_bf16"}, torch.float16, torch.float32),
        (set(), torch.float32, torch.float32),
    ],
)
def test_auto_dtype_follows_the_machine(monkeypatch, features, stored, expected):
    monkeypatch.setattr(loading, "cpu_features", lambda: frozenset(features))
    monkeypatch.setattr(loading.platform, "machine", lambda: "x86_64")
    sizes = {torch.float32: 10, stored: 1000}
    assert loading.resolve_dtype("auto", sizes, quantized=False, on_integers=False, device=CPU) == expected
    assert loading.resolve_dtype("auto", sizes, quantized=True, on_integers=False, device=CPU) == torch.float32
    beside = torch.float32 if features.isdisjoint({"avx512_bf16", "amx_bf16"}) else torch.bfloat16
    assert loading.resolve_dtype("auto", sizes, quantized=True, on_integers=True, device=CPU) == beside
    assert loading.resolve_dtype("float16", sizes, quantized=False, on_integers=False, device=CPU) == torch.float16


def test_auto_dtype_on_arm(monkeypatch):
    monkeypatch.setattr(loading.platform, "machine", lambda: "aarch64")
    for features, stored, expected in (
        ({"asimdhp"}, torch.float16, torch.float16),
        ({"asimdhp", "asimddp"}, torch.bfloat16, torch.float32),
        ({"asimdhp", "asimddp", "i8mm", "bf16"}, torch.bfloat16, torch.bfloat16),
    ):
        monkeypatch.setattr(loading, "cpu_features", lambda found=frozenset(features): found)
        assert loading.resolve_dtype("auto", {stored: 1}, quantized=False, on_integers=False, device=CPU) == expected


def test_a_gpu_without_bfloat16_refuses_it(monkeypatch):
    gpu = torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    with pytest.raises(ConfigError, match=r"dtype is 'bfloat16'.* 8\.0; this one has 7\.5; use 'float16'"):
        loading.resolve_dtype("bfloat16", {}, quantized=False, on_integers=False, device=gpu)
    assert loading.resolve_dtype("float16", {}, quantized=False, on_integers=False, device=gpu) == torch.float16
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert loading.resolve_dtype("bfloat16", {}, quantized=False, on_integers=False, device=gpu) == torch.bfloat16


def test_unknown_dtype_is_refused(folder):
    with pytest.raises(ConfigError, match="int8"):
        load(folder, dtype="int8")


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("wanted", ["float32", "bfloat16", "float16"])
def test_weights_are_converted_exactly(tmp_path, stored, wanted):
    save_llama(tmp_path, stored)
    model = load(tmp_path, dtype=wanted)
    weight = _tensors(tmp_path)["model.embed_tokens.weight"]
    assert weight.dtype == stored
    assert model.dtype == getattr(torch, wanted)
    weights = model.decoder.weights
    embedding = weights.lm_head.rows(torch.arange(len(weight))) if weights.embedding is None else weights.embedding
    assert torch.equal(embedding, weight.to(model.dtype))


MEASURE = """
import re, sys, torch
from pathlib import Path
from pagemill.models.loading import load_model
from pagemill.executor.backend import cpu_backend
import transformers.models.auto.configuration_auto, transformers.models.llama.configuration_llama
peak = lambda: int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) * 1024
on = cpu_backend()
# The libraries' own pages come first.
load_model(sys.argv[3], ops=on.ops, attention=on.attention, decoder=on.decoder, dtype=sys.argv[2])
before = peak()
model = load_model(sys.argv[1], ops=on.ops, attention=on.attention, decoder=on.decoder, dtype=sys.argv[2])
print(peak() - before)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_peak_memory_is_near_the_weights(tmp_path):
    """Stored as float32: the mapped file must not stay in memory beside what was loaded."""
    sizes = {"vocab_size": 4096, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 2}
    save_llama(tmp_path, num_attention_heads=16, num_key_value_heads=8, **sizes)
    small = save_llama(tmp_path / "small")
    stored = (tmp_path / "model.safetensors").stat().st_size
    assert stored > 100 << 20
    for dtype, weights in (("float32", stored), ("bfloat16", stored // 2)):
        command = [sys.executable, "-c", MEASURE, tmp_path, dtype, small]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        # Beside the weights at most one joined matrix (gate and up: 24 MiB in float32) and working memory.
        assert weights * 0.8 < int(done.stdout) < weights + (40 << 20)
