"""fp8 folders: the weights are those that their tools stored, and load on the CPU in the model's dtype."""

from __future__ import annotations

import pytest
import torch
from float8_folders import STRATEGIES, described, quantize_folder
from safetensors.torch import load_file, save_file
from small_llama import edit_config, edit_weights, load, logits, save_llama
from transformers import AutoModelForCausalLM, DeepseekV3Config

from harness import load_on
from pagemill.errors import ConfigError, CorruptWeightsError, UnsupportedModelError
from pagemill.models.loading import open_checkpoint

LAYER = "model.layers.1.self_attn.q_proj"
FORMS = [(method, strategy) for method in ("fp8", "compressed-tensors") for strategy in STRATEGIES]


@pytest.fixture
def folder(tmp_path):
    return save_llama(tmp_path, hidden_size=128, intermediate_size=160, attention_bias=True)


@pytest.mark.parametrize(("method", "strategy"), FORMS)
def test_every_weight_is_what_was_stored(folder, method, strategy):
    dense = quantize_folder(folder, method, strategy)
    checkpoint = open_checkpoint(folder, {})
    assert checkpoint.quantization == "fp8"
    assert len(dense) == 14
    for name, weight in dense.items():
        found = torch.full(weight.shape, float("nan"))
        checkpoint.read_into(name, found)
        assert torch.equal(found, weight), name
        assert torch.equal(checkpoint.read_float8(name).dense(), weight), name


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_cpu_computes_the_model_of_the_dense_weights(folder, dtype):
    dense = quantize_folder(folder, "fp8", "block")
    found = load_on("cpu", folder, dtype=dtype)
    assert found.quantization is None
    ours = logits(found)
    stored = load_file(folder / "model.safetensors")
    kept = {name: each for name, each in stored.items() if "_scale" not in name}
    save_file(kept | dense, folder / "model.safetensors", {"format": "pt"})
    edit_config(folder, quantization_config="remove")
    assert torch.equal(ours, logits(load_on("cpu", folder, dtype=dtype)))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_projections_of_latents_are_cut_by_heads_once_they_are_widened(tmp_path, dtype):
    """Blocks of scales go across heads, and across what is joined: 64 + 16 rows, with blocks of 32."""
    torch.manual_seed(0)
    config = DeepseekV3Config(
        vocab_size=64, hidden_size=128, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, q_lora_rank=80, kv_lora_rank=64, qk_rope_head_dim=16, qk_nope_head_dim=24, v_head_dim=20,
        n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, n_group=1, topk_group=1,
        first_k_dense_replace=1, max_position_embeddings=128, initializer_range=0.2, num_nextn_predict_layers=0,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    dense = quantize_folder(tmp_path, "fp8", "block")
    assert "model.layers.0.self_attn.kv_b_proj.weight" in dense
    ours = logits(load_on("cpu", tmp_path, dtype=dtype))
    stored = load_file(tmp_path / "model.safetensors")
    kept = {name: each for name, each in stored.items() if not name.endswith(("_scale_inv", "input_scale"))}
    save_file(kept | dense, tmp_path / "model.safetensors", {"format": "pt"})
    edit_config(tmp_path, quantization_config="remove")
    assert torch.equal(ours, logits(load_on("cpu", tmp_path, dtype=dtype)))


def test_the_dtype_is_that_of_the_other_weights(folder):
    quantize_folder(folder, "fp8", "tensor")
    assert load(folder).dtype == torch.float32


def test_int8_takes_them_too(folder):
    quantize_folder(folder, "compressed-tensors", "channel")
    exact = logits(load(folder))
    assert (logits(load(folder, quantization="int8")) - exact).norm() < 0.1 * exact.norm()


def test_they_stay_in_fp8_on_gpus_only(folder):
    quantize_folder(folder, "fp8", "tensor")
    with pytest.raises(ConfigError, match="on NVIDIA GPUs only; leave it out"):
        load(folder, quantization="fp8")


def group(**changes):
    """Settings of compressed-tensors with changes to those of the weights."""
    config = described("compressed-tensors", "channel")
    config["config_groups"]["group_0"]["weights"] |= changes
    return config


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (described("fp8", "tensor") | {"fmt": "e5m2"}, "'fp8' with fmt 'e5m2'"),
        (described("fp8", "tensor") | {"weight_block_size": [128, 48]}, r"block \[128, 48\]"),
        (described("fp8", "tensor") | {"weight_block_size": 128}, "block 128"),
        (group(type="int"), "'compressed-tensors' with type 'int'"),
        (group(num_bits=4), "num_bits 4"),
        (group(symmetric=False), "symmetric False"),
        (group(strategy="group"), "strategy 'group'"),
        (group() | {"format": "pack-quantized"}, "format 'pack-quantized'"),
        (group() | {"kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme"),
        ({"quant_method": "compressed-tensors"}, "config_groups None"),
        ({"quant_method": "fbgemm_fp8"}, "by 'fbgemm_fp8'"),
    ],
)
def test_what_is_stored_otherwise_is_refused_by_name(folder, settings, said):
    edit_config(folder, quantization_config=settings)
    with pytest.raises(UnsupportedModelError, match=said):
        load(folder)


@pytest.mark.parametrize(
    ("part", "change", "said"),
    [
        ("weight_scale", None, r"is in fp8 with 0 of"),
        ("weight_scale", lambda old: old[:-1].contiguous(), r"F32 of shape \[127, 1\]"),
        ("weight_scale", lambda old: old.double(), r"is F64 of shape"),
        ("weight_scale", lambda old: old * float("nan"), "scale of .* is not finite"),
        ("weight_scale_inv", lambda _: torch.ones(128, 1), "is in fp8 with 2 of"),
        ("weight", lambda old: torch.full_like(old.float(), float("nan")).to(old.dtype), "weight' in .* is not finite"),
    ],
)
def test_damage_is_told(folder, part, change, said):
    quantize_folder(folder, "compressed-tensors", "channel")
    old = load_file(folder / "model.safetensors").get(f"{LAYER}.{part}")
    edit_weights(folder, **{f"{LAYER}.{part}".replace(".", "__"): change and change(old)})
    with pytest.raises(CorruptWeightsError, match=said):
        load(folder)


def test_a_folder_without_fp8_is_told(folder):
    edit_config(folder, quantization_config=described("fp8", "tensor"))
    with pytest.raises(CorruptWeightsError, match="are in fp8, but none is"):
        load(folder)


def test_e5m2_is_refused_by_name(folder):
    quantize_folder(folder, "fp8", "tensor")
    values = load_file(folder / "model.safetensors")[f"{LAYER}.weight"]
    name = f"{LAYER}.weight".replace(".", "__")
    edit_weights(folder, **{name: values.float().to(torch.float8_e5m2)})
    with pytest.raises(UnsupportedModelError, match="F8_E5M2"):
        load(folder)
