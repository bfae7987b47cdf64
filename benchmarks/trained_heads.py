"""Trains Medusa heads for a model on token sequences, and saves them under vLLM's names."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import cross_entropy, silu
from transformers import PreTrainedModel


def save_heads(
    folder: Path, model: PreTrainedModel, sequences: Tensor, *, heads: int, steps: int, rows: int = 256, seed: int = 0
) -> Path:
    """Trains one residual block for each head, before the model's own last layer, and returns the folder.

    sequences: int64 [n, length], as the model writes them. rows: positions of a step.
    """
    torch.manual_seed(seed)
    last = model.get_output_embeddings().weight.detach().float()
    with torch.no_grad():
        states = torch.cat([model.base_model(each[None]).last_hidden_state for each in sequences]).float()
    hidden = states[:, : -heads - 1].flatten(0, 1)
    targets = [sequences[:, 2 + head : sequences.shape[1] - heads + head + 1].flatten() for head in range(heads)]
    blocks = [torch.zeros(hidden.shape[1], hidden.shape[1], requires_grad=True) for _ in range(heads)]
    optimizer = torch.optim.Adam(blocks, lr=1e-3)
    for _ in range(steps):
        some = torch.randint(len(hidden), (rows,))
        loss = torch.zeros(())
        for block, target in zip(blocks, targets, strict=True):
            state = hidden[some] + silu(hidden[some] @ block.T)
            loss = loss + cross_entropy(state @ last.T, target[some])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    weights = {f"blocks.{head}.layers.0.weight": block.detach() for head, block in enumerate(blocks)}
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights | {"lm_heads.0.weight": last.clone()}, folder / "model.safetensors")
    config = {
        "model_type": "medusa",
        "num_heads": heads,
        "num_hidden_layers": 1,
        "hidden_size": hidden.shape[1],
        "vocab_size": len(last),
        "original_lm_head": True,
    }
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder
