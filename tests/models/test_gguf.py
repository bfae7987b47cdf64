"""GGUF files give the same model as the Hugging Face folder that they came from, and damaged ones are named."""

from __future__ import annotations

import json
import math
import random
import struct

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from gguf_files import write_gguf
from safetensors.torch import load_file, save_file
from small_llama import load, logits, save_llama
from transformers import AutoConfig, AutoModelForCausalLM

from harness import load_on
from pagemill.errors import (
    CorruptWeightsError,
    ModelConfigError,
    ModelLoadError,
    ModelNotFoundError,
    UnknownArgumentError,
    UnsupportedModelError,
)

SIZES = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4,
         "num_key_value_heads": 2, "max_position_embeddings": 128, "num_hidden_layers": 2,
         "initializer_range": 0.2, "pad_token_id": 0}  # fmt: skip
LONG = {"short_factor": [1.0 + i / 8 for i in range(8)], "long_factor": [1.0 + i for i in range(8)]}


def llama3_factors(theta: float, dim: int, factor: float, low: float, high: float, trained: int) -> list[float]:
    """What llama.cpp's conversion stores in rope_freqs: the divisor of each frequency."""
    factors = []
    for wave in (2 * math.pi * theta ** (i / dim) for i in range(0, dim, 2)):
        if wave < trained / high:
            factors.append(1.0)
        elif wave > trained / low:
            factors.append(factor)
        else:
            smooth = (trained / wave - low) / (high - low)
            factors.append(1 / ((1 - smooth) / factor + smooth))
    return factors


def array(values: list[float]) -> np.ndarray:
    return np.array(values, dtype=np.float32)


