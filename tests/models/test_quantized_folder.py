"""GPTQ and AWQ folders: the weights are those that their tools stored, and are computed on their integers."""

from __future__ import annotations

import json

import pytest
import torch
from quantized_folders import quantize_folder, words_of
from safetensors.torch import load_file
from small_llama import PROMPT, edit_config, edit_weights, load, logits, save_llama
from transformers import AutoModelForCausalLM

from harness import load_on
from pagemill import _kernels
from pagemill.errors import ConfigError, CorruptWeightsError, UnsupportedModelError
from pagemill.executor.backend import select_backend
from pagemill.models.decoder import Decoder
from pagemill.models.loading import load_model, open_checkpoint
from pagemill.models.sharding import Sharding
from pagemill.ops import cpu_ops
from parity.threaded_ranks import on_ranks

LAYER = "model.layers.1.self_attn.q_proj"
FORMS = [
    ("gptq", {}),
    ("gptq", {"form": "gptq_v2"}),
    ("gptq", {"bits": 8}),
    ("gptq", {"group_size": -1}),
    ("gptq", {"group_size": 64}),
    ("gptq", {"act_order": True}),
    ("gptq", {"group_size": 16}),
    ("awq", {}),
    ("awq", {"group_size": 64, "form": "gemm"}),
]


@pytest.fixture
def folder(tmp_path):
    return save_llama(tmp_path, hidden_size=128, intermediate_size=192, attention_bias=True)


def test_words_are_packed_as_the_tools_do():
    """By hand: of a word, the lowest four bits are column 0 (GPTQ); AWQ has row 0, then 2, 4, 6, 1, 3, 5, 7."""
    numbers = torch.arange(8).unsqueeze(0)
    assert words_of(numbers, 4).tolist() == [[0x76543210]]
    assert words_of(numbers, 4, [0, 2, 4, 6, 1, 3, 5, 7]).tolist() == [[0x75316420]]
    assert words_of(torch.tensor([[1, 2, 3, 255]]), 8).tolist() == [[0xFF030201 - 2**32]]


@pytest.mark.parametrize(("method", "how"), FORMS)
def test_every_weight_is_what_was_stored(folder, method, how):
    dense = quantize_folder(folder, method, **how)
    checkpoint = open_checkpoint(folder, {})
    assert checkpoint.quantization == method
    assert len(dense) == 14
    for name, weight in dense.items():
        found = torch.full(weight.shape, float("nan"))
        checkpoint.read_into(name, found)
        assert torch.equal(found, weight), name
        affine = not how.get("act_order") and how.get("group_size") != 16
        assert checkpoint.affine_bits(name) == (how.get("bits", 4) if affine else None)
        assert checkpoint.stored_bits(name) == (how.get("bits", 4) if affine else 8)
        if affine:
            values, scale, low = checkpoint.read_affine(name)
            assert torch.equal(scale.repeat_interleave(32, 1) * values + low.repeat_interleave(32, 1), weight)


@pytest.mark.parametrize(("method", "how"), FORMS)
def test_a_model_is_that_of_its_dense_weights(folder, tmp_path_factory, packed, method, how):
    dense = quantize_folder(folder, method, **how)
    exact = save_llama(tmp_path_factory.mktemp("dense"), hidden_size=128, intermediate_size=192, attention_bias=True)
    edit_weights(exact, **{name.replace(".", "__"): weight for name, weight in dense.items()})
    expected = logits(load(exact, dtype="float32"))
    assert torch.allclose(logits(load(folder, dtype="float32")), expected, rtol=1e-4, atol=1e-5)
    assert packed == []
    integers = logits(load(folder, dtype="float32", quantization=method))
    assert (integers - expected).norm() < 0.1 * expected.norm()
    bits = 4 if how.get("bits", 4) == 4 and not how.get("act_order") and how.get("group_size") != 16 else 8
    assert packed == [bits] * 8
    reference = AutoModelForCausalLM.from_pretrained(exact, dtype=torch.float32)
    with torch.inference_mode():
        theirs = reference(torch.tensor([PROMPT])).logits[0]
    assert torch.allclose(expected, theirs, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_the_kernels_compute_on_the_integers(folder, method):
    quantize_folder(folder, method)
    exact = logits(load(folder, dtype="float32"))
    model = load_on("cpu", folder, dtype="auto", quantization=method)
    assert model.quantization == method
    assert (logits(model).float() - exact).norm() < 0.1 * exact.norm()


@pytest.mark.parametrize(
    ("described", "said"),
    [
        ({"quant_method": "bitsandbytes"}, "by 'bitsandbytes' in None bits"),
        ({"quant_method": "gptq", "bits": 3, "group_size": 32}, "by 'gptq' in 3 bits, groups of 32, form 'gptq'"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 32, "checkpoint_format": "marlin"}, "form 'marlin'"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 0}, "groups of 0"),
        ({"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemv"}, "form 'gemv'"),
        ({"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": False}, "with zero points"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 32, "dynamic": {"x": {}}}, "dynamic {'x': {}}"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 32, "is_marlin_format": True}, "is_marlin_format True"),
        ("yes", "by None"),
    ],
)
def test_what_is_stored_otherwise_is_refused(folder, described, said):
    edit_config(folder, quantization_config=described)
    with pytest.raises(UnsupportedModelError, match=said) as refused:
        load(folder)
    assert "supported are gptq" in refused.value.message


