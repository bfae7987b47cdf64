"""Trains Medusa heads for a model on token sequences, and saves them under vLLM's names."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from benchmarks.peers.workloads import tokenize
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import cross_entropy, silu
from transformers import AutoModelForCausalLM, PreTrainedModel

from pagemill import LLM, SamplingParams
from pagemill.hub import resolve_model

HEADS, STEPS = 3, 400
PROMPTS, PROMPT, ANSWER = 320, 40, 150


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


def heads_for(name: str, folder: Path) -> Path:
    """Returns a folder of heads for a GGUF model by its name, trained on what it writes behind pieces of a text."""
    if (folder / "model.safetensors").is_file():
        return folder
    text = list(tokenize(name))[20_000:]  # the benchmarks' prompts come before
    prompts = [text[at * PROMPT : (at + 1) * PROMPT] for at in range(PROMPTS)]
    temperatures = [0.0 if at % 2 else 1.0 for at in range(PROMPTS)]
    params = [SamplingParams(temperature=each, max_tokens=ANSWER, seed=0, ignore_eos=True) for each in temperatures]
    with LLM(name, max_model_len=1024) as llm:
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params)
    written = torch.tensor(
        [[*prompt, *output.outputs[0].token_ids] for prompt, output in zip(prompts, outputs, strict=True)]
    )
    path = resolve_model(name)
    model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    return save_heads(folder, model, written, heads=HEADS, steps=STEPS)
