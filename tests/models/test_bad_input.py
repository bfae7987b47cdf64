"""Every kind of bad model has its typed error, which names what is wrong, where, and the way out."""

from __future__ import annotations

import json
import random
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from small_llama import QUERY, edit_config, edit_weights, load, logits, save_llama

from pagemill.errors import (
    CorruptWeightsError,
    ModelConfigError,
    ModelLoadError,
    ModelNotFoundError,
    UnsupportedModelError,
)
from pagemill.models.families import FAMILIES


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    return save_llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture
def folder(original, tmp_path):
    """A copy to damage."""
    return shutil.copytree(original, tmp_path / "copy")


def test_wrong_path(tmp_path):
    with pytest.raises(ModelNotFoundError, match=r"no model at .*nowhere.*\.gguf"):
        load(tmp_path / "nowhere")


def test_file_of_another_kind(tmp_path):
    (tmp_path / "model.bin").write_bytes(b"x")
    with pytest.raises(ModelNotFoundError, match=r"model\.bin is neither"):
        load(tmp_path / "model.bin")


def test_folder_without_configuration(tmp_path):
    with pytest.raises(ModelNotFoundError, match=r"no config\.json"):
        load(tmp_path)


def test_folder_without_weights(folder):
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelNotFoundError, match="holds no weights"):
        load(folder)


@pytest.mark.parametrize("content", ["{", "[1]", "\ud800".encode("utf-16", "surrogatepass").decode("latin1"), "{}"])
def test_broken_configuration(folder, content):
    (folder / "config.json").write_text(content)
    with pytest.raises(ModelConfigError, match=r"config\.json"):
        load(folder)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"hidden_size": "many"}, "hidden_size"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000"),
        ({"num_key_value_heads": 3}, "not a multiple of num_key_value_heads"),
        ({"rms_norm_eps": -1.0}, "rms_norm_eps is -1.0"),
        ({"architectures": 7}, "architectures = 7; it must be a list of names"),
        ({"architectures": "LlamaForCausalLM"}, "architectures = 'LlamaForCausalLM'; it must be a list of names"),
        ({"max_position_embeddings": 10**9}, "max_position_embeddings is 1000000000 .*to 16777216"),
        ({"eos_token_id": 10**30}, "eos_token_id is 10{30}; it must be"),
        ({"eos_token_id": [2, -5]}, "eos_token_id is -5; it must be"),
        ({"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 1e300}}, "more than 16777216"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": -1.0}}, "not a positive number"),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4, "factor": 2.0, "low_freq_factor": 0,
                              "high_freq_factor": 0, "original_max_position_embeddings": 8}}, "division by zero"),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4, "factor": 2.0}}, "low_freq_factor"),
        ({"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": "two"}}, "factor|two"),
        ({"rope_parameters": {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0],
                              "original_max_position_embeddings": 8}}, "1 factors for 8 frequencies"),
    ],
)  # fmt: skip
def test_contradictory_configuration(folder, changes, named):
    edit_config(folder, **changes)
    with pytest.raises(ModelConfigError, match=named):
        load(folder)


def test_unsupported_family_lists_what_is_supported(folder):
    edit_config(folder, model_type="mamba", architectures=["MambaForCausalLM"])
    with pytest.raises(UnsupportedModelError, match="mamba") as caught:
        load(folder)
    assert all(family in str(caught.value) for family in FAMILIES)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification"),
        ({"rope_parameters": {"rope_type": {"a": 1}, "rope_theta": 1e4}}, r"RoPE type \{'a': 1\}"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, "dynamic"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 2]}}, "mrope_section"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "partial"),
        ({"hidden_act": "relu"}, "relu"),
        ({"quantization_config": {"quant_method": "gptq"}}, "gptq"),
        ({"sliding_window": 16}, "sliding_window is 16"),
        ({"is_causal": False}, "is_causal is False"),
        ({"layer_types": ["full_attention", "chunked_attention"]}, "layer_types"),
    ],
)
def test_unsupported_features_are_refused(folder, changes, named):
    edit_config(folder, **changes)
    with pytest.raises(UnsupportedModelError, match=named):
        load(folder)


def test_tensors_that_would_be_ignored_are_refused(folder):
    """An attention sink, say, that the configuration does not mention."""
    edit_weights(folder, model__layers__0__self_attn__sinks=torch.zeros(4))
    with pytest.raises(UnsupportedModelError, match=r"1 tensors .*first 'model\.layers\.0\.self_attn\.sinks'"):
        load(folder)


@pytest.mark.parametrize("keep", [0, 5, 100, 3000, -1])
def test_truncated_weights(folder, keep):
    path = folder / "model.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[:keep])
    with pytest.raises(CorruptWeightsError, match=r"model\.safetensors is (truncated|empty).*download"):
        load(folder)