ARCHITECTURES = {
    "llama": ("llama", {}, {}, {}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}, {}, {}),
    "llama-linear": ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}},
                     {"rope.scaling.type": "linear", "rope.scaling.factor": 2.0}, {}),
    "llama-factor": ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}},
                     {"rope.scaling.factor": 2.0}, {}),
    "llama-yarn": ("llama", {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4,
                                                 "original_max_position_embeddings": 32}},
                   {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0,
                    "rope.scaling.original_context_length": 32}, {}),
    "llama3": ("llama", {"rope_parameters": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
                                             "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
                                             "rope_theta": 1e4}},
               {}, {"rope_freqs.weight": array(llama3_factors(1e4, 16, 8.0, 1.0, 4.0, 64))}),
    "mistral": ("mistral", {"sliding_window": None}, {}, {}),
    "mixtral": ("mixtral", {"num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": None},
                {"expert_count": 5, "expert_used_count": 2, "expert_gating_func": 1, "rope.freq_base": 1e6}, {}),
    "qwen3moe": ("qwen3_moe", {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 32,
                               "head_dim": 32, "norm_topk_prob": True},
                 {"expert_count": 6, "expert_used_count": 3, "expert_feed_forward_length": 32,
                  "attention.key_length": 32, "attention.value_length": 32, "expert_weights_norm": True}, {}),
    "smollm3": ("smollm3", {"num_hidden_layers": 5, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
                {"rope.dimension_count": 16}, {}),
    "qwen2": ("qwen2", {}, {}, {}),
    "qwen3": ("qwen3", {"head_dim": 32},
              {"attention.key_length": 32, "attention.value_length": 32, "pooling_type": 3}, {}),
    "gemma2": ("gemma2", {"head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 4,
                          "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
               {"attention.key_length": 32, "attention.value_length": 32, "attention.sliding_window": 4,
                "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}, {}),
    "gemma3": ("gemma3_text", {"head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 4,
                               "num_hidden_layers": 7, "rope_parameters": {
                                   "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                                   "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}},
               {"attention.key_length": 32, "attention.value_length": 32, "attention.sliding_window": 4,
                "rope.freq_base": 1e6, "rope.scaling.type": "linear", "rope.scaling.factor": 8.0}, {}),
    "phi3": ("phi3", {"sliding_window": 4}, {"attention.sliding_window": 4, "rope.dimension_count": 16}, {}),
    "phi3-long": ("phi3", {"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4, **LONG},
                           "original_max_position_embeddings": 32},
                  {"rope.scaling.original_context_length": 32,
                   "rope.scaling.attn_factor": math.sqrt(1 + math.log(4) / math.log(32))},
                  {"rope_factors_long.weight": array(LONG["long_factor"]),
                   "rope_factors_short.weight": array(LONG["short_factor"])}),
}  # fmt: skip


OF_LLAMA = {"llama3", "mistral", "mixtral"}
"""Families whose files are of the architecture llama."""


def save(folder, name: str) -> str:
    """Saves the model of this name. Returns its architecture in GGUF."""
    model_type, settings, _, _ = ARCHITECTURES[name]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **{**SIZES, **settings}))
    with torch.no_grad():
        for key, weight in model.named_parameters():
            if weight.dim() == 1:
                weight.add_(torch.randn_like(weight) * 0.3)
            if "q_proj" in key or "k_proj" in key:
                weight.mul_(3)
    model.save_pretrained(folder)
    return "llama" if name in OF_LLAMA else name.split("-")[0]


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_same_model_as_the_folder(name, tmp_path):
    _, _, metadata, extra = ARCHITECTURES[name]
    architecture = save(tmp_path, name)
    file = write_gguf(tmp_path, tmp_path / "model.gguf", architecture, metadata, extra=extra)
    theirs, ours = load(tmp_path, dtype="float32"), load(file)
    assert ours.eos_token_ids == (2, 7)
    assert ours.max_model_len == theirs.max_model_len
    for ours_rope, theirs_rope in zip(ours.spec.ropes, theirs.spec.ropes, strict=True):
        assert ours_rope.inv_freq == pytest.approx(theirs_rope.inv_freq, rel=1e-6)
    assert torch.allclose(logits(ours), logits(theirs), atol=1e-5, rtol=0)
    assert logits(theirs).std() > 0.5


@pytest.mark.parametrize("name", ["mixtral", "qwen3moe"])
@pytest.mark.parametrize("kind", [Kind.Q8_0, Kind.Q4_1, Kind.Q5_0], ids=lambda kind: kind.name)
def test_quantized_experts(name, kind, tmp_path):
    """Merged, single and written out in float32 they are the same, and nearly the same on the CPU kernels.

    Q8_0 and Q4_1 keep the file's integers.
    """

    def quantized(tensor: str, weight: np.ndarray):
        if "ffn_gate_inp" in tensor:  # as llama.cpp does: the router stays as it is
            return weight, Kind.F32
        return gguf.quants.quantize(weight, kind), kind

    def written_out(tensor: str, weight: np.ndarray):
        stored, form = quantized(tensor, weight)
        return gguf.quants.dequantize(stored, form), Kind.F32

    architecture = save(tmp_path, name)

    def logits_of(store, **options: bool):
        return logits(load(write_gguf(tmp_path, tmp_path / "m.gguf", architecture, metadata, store, **options)))

    metadata = ARCHITECTURES[name][2]
    merged = logits_of(quantized)
    assert torch.equal(merged, logits_of(quantized, single_experts=True))
    on_kernels = load_on("cpu", tmp_path / "m.gguf", dtype="float32")
    assert torch.allclose(merged, logits(on_kernels), atol=1e-3, rtol=0)
    assert torch.equal(merged, logits_of(written_out))


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """One layer whose rows are whole blocks of every format."""
    sizes = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 1}
    return save_llama(tmp_path_factory.mktemp("wide"), **sizes)


SCALES = {Kind.Q4_K: (0, 2), Kind.Q5_K: (0, 2), Kind.Q6_K: (208,)}
"""Where the fp16 scales of a block lie, for formats that the gguf package can read but not write."""


