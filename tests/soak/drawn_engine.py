"""Draws the engines of soaks: a KV format, a way of drafting, weights, threads, policies. Nine seeds in a row have all
formats and all ways of drafting."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import save_file
from tests.lora_adapters import save_adapter, shapes_of
from tests.shallow import write_layers

from pagemill.arguments import arguments_of
from pagemill.config import EngineConfig
from pagemill.hub import resolve_model
from pagemill.kvcache.kv_format import kv_format
from pagemill.text.tokenizer import Tokenizer

MODEL = "smollm2-135m"
SIZES = SimpleNamespace(
    hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9, num_key_value_heads=3
)
TEXT = "The history of paging begins with the Atlas computer in Manchester. "
"""Prompts repeat this text, and so the model does too."""
DRAFT_LAYERS = (*range(14), *range(18, 30))
"""Names the layers of the model that its draft model has: with these it guesses about every second token."""
ADAPTED_LAYERS = ("layers.3.", "layers.17.")
ADAPTERS = (1, 2)
"""Their numbers."""
HEADS = 3
FORMATS = [*dict.fromkeys(kv_format(name).name for name in arguments_of(EngineConfig)["kv_cache_dtype"].choices[1:])]
"""Names of all KV formats; the first choice is the weights' own."""
METHODS = ("ngram", "suffix", "medusa", "draft_model")
DRAWN = ("kv_host_compression", "eviction_policy", "preemption_mode", "kv_compaction")
WEIGHTS: dict[str, dict[str, str]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "integers": {"dtype": "bfloat16", "quantization": "gguf"},
}


def kinds(seed: int) -> tuple[str, str]:
    """Returns the KV format of a seed's engine, and its way of drafting."""
    name = FORMATS[seed % len(FORMATS)]
    return name, METHODS[seed % len(METHODS)]


class DrawnEngine:
    """Settings of one engine. `same`: those that decide the bits of an answer; `others`: those that must not.

    frames: of the pool. frame_bytes: of one of them. overlaps: whether its steps overlap; every second seed's do.
    """

    def __init__(self, folder: Path, seed: int) -> None:
        draw = random.Random(seed)
        self.kv_format, self.method = kinds(seed)
        self.overlaps = seed % 2 == 0
        form = kv_format(self.kv_format)
        self.weights = draw.choice([*WEIGHTS])
        self.frames = 52 if form.precise else 40  # remainders need some
        layers = SIZES.num_hidden_layers + (len(DRAFT_LAYERS) if self.method == "draft_model" else 0)
        self.frame_bytes = layers * 16 * form.slot_bytes(SIZES.num_key_value_heads, 64, 64)
        self.same: dict[str, Any] = {
            **WEIGHTS[self.weights], "kv_cache_dtype": self.kv_format, "enable_lora": True, "max_lora_rank": 8,
            "lora_modules": {f"adapter-{number}": str(_save_adapter(folder, number)) for number in ADAPTERS},
        }  # fmt: skip
        choices = {name: arguments_of(EngineConfig)[name].choices for name in DRAWN}
        self.others: dict[str, Any] = {name: draw.choice(each) for name, each in choices.items()}
        self.others |= {"num_threads": draw.choice([None, 1]), "target_tpot_ms": draw.choice(["auto", "off"])}
        self.others["speculative_config"] = {"method": self.method} | self._drafts(folder)

    def _drafts(self, folder: Path) -> dict[str, str]:
        if self.method == "medusa":
            return {"model": save_heads(folder)}
        return {"model": save_draft_model(folder)} if self.method == "draft_model" else {}

    def __str__(self) -> str:
        others = ", ".join(f"{name} {value}" for name, value in self.others.items() if name != "speculative_config")
        name = f"K/V in {self.kv_format}, drafts by {self.method}, weights {self.weights}"
        return f"{name}, overlaps {self.overlaps}, {others}"


def save_heads(folder: Path) -> str:
    """Saves heads of random weights for the model, which guess among the tokens of `TEXT`, and returns their folder."""
    torch.manual_seed(0)
    hidden, tokens = SIZES.hidden_size, sorted({*Tokenizer.from_path(resolve_model(MODEL)).encode(TEXT)})
    weights = {f"blocks.{head}.layers.0.weight": torch.randn(hidden, hidden) / hidden for head in range(HEADS)}
    weights |= {"lm_heads.0.weight": torch.randn(len(tokens), hidden), "token_map": torch.tensor(tokens)}
    heads = folder / "heads"
    heads.mkdir(parents=True, exist_ok=True)
    save_file(weights, heads / "model.safetensors")
    (heads / "config.json").write_text('{"original_lm_head": true}', encoding="utf-8")
    return str(heads)


def save_draft_model(folder: Path) -> str:
    """Saves a model of `DRAFT_LAYERS` of the model's layers, and returns its file."""
    path = resolve_model(MODEL)
    draft = folder / "draft.gguf"
    write_layers(path if path.is_file() else next(path.glob("*.gguf")), draft, DRAFT_LAYERS)
    return str(draft)


def _save_adapter(folder: Path, number: int) -> Path:
    shapes = {name: shape for name, shape in shapes_of(SIZES).items() if ADAPTED_LAYERS[number - 1] in name}
    return save_adapter(folder / f"adapter-{number}", shapes, rank=4 * number, seed=number)
