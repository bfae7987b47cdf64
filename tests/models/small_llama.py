"""A tiny random llama in a folder, and ways to look at what was loaded from it or to damage it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig

from harness import PagedSequences
from pagemill.attention.torch_backend import TorchAttention
from pagemill.models.loading import LoadedModel, load_model
from pagemill.ops.torch_ops import TorchOps

PROMPT = [5, 9, 3, 40, 17, 8, 22, 60, 1, 33]
QUERY = "model.layers.1.self_attn.q_proj.weight"


def save_llama(folder: Path, dtype: torch.dtype = torch.float32, shard: str = "1GB", **settings: Any) -> Path:
    torch.manual_seed(0)
    config = LlamaConfig(
        **{
            "vocab_size": 64,
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 128,
            "initializer_range": 0.2,
            "eos_token_id": 2,
            **settings,
        }
    )
    model = AutoModelForCausalLM.from_config(config).to(dtype)
    model.save_pretrained(folder, max_shard_size=shard)
    return folder


def load(path: Path, **arguments: Any) -> LoadedModel:
    return load_model(path, ops=TorchOps(), attention=TorchAttention(), **arguments)


def logits(model: LoadedModel) -> torch.Tensor:
    return PagedSequences(model.decoder, [PROMPT]).run()[0]


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in config.items() if value != "remove"}))


def edit_weights(folder: Path, **changes: Any) -> None:
    """Replaces tensors by name (`.` written as `__`); None removes one."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    for key, value in changes.items():
        name = key.replace("__", ".")
        if value is None:
            del tensors[name]
        else:
            tensors[name] = value
    save_file(tensors, path, {"format": "pt"})