def test_weights_with_something_after_them(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes() + b"\0")
    with pytest.raises(CorruptWeightsError, match="its header describes"):
        load(folder)


def test_two_tensors_in_one_place(folder):
    path = folder / "model.safetensors"
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    header[QUERY]["data_offsets"] = header[QUERY.replace("q_proj", "o_proj")]["data_offsets"]
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length :])
    with pytest.raises(CorruptWeightsError, match=r"begins at byte \d+ of the data instead of"):
        load(folder)


def test_a_bit_flipped_in_the_header_is_found_or_harmless(folder):
    path = folder / "model.safetensors"
    content = path.read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    expected, pick, refused = logits(load(folder)), random.Random(0), 0
    for _ in range(250):
        bit = pick.randrange(end * 8)
        damaged = bytearray(content)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        try:
            assert torch.equal(logits(load(folder)), expected)
        except ModelLoadError:
            refused += 1
    assert refused > 200


def test_wrong_shape(folder):
    edit_weights(folder, **{QUERY.replace(".", "__"): torch.zeros(64, 63)})
    with pytest.raises(CorruptWeightsError, match=r"q_proj.* has shape \[64, 63\].*asks for \[64, 64\]"):
        load(folder)


def test_configuration_of_another_size_takes_no_memory(folder):
    edit_config(folder, vocab_size=2**24, hidden_size=2**20, head_dim=16)
    with pytest.raises(CorruptWeightsError, match=r"embed_tokens.*asks for \[16777216, 1048576\]"):
        load(folder)


def test_missing_tensor(folder):
    edit_weights(folder, **{QUERY.replace(".", "__"): None})
    with pytest.raises(CorruptWeightsError, match=f"no tensor {QUERY!r}"):
        load(folder)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float64, torch.float8_e4m3fn])
def test_unexpected_dtype(folder, dtype):
    edit_weights(folder, **{QUERY.replace(".", "__"): torch.zeros(64, 64).to(dtype)})
    with pytest.raises(UnsupportedModelError, match=r"q_proj.*is stored as .*supported are F32, F16, BF16"):
        load(folder)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("name", [QUERY, "model.norm.weight", "lm_head.weight"])
def test_weights_that_are_not_finite(folder, name, value):
    weight = load_file(folder / "model.safetensors")[name]
    weight.view(-1)[7] = value
    edit_weights(folder, **{name.replace(".", "__"): weight})
    with pytest.raises(CorruptWeightsError, match=f"{name}.*not finite"):
        load(folder)


def test_weights_over_the_range_of_float16(folder):
    weight = load_file(folder / "model.safetensors")[QUERY]
    weight[0, 0] = 1e6
    edit_weights(folder, **{QUERY.replace(".", "__"): weight})
    assert load(folder, dtype="float32").dtype == torch.float32
    with pytest.raises(CorruptWeightsError, match=r"not finite in float16.*dtype='float32'"):
        load(folder, dtype="float16")


def shard(folder, into):
    tensors = load_file(folder / "model.safetensors")
    names = sorted(tensors)
    files = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, part in files.items():
        save_file({name: tensors[name] for name in part}, into / file)
    shutil.copy(folder / "config.json", into)
    return {name: file for file, part in files.items() for name in part}


def test_index_with_a_missing_shard_or_tensor(folder, tmp_path):
    weight_map = shard(folder, tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    assert torch.equal(logits(load(tmp_path)), logits(load(folder)))

    index.write_text(json.dumps({"weight_map": {**weight_map, "extra": "a.safetensors"}}))
    with pytest.raises(CorruptWeightsError, match=r"no file holds, first 'extra' in a\.safetensors"):
        load(tmp_path)
    index.write_text(json.dumps({"weight_map": list(weight_map)}))
    with pytest.raises(CorruptWeightsError, match="no weight_map"):
        load(tmp_path)
    index.write_text("{")
    with pytest.raises(ModelLoadError, match=r"index\.json cannot be read"):
        load(tmp_path)
    index.write_text(json.dumps({"weight_map": weight_map}))
    (tmp_path / "b.safetensors").unlink()
    with pytest.raises(CorruptWeightsError, match=r"1 files that are not there, first b\.safetensors"):
        load(tmp_path)


def test_a_tensor_in_two_shards(folder, tmp_path):
    weight_map = shard(folder, tmp_path)
    shutil.copy(tmp_path / "a.safetensors", tmp_path / "c.safetensors")
    weight_map[next(iter(weight_map))] = "c.safetensors"
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(CorruptWeightsError, match=r"is in c\.safetensors and in a\.safetensors"):
        load(tmp_path)
