"""Small models with random weights, made and saved by transformers: the families that must agree with it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from pagemill.models.names import WeightNames
from pagemill.models.rope import resolve_rope
from pagemill.models.spec import DecoderSpec

VOCAB = 160
WINDOW = 20
TRAINED = 24
"""Positions that a model with scaled RoPE was (supposedly) trained on."""
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 4 * TRAINED,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

Change = Callable[[DecoderSpec], DecoderSpec]


@dataclass(frozen=True)
class Without:
    """A feature switched off: by a change of the spec, of the weights' names, or both."""

    spec: Change = lambda spec: spec
    names: Callable[[WeightNames], WeightNames] = lambda names: names


@dataclass(frozen=True)
class Case:
    """One random model. `features`: what to switch off, to see that parity depends on it."""

    name: str
    model_type: str
    settings: dict[str, Any]
    features: dict[str, Without]
    lengths: tuple[int, ...] = (85, 1, 37, 62)
    max_model_len: int | None = None
    drop: tuple[str, ...] = field(default=())
    """Settings of SIZES that the family does not have."""

    def save(self, folder: Path, seed: int = 0) -> None:
        torch.manual_seed(seed)
        sizes = {key: value for key, value in SIZES.items() if key not in self.drop}
        config = AutoConfig.for_model(self.model_type, **{**sizes, **self.settings})
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
        randomize(model)
        model.save_pretrained(folder)

    def prompts(self, seed: int = 1) -> list[list[int]]:
        random = torch.Generator().manual_seed(seed)
        return [torch.randint(3, VOCAB, (length,), generator=random).tolist() for length in self.lengths]


@torch.no_grad()
def randomize(model: torch.nn.Module) -> None:
    """Weights so large that attention is peaked, every norm and bias matters, and logits spread over several units."""
    for name, weight in model.named_parameters():
        if name.endswith("bias"):
            weight.normal_(0, 0.5)
        elif weight.dim() == 1:  # norms: about 1, or about 0 where the model adds 1
            weight.add_(torch.randn_like(weight) * 0.3)
        elif "embed" in name or "lm_head" in name:
            weight.normal_(0, 2 * weight.shape[-1] ** -0.5)
        elif any(part in name for part in ("q_proj", "k_proj", "qkv_proj", "q_b_proj", "kv_a_proj")):
            weight.normal_(0, 1.4 * weight.shape[-1] ** -0.5)
        else:
            weight.normal_(0, weight.shape[-1] ** -0.5)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.normal_(0, 0.3)


def reference_logits(folder: Path, prompts: list[list[int]]) -> list[torch.Tensor]:
    """transformers' dense float32 logits, each [length, vocab]; one prompt at a time, no cache."""
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32).eval()
    with torch.no_grad():
        return [model(torch.tensor([prompt]), use_cache=False).logits[0] for prompt in prompts]


def changed(**fields: Any) -> Without:
    return Without(lambda spec: dataclasses.replace(spec, **fields))


def each_layer(**fields: Any) -> Without:
    return Without(
        lambda spec: dataclasses.replace(
            spec, layers=tuple(dataclasses.replace(layer, **fields) for layer in spec.layers)
        )
    )


def each_rope(**fields: Any) -> Without:
    return Without(
        lambda spec: dataclasses.replace(spec, ropes=tuple(dataclasses.replace(r, **fields) for r in spec.ropes))
    )


def rope_of(max_model_len: int = 4 * TRAINED, **parameters: Any) -> Without:
    """The first rotary embedding resolved from other parameters; from none, without any scaling."""

    def change(spec: DecoderSpec) -> DecoderSpec:
        dim = 2 * len(spec.ropes[0].inv_freq)
        plain = {"rope_theta": 10000.0, **parameters}
        rope = resolve_rope(plain, dim, max_position=4 * TRAINED, max_model_len=max_model_len)
        return dataclasses.replace(spec, ropes=(rope, *spec.ropes[1:]))

    return Without(change)


def without_names(spec: Change = lambda spec: spec, **fields: Any) -> Without:
    return Without(spec, lambda names: dataclasses.replace(names, **fields))


def without_bias(**fields: Any) -> Without:
    return Without(
        lambda spec: dataclasses.replace(spec, **fields),
        lambda names: dataclasses.replace(names, ignored=(*names.ignored, ".bias")),
    )


NO_WINDOW = each_layer(window=None)
NO_SCALING = rope_of()
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": TRAINED,
    "rope_theta": 10000.0,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": TRAINED, "rope_theta": 10000.0}


