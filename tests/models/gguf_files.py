"""Writes a model that transformers saved as GGUF, in the way llama.cpp's conversion does."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.torch import load_file
from torch import Tensor, stack

Encode = Callable[[str, np.ndarray], tuple[np.ndarray, gguf.GGMLQuantizationType]]
_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate": "ffn_gate_inp",
    "block_sparse_moe.gate": "ffn_gate_inp",
}
_EXPERT = re.compile(r"model\.layers\.(\d+)\.(?:mlp|block_sparse_moe)\.experts\.(\d+)\.(\w+)\.weight")
_EXPERT_PARTS = {"gate_proj": "gate", "up_proj": "up", "down_proj": "down", "w1": "gate", "w3": "up", "w2": "down"}
_PAIRED_ROPE = ("llama", "smollm3")
_GEMMA = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
_TOP = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def float32(name: str, weight: np.ndarray) -> tuple[np.ndarray, gguf.GGMLQuantizationType]:
    return weight, gguf.GGMLQuantizationType.F32


def write_gguf(
    folder: Path,
    path: Path,
    architecture: str,
    metadata: dict[str, Any],
    encode: Encode = float32,
    extra: dict[str, np.ndarray] | None = None,
    single_experts: bool = False,
    tokens: Sequence[str] = (),
) -> Path:
    """metadata: what differs from the sizes in config.json, without the architecture's prefix; None leaves a key out.
    encode: (name in GGUF, float32 weight) -> stored array and its format; norms and biases stay float32.
    single_experts: writes a tensor for each expert, as llama.cpp did until 2024, instead of one for all of a layer.
    tokens: the texts of the vocabulary, if it has one."""
    config = json.loads((folder / "config.json").read_text())
    heads = config["num_attention_heads"]
    keys = {
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "block_count": config["num_hidden_layers"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": heads,
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "rope.freq_base": 10000.0,
        **metadata,
    }
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in keys.items():
        if isinstance(value, int):
            writer.add_uint32(f"{architecture}.{key}", value)
        elif isinstance(value, float):
            writer.add_float32(f"{architecture}.{key}", value)
        elif value is not None:
            writer.add_string(f"{architecture}.{key}", value)
    if tokens:
        writer.add_token_list(tokens)
    writer.add_eos_token_id(2)
    writer.add_eot_token_id(7)
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in (tensors if single_experts else _merge_experts(tensors)).items():
        weight, new = tensor.float().numpy(), _rename(name, architecture)
        if architecture.startswith("gemma") and "norm" in name:
            weight = weight + 1
        if architecture in _PAIRED_ROPE and ("q_proj" in name or "k_proj" in name):
            count = heads if "q_proj" in name else config["num_key_value_heads"]
            halves = weight.reshape(count, 2, weight.shape[0] // count // 2, *weight.shape[1:])
            weight = halves.swapaxes(1, 2).reshape(weight.shape)
        stored, kind = encode(new, weight) if weight.ndim > 1 else float32(new, weight)
        writer.add_tensor(new, np.ascontiguousarray(stored), raw_dtype=kind)
    for name, weight in (extra or {}).items():
        writer.add_tensor(name, weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _merge_experts(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Joins each layer's experts to one tensor [experts, rows, columns], under the name that it has in GGUF."""
    merged: dict[str, dict[int, Tensor]] = {}
    for name, tensor in tensors.items():
        if expert := _EXPERT.fullmatch(name):
            part = f"blk.{expert[1]}.ffn_{_EXPERT_PARTS[expert[3]]}_exps.weight"
            merged.setdefault(part, {})[int(expert[2])] = tensor
    others = {name: tensor for name, tensor in tensors.items() if not _EXPERT.fullmatch(name)}
    return others | {name: stack([parts[i] for i in range(len(parts))]) for name, parts in merged.items()}


def _rename(name: str, architecture: str) -> str:
    if expert := _EXPERT.fullmatch(name):
        return f"blk.{expert[1]}.ffn_{_EXPERT_PARTS[expert[3]]}.{expert[2]}.weight"
    if name.startswith("blk."):
        return name
    stem, kind = name.rsplit(".", 1)
    if stem in _TOP:
        return f"{_TOP[stem]}.{kind}"
    _, _, layer, part = stem.split(".", 3)
    parts = _LAYER | _GEMMA if architecture.startswith("gemma") else _LAYER
    return f"blk.{layer}.{parts[part]}.{kind}"