@pytest.mark.parametrize(
    ("part", "change", "error", "said"),
    [
        ("qzeros", None, CorruptWeightsError, "has no qzeros"),
        ("scales", lambda old: old[:-1].contiguous(), CorruptWeightsError, r"has shape \[3, 128\].*must be \[4, 128\]"),
        ("scales", lambda old: old.float(), UnsupportedModelError, "is stored as F32; it must be F16 or BF16"),
        ("scales", lambda old: old * float("inf"), CorruptWeightsError, "is not finite"),
        ("qweight", lambda old: old.long(), UnsupportedModelError, "is stored as I64; it must be I32"),
        ("qweight", None, CorruptWeightsError, "has no qweight"),
        ("g_idx", lambda old: old + 1, CorruptWeightsError, "names groups 1 to 4 of 4"),
        ("weight", lambda old: torch.zeros(128, 128), CorruptWeightsError, "both in integers and as a weight"),
    ],
)
def test_damage_is_told(folder, part, change, error, said):
    quantize_folder(folder, "gptq")
    old = load_file(folder / "model.safetensors").get(f"{LAYER}.{part}")
    edit_weights(folder, **{f"{LAYER}.{part}".replace(".", "__"): change and change(old)})
    with pytest.raises(error, match=said):
        load(folder, dtype="float32")


def test_another_method_than_the_checkpoints_is_refused(folder):
    quantize_folder(folder, "awq")
    with pytest.raises(ConfigError, match=r"quantization is 'gptq', but the weights of .* are awq; use"):
        load(folder, quantization="gptq")


def test_a_shape_that_the_bytes_do_not_have_is_told(folder):
    quantize_folder(folder, "gptq")
    file = folder / "model.safetensors"
    content = file.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    begin, end = header[f"{LAYER}.qzeros"]["data_offsets"]
    after = [entry for name, entry in header.items() if name != "__metadata__" and entry["data_offsets"][0] >= end]
    for entry in after:
        entry["data_offsets"] = [at + 4 for at in entry["data_offsets"]]
    header[f"{LAYER}.qzeros"]["data_offsets"] = [begin, end + 4]
    text, data = json.dumps(header).encode(), content[8 + length :]
    file.write_bytes(len(text).to_bytes(8, "little") + text + data[:end] + bytes(4) + data[end:])
    with pytest.raises(CorruptWeightsError, match=r"qzeros in .* has shape \[4, 16\], but 260 bytes"):
        load(folder, dtype="float32")


def test_a_bias_of_zeros_is_left_out_and_another_is_refused(tmp_path):
    """Old tools gave every quantized layer a bias, which llama does not have."""
    folder = save_llama(tmp_path, hidden_size=128, intermediate_size=192)
    quantize_folder(folder, "gptq")
    expected = logits(load(folder, dtype="float32"))
    bias = f"{LAYER}.bias".replace(".", "__")
    edit_weights(folder, **{bias: torch.zeros(128).half()})
    assert torch.equal(logits(load(folder, dtype="float32")), expected)
    edit_weights(folder, **{bias: torch.full((128,), 0.5).half()})
    with pytest.raises(UnsupportedModelError, match="does not use, first"):
        load(folder, dtype="float32")


def test_a_dense_folder_that_says_it_is_quantized_is_refused(folder):
    edit_config(folder, quantization_config={"quant_method": "gptq", "bits": 4, "group_size": 32})
    with pytest.raises(CorruptWeightsError, match="quantized by 'gptq', but none is; remove quantization_config"):
        load(folder)


def test_the_form_may_be_written_otherwise_and_overridden(folder):
    dense = quantize_folder(folder, "gptq", form="gptq_v2")
    name = f"{LAYER}.weight"
    described = {"quant_method": "gptq", "bits": 4, "group_size": 32}
    edit_config(folder, quantization_config={**described, "checkpoint_format": None})
    for form, is_right in ((None, False), ("GPTQ_V2", True)):
        overrides = {"quantization_config": {**described, "checkpoint_format": form}} if form else {}
        found = torch.empty(128, 128)
        open_checkpoint(folder, overrides).read_into(name, found)
        assert torch.equal(found, dense[name]) == is_right


def test_versions_of_gptq_have_other_fingerprints(folder):
    """Their tensors may be the same bytes, and mean other weights."""
    quantize_folder(folder, "gptq")
    first = load(folder, dtype="float32").fingerprint
    described = {"quant_method": "gptq", "bits": 4, "group_size": 32, "checkpoint_format": "gptq_v2"}
    edit_config(folder, quantization_config=described)
    assert load(folder, dtype="float32").fingerprint != first


@pytest.mark.parametrize("method", ["gptq", "awq"])
@pytest.mark.parametrize("dtype", ["float32", "auto"])
def test_ranks_hold_parts_of_the_integers(folder, method, dtype, monkeypatch):
    """And have the bits of the whole model."""
    monkeypatch.setattr(cpu_ops, "INTEGER_ISAS", (_kernels.isa(),))
    quantize_folder(folder, method)
    expected = logits(load_on("cpu", folder, dtype=dtype))

    def part(exchange):
        on = select_backend("cpu", 1)
        return logits(
            load_model(
                folder, ops=on.ops, attention=on.attention, decoder=Decoder, dtype=dtype, sharding=Sharding(exchange)
            )
        )

    found, _ = on_ranks(2, part)
    assert all(torch.equal(each, expected) for each in found)