def longrope(dim: int) -> dict[str, Any]:
    return {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0 + 0.02 * i for i in range(dim // 2)],
        "long_factor": [1.0 + 0.3 * i for i in range(dim // 2)],
    }


def moe(*unused: str, **fields: Any) -> Without:
    """unused: endings of the names of weights that are then left out."""
    return Without(
        lambda spec: dataclasses.replace(spec, moe=dataclasses.replace(spec.moe, **fields)),
        lambda names: dataclasses.replace(names, ignored=(*names.ignored, *unused)),
    )


def latent(**fields: Any) -> Without:
    return Without(lambda spec: dataclasses.replace(spec, latent=dataclasses.replace(spec.latent, **fields)))


DEEPSEEK = {
    "num_key_value_heads": 4, "kv_lora_rank": 32, "qk_nope_head_dim": 24, "qk_rope_head_dim": 16, "v_head_dim": 20,
    "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 40, "n_shared_experts": 2,
    "first_k_dense_replace": 1, "n_group": 4, "topk_group": 2, "rms_norm_eps": 1e-3, "num_hidden_layers": 3,
}  # fmt: skip
DEEPSEEK_WITHOUT = {
    "rope": each_layer(rope=None),
    "rotary pairs side by side": latent(paired=False),
    "norms' own epsilon": latent(norm_eps=1e-3),
    "shared experts": moe("gate_proj.weight", "up_proj.weight", "down_proj.weight", shared_size=0),
    "groups of experts": moe(groups=1),
    "routed scaling factor": moe(scale=1.0),
}

GEMMA = {"post_norms": changed(post_norms=False), "embedding scale": changed(embedding_scale=1.0)} | {
    "query scale": changed(scale=32**-0.5),
    "norm offset": without_names(norm_offset=0.0),
    "window": NO_WINDOW,
    "activation": changed(activation="silu"),
}

CASES = [
    Case("llama-bias", "llama", {"attention_bias": True, "mlp_bias": True}, {
        "qkv bias": without_bias(qkv_bias=False, o_bias=False, mlp_bias=False),
        "rope": each_layer(rope=None),
    }),
    Case("llama3", "llama", {"rope_parameters": LLAMA3, "tie_word_embeddings": True}, {"llama3 rope": NO_SCALING}),
    Case("llama-linear", "llama", {
        "rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0},
        "max_position_embeddings": TRAINED,
    }, {"linear rope": NO_SCALING}),
    Case("llama-yarn", "llama", {"rope_parameters": YARN}, {
        "yarn rope": NO_SCALING,
        "yarn attention factor": each_rope(factor=1.0),
    }),
    Case("mistral", "mistral", {"sliding_window": WINDOW}, {"window": NO_WINDOW}),
    Case("qwen2", "qwen2", {
        "use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 2, "tie_word_embeddings": True,
    }, {"qkv bias": without_bias(qkv_bias=False), "window": NO_WINDOW}, drop=("head_dim",)),
    Case("qwen3", "qwen3", {}, {"q and k norms": changed(qk_norm=False)}),
    Case("smollm3", "smollm3", {
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}, "no_rope_layer_interval": 2,
    }, {"layers without rope": each_layer(rope=0)}, drop=("head_dim",)),
    Case("gemma2", "gemma2", {
        "sliding_window": WINDOW, "attn_logit_softcapping": 3.0, "final_logit_softcapping": 5.0,
        "query_pre_attn_scalar": 12, "num_hidden_layers": 5,
    }, GEMMA | {"attention cap": changed(attention_soft_cap=None), "final cap": changed(final_soft_cap=None)}),
    Case("gemma3", "gemma3_text", {
        "sliding_window": WINDOW, "sliding_window_pattern": 3, "num_hidden_layers": 6, "query_pre_attn_scalar": 12,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        },
    }, GEMMA | {
        "q and k norms": changed(qk_norm=False),
        "local rope": each_layer(rope=0),
        "global rope scaling": rope_of(rope_theta=1e6),
    }),
    Case("phi3-long", "phi3", {
        "rope_parameters": longrope(16), "original_max_position_embeddings": TRAINED,
    }, {
        "long factors": rope_of(max_model_len=TRAINED, original_max_position_embeddings=TRAINED, **longrope(16)),
        "attention factor": each_rope(factor=1.0),
    }, lengths=(85, 25, 62), drop=("head_dim",)),
    Case("phi3-short", "phi3", {
        "rope_parameters": longrope(16), "original_max_position_embeddings": TRAINED,
    }, {"short factors": NO_SCALING}, lengths=(TRAINED, 1, 17), max_model_len=TRAINED, drop=("head_dim",)),
    Case("phi3-partial", "phi3", {
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
        "sliding_window": WINDOW,
    }, {"window": NO_WINDOW, "partial rotation": Without(lambda spec: dataclasses.replace(spec, ropes=(
        resolve_rope({"rope_theta": 10000.0}, 16, max_position=1, max_model_len=1),)))}, drop=("head_dim",)),
    Case("mixtral", "mixtral", {"num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": WINDOW}, {
        "window": NO_WINDOW, "normalized shares": moe(normalize=False), "second expert": moe(experts_per_token=1),
    }),
    Case("qwen3-moe", "qwen3_moe", {
        "num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 40, "mlp_only_layers": [1],
        "norm_topk_prob": False,
    }, {"shares as they are": moe(normalize=True), "q and k norms": changed(qk_norm=False)}),
    Case("deepseek-v2-lite", "deepseek_v2", {
        **DEEPSEEK, "q_lora_rank": None, "topk_method": "greedy", "rope_parameters": {"rope_theta": 10000.0},
    }, {
        name: DEEPSEEK_WITHOUT[name] for name in ("rope", "rotary pairs side by side", "shared experts")
    }, drop=("head_dim",)),
    Case("deepseek-v2", "deepseek_v2", {
        **DEEPSEEK, "q_lora_rank": 28, "topk_method": "group_limited_greedy", "routed_scaling_factor": 2.5,
        "rope_parameters": {**YARN, "mscale": 0.707, "mscale_all_dim": 0.707},
    }, DEEPSEEK_WITHOUT | {"yarn": NO_SCALING, "yarn's scale": changed(scale=40**-0.5)}, drop=("head_dim",)),
    Case("deepseek-v3", "deepseek_v3", {
        **DEEPSEEK, "q_lora_rank": 28, "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.8},
    }, DEEPSEEK_WITHOUT | {
        "yarn's factor": each_rope(factor=1.0),
        "yarn's scale": changed(scale=40**-0.5),
        "sigmoid": moe(sigmoid=False),
        "correction": moe("e_score_correction_bias", correction=False),
        "two best of a group": moe(group_best=1),
        "normalized shares": moe(normalize=False),
    }, drop=("head_dim",)),
]  # fmt: skip
