"""Random LoRA adapters, written as PEFT writes them, and the weights that they make when they are merged."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

PREFIX = "base_model.model."


def shapes_of(config: Any) -> dict[str, tuple[int, int]]:
    """Returns (outputs, inputs) of every module that adapters may add to, for a llama-like configuration."""
    hidden, size = config.hidden_size, config.intermediate_size
    dim = getattr(config, "head_dim", None) or hidden // config.num_attention_heads
    queries, keys = config.num_attention_heads * dim, config.num_key_value_heads * dim
    each = {
        "self_attn.q_proj": (queries, hidden),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, queries),
        "mlp.gate_proj": (size, hidden),
        "mlp.up_proj": (size, hidden),
        "mlp.down_proj": (hidden, size),
    }
    layers = range(config.num_hidden_layers)
    return {f"model.layers.{layer}.{name}": shape for layer in layers for name, shape in each.items()}


def save_adapter(
    folder: Path,
    shapes: Mapping[str, tuple[int, int]],
    *,
    rank: int = 8,
    alpha: float = 16,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    **config: Any,
) -> Path:
    """Writes an adapter that adds to these modules; `config` replaces settings."""
    random = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, (outputs, inputs) in shapes.items():
        a = torch.randn(rank, inputs, generator=random) * inputs**-0.5
        b = torch.randn(outputs, rank, generator=random) * 0.1
        tensors[f"{PREFIX}{name}.lora_A.weight"] = a.to(dtype)
        tensors[f"{PREFIX}{name}.lora_B.weight"] = b.to(dtype)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors", {"format": "pt"})
    settings = {
        "peft_type": "LORA",
        "base_model_name_or_path": "some/model",
        "r": rank,
        "lora_alpha": alpha,
        "target_modules": sorted({name.rpartition(".")[2] for name in shapes}),
        "bias": "none",
        "lora_dropout": 0.1,
        "init_lora_weights": True,
        "megatron_core": "megatron.core",
        "qalora_group_size": 16,
        "use_rslora": False,
        "use_dora": False,
        "task_type": "CAUSAL_LM",
        **config,
    }
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return folder


def merged(weights: Mapping[str, Tensor], adapter: Mapping[str, Tensor], scale: float) -> dict[str, Tensor]:
    """Returns the weights with scale * B A added, in float64, to those that the adapter names."""
    found = dict(weights)
    for name in adapter:
        if name.endswith(".lora_A.weight"):
            module = name.removeprefix(PREFIX).removesuffix(".lora_A.weight")
            a, b = adapter[name].double(), adapter[name.replace("lora_A", "lora_B")].double()
            weight = found[f"{module}.weight"]
            found[f"{module}.weight"] = (weight.double() + scale * b @ a).to(weight.dtype)
    return found