def encode(kind: Kind, weight: np.ndarray) -> np.ndarray:
    if kind not in SCALES:
        return gguf.quants.quantize(weight, kind)
    block, size = gguf.GGML_QUANT_SIZES[kind]
    random_bytes = np.random.default_rng(weight.size).integers(0, 256, (weight.size // block, size), dtype=np.uint8)
    for at in SCALES[kind]:
        random_bytes[:, at : at + 2] = np.array([2e-4], dtype=np.float16).view(np.uint8)
    return random_bytes.reshape(weight.shape[0], -1)


@pytest.mark.parametrize(
    "kind",
    [Kind.F32, Kind.F16, Kind.BF16, Kind.Q8_0,
     Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1, Kind.Q4_K, Kind.Q5_K, Kind.Q6_K],
    ids=lambda kind: kind.name,
)  # fmt: skip
def test_every_format(wide, tmp_path, kind):
    """A file in the format equals a folder with the weights that the gguf package reads from it."""
    read: dict[str, torch.Tensor] = {}

    def store(name: str, weight: np.ndarray):
        stored = encode(kind, weight)
        read[name] = torch.from_numpy(np.array(gguf.quants.dequantize(stored, kind))).view(weight.shape)
        return stored, kind

    file = write_gguf(wide, tmp_path / "model.gguf", "llama", {}, store)
    tensors = load_file(wide / "model.safetensors")
    for ours, theirs in {
        "token_embd": "model.embed_tokens",
        "output": "lm_head",
        "blk.0.attn_v": "model.layers.0.self_attn.v_proj",
        "blk.0.attn_output": "model.layers.0.self_attn.o_proj",
        "blk.0.ffn_gate": "model.layers.0.mlp.gate_proj",
        "blk.0.ffn_up": "model.layers.0.mlp.up_proj",
        "blk.0.ffn_down": "model.layers.0.mlp.down_proj",
    }.items():
        tensors[f"{theirs}.weight"] = read[f"{ours}.weight"]
    for part, count in (("q", 4), ("k", 2)):
        pairs = read[f"blk.0.attn_{part}.weight"].view(count, -1, 2, 256).transpose(1, 2).reshape(-1, 256)
        tensors[f"model.layers.0.self_attn.{part}_proj.weight"] = pairs.contiguous()
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((wide / "config.json").read_text())
    model = load(file, dtype="float32")
    assert torch.equal(logits(model), logits(load(tmp_path, dtype="float32")))
    if kind not in (Kind.F32, Kind.F16, Kind.BF16):
        assert load(file).dtype == torch.float32


def test_overrides(wide, tmp_path):
    file = write_gguf(wide, tmp_path / "model.gguf", "llama", {})
    assert not torch.allclose(logits(load(file, hf_overrides={"rope_theta": 10.0})), logits(load(file)), atol=1e-3)
    with pytest.raises(UnknownArgumentError, match="rms_norm_eps"):
        load(file, hf_overrides={"rms_norm_epsilon": 1.0})


def test_tokens_that_end_turns_are_known_by_their_text(wide, tmp_path):
    """The ends that converters name, 2 and 7 here, are others than those of Gemma's and Phi-3's turns."""
    tokens = ["<eos>", "a", "<|im_end|>", "<end_of_turn>", "<|end|>", "a<|end|>"]
    file = write_gguf(wide, tmp_path / "model.gguf", "llama", {}, tokens=tokens)
    assert load(file).eos_token_ids == (2, 7, 0, 3, 4)


def test_yarn_without_a_trained_length_stretches_the_files_own(wide, tmp_path):
    plain = load(write_gguf(wide, tmp_path / "plain.gguf", "llama", {})).max_model_len
    scaling = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0}
    silent = load(write_gguf(wide, tmp_path / "silent.gguf", "llama", scaling))
    said = {**scaling, "rope.scaling.original_context_length": plain}
    assert silent.max_model_len == 4 * plain
    assert silent.spec.ropes == load(write_gguf(wide, tmp_path / "said.gguf", "llama", said)).spec.ropes


def test_gemma_2_is_complete_where_the_first_files_are_silent(tmp_path):
    save(tmp_path, "gemma2")
    sizes = {"attention.key_length": 32, "attention.value_length": 32}
    spec = load(write_gguf(tmp_path, tmp_path / "model.gguf", "gemma2", sizes)).spec
    assert [layer.window for layer in spec.layers] == [4096, None]
    assert (spec.attention_soft_cap, spec.final_soft_cap) == (50.0, 30.0)


def test_a_files_attention_factor_multiplies_yarns_own(wide, tmp_path):
    scaling = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 2048}

    def rope(name, **more):
        added = {f"rope.scaling.{key}": value for key, value in more.items()}
        return load(write_gguf(wide, tmp_path / f"{name}.gguf", "llama", scaling | added)).spec.ropes[0]

    plain, own = rope("plain"), 1 + 0.1 * math.log(4)
    assert plain.factor == pytest.approx(own)
    assert rope("neutral", attn_factor=1.0, yarn_beta_fast=32.0, yarn_beta_slow=1.0) == plain
    assert rope("higher", attn_factor=1.5).factor == pytest.approx(1.5 * own)
    assert rope("ramp", yarn_beta_fast=8.0).inv_freq != plain.inv_freq
    assert rope("ramp too", yarn_beta_slow=0.1).inv_freq != plain.inv_freq


@pytest.mark.parametrize(
    ("architecture", "metadata", "named"),
    [
        ("mamba", {}, r"'mamba'; supported are llama"),
        ("qwen2", {"expert_count": 8}, r"qwen2\.expert_count = 8.*llama \(Mixtral\) and qwen3moe"),
        ("llama", {"expert_shared_count": 1}, r"llama\.expert_shared_count = 1"),
        ("llama", {"pooling_type": 1}, r"llama\.pooling_type = 1"),
        ("llama", {"expert_gating_func": 2}, r"llama\.expert_gating_func = 2"),
        ("llama", {"logit_scale": 2.0}, r"llama\.logit_scale = 2"),
        ("llama", {"rope.scaling.type": "su"}, "'su'"),
        ("llama", {"rope.scaling.attn_factor": 1.5}, r"attn_factor = 1\.5"),
        ("llama", {"rope.scaling.type": "linear", "rope.scaling.factor": 2.0, "rope.scaling.attn_factor": 1.5},
         r"attn_factor = 1\.5"),
        ("llama", {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.yarn_log_multiplier": 0.1},
         "yarn_log_multiplier"),
        ("llama", {"rope.dimension_count": 32}, "partial_rotary_factor is 0.5"),
        ("llama", {"attention.key_length": 64, "attention.value_length": 32}, "keys of 64 and values of 32"),
        ("llama", {"attention.sliding_window": 64}, "sliding_window is 64"),
    ],
)  # fmt: skip
def test_unsupported(wide, tmp_path, architecture, metadata, named):
    with pytest.raises(UnsupportedModelError, match=named):
        load(write_gguf(wide, tmp_path / "model.gguf", architecture, metadata))


def test_unsupported_format(wide, tmp_path):
    def store(name, weight):
        return np.zeros((weight.shape[0], weight.shape[1] // 256 * 84), dtype=np.uint8), Kind.Q2_K

    with pytest.raises(UnsupportedModelError, match=r"token_embd.*stored as Q2_K; supported are BF16, F16"):
        load(write_gguf(wide, tmp_path / "model.gguf", "llama", {}, store))


@pytest.mark.parametrize("key", ["block_count", "embedding_length", "attention.head_count", "context_length"])
def test_missing_metadata(wide, tmp_path, key):
    with pytest.raises(ModelConfigError, match="is None"):
        load(write_gguf(wide, tmp_path / "model.gguf", "llama", {key: None}))


def test_missing_tensor_and_wrong_shape(wide, tmp_path):
    with pytest.raises(CorruptWeightsError, match=r"no tensor 'blk\.1\."):
        load(write_gguf(wide, tmp_path / "a.gguf", "llama", {"block_count": 2}))
    with pytest.raises(CorruptWeightsError, match=r"ffn_gate.*shape \[256, 256\].*\[128, 256\]"):
        load(write_gguf(wide, tmp_path / "b.gguf", "llama", {"feed_forward_length": 128}))


def test_not_a_file(tmp_path):
    with pytest.raises(ModelNotFoundError, match=r"no model at .*x\.gguf"):
        load(tmp_path / "x.gguf")


@pytest.mark.parametrize("keep", [0, 3, 20, 200, 2000, -1])
def test_truncated(wide, tmp_path, keep):
    file = write_gguf(wide, tmp_path / "model.gguf", "llama", {})
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(CorruptWeightsError, match=r"model\.gguf is truncated or corrupt.*download"):
        load(file)


def test_two_tensors_in_one_place(wide, tmp_path):
    file = write_gguf(wide, tmp_path / "model.gguf", "llama", {})
    content = bytearray(file.read_bytes())

    def offset_at(name: bytes) -> int:
        return content.index(name) + len(name) + 4 + 2 * 8 + 4  # dimensions, shape, format

    source, target = offset_at(b"blk.0.ffn_gate.weight"), offset_at(b"blk.0.ffn_up.weight")
    content[target : target + 8] = content[source : source + 8]
    file.write_bytes(content)
    with pytest.raises(CorruptWeightsError, match=r"ffn_\w+\.weight' and 'blk\.0\.ffn_\w+\.weight' overlap"):
        load(file)


def test_not_gguf(tmp_path):
    (tmp_path / "model.gguf").write_bytes(b"PK" * 50)
    with pytest.raises(CorruptWeightsError, match="begins with b'PKPK'"):
        load(tmp_path / "model.gguf")


def test_arrays_in_arrays_without_end(tmp_path):
    array, deep = struct.pack("<IQ", 9, 1), 5000
    head = struct.pack("<4sIQQ", b"GGUF", 3, 0, 1) + struct.pack("<Q1sI", 1, b"a", 9)
    (tmp_path / "model.gguf").write_bytes(head + array * deep + bytes(64))
    with pytest.raises(CorruptWeightsError, match="deep in each other"):
        load(tmp_path / "model.gguf")


def test_a_bit_flipped_in_the_header_never_escapes_the_types(tmp_path):
    """Damage raises a typed error, except where it changes a number that nothing contradicts (RoPE's base)."""
    file = write_gguf(save_llama(tmp_path / "small"), tmp_path / "model.gguf", "llama", {})
    content, pick, refused = file.read_bytes(), random.Random(0), 0
    end = min(tensor.data_offset for tensor in gguf.GGUFReader(file).tensors)
    for _ in range(400):
        bit = pick.randrange(end * 8)
        damaged = bytearray(content)
        damaged[bit // 8] ^= 1 << bit % 8
        file.write_bytes(damaged)
        try:
            load(file)
        except ModelLoadError:
            refused += 1
    assert refused > 250


def test_settings_reach_the_configuration(wide, tmp_path):
    """The reader itself, against the gguf package's."""
    from pagemill.models.loading.checkpoint import MappedFile
    from pagemill.models.loading.gguf_file import FORMATS, GGUFFile

    file = write_gguf(wide, tmp_path / "model.gguf", "llama", {})
    ours, theirs = GGUFFile(MappedFile(file)), gguf.GGUFReader(file)
    for key, field in theirs.fields.items():
        if not key.startswith("GGUF."):
            assert ours.metadata[key] == field.contents()
    for tensor in theirs.tensors:
        mine = ours.tensors[tensor.name]
        assert (mine.begin, mine.nbytes) == (tensor.data_offset, tensor.n_bytes)
        assert FORMATS[mine.dtype].number == tensor.tensor_type
        assert mine.shape == tuple(map(int, reversed(tensor.shape)))
    assert json.dumps(ours.metadata)
