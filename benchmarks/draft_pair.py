"""Makes a model of random weights, and a smaller one that drafts well for it: its embedding, first layers and head.

The model's other layers add little to what the first ones have made of a token, so that both often agree on the next.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM


@torch.no_grad()
def save_pair(
    folder: Path, *, draft_layers: int, later: float, family: str = "llama", **sizes: Any
) -> tuple[Path, Path]:
    """Saves both below `folder` in Hugging Face's form, and returns the model's folder and the draft model's.

    draft_layers: those that the draft model has. later: what the other layers add is multiplied by this.
    family, sizes: by transformers' names.
    """
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, tie_word_embeddings=False, **sizes)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for name, weight in model.named_parameters():
        if weight.dim() > 1:  # each layer turns its tokens as far as those before it
            weight.normal_(0, 1 if "embed" in name else weight.shape[1] ** -0.5)
        if name.endswith(("o_proj.weight", "down_proj.weight")) and int(name.split(".")[2]) >= draft_layers:
            weight.mul_(later)
        if name.startswith("lm_head"):
            weight.mul_(4)  # so that some tokens are far likelier than others
    model.save_pretrained(folder / "model")
    config.num_hidden_layers = draft_layers
    model.model.layers = model.model.layers[:draft_layers]
    model.save_pretrained(folder / "draft")
    return folder / "model", folder / "draft"
