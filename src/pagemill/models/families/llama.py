"""Describes the Llama line: Llama 2 and 3, SmolLM2, and what differs from them in a feature or two.

Mistral has windows, Mixtral has experts too, Phi-3 has fused projections and heads that rotate in part, and SmolLM3 has
layers without positions (NoPE).
"""

from __future__ import annotations

from dataclasses import replace

from pagemill.models.families.base import (
    Family,
    ModelConfig,
    attention_bias,
    describe_decoder,
    equal_layers,
    layers_by_type,
)
from pagemill.models.names import HUGGING_FACE
from pagemill.models.spec import DecoderSpec, MoESpec


def _llama(config: ModelConfig, max_model_len: int | None) -> DecoderSpec:
    config.refuse("sliding_window")
    layers, mlp_bias = equal_layers(config), config.flag("mlp_bias")
    return describe_decoder(config, max_model_len, layers, mlp_bias=mlp_bias, **attention_bias(config))


def _mistral(config: ModelConfig, max_model_len: int | None) -> DecoderSpec:
    return describe_decoder(config, max_model_len, equal_layers(config))


def _mixtral(config: ModelConfig, max_model_len: int | None) -> DecoderSpec:
    experts = MoESpec(
        num_experts=config.integer("num_local_experts"),
        experts_per_token=config.integer("num_experts_per_tok"),
        intermediate_size=config.integer("intermediate_size"),
        normalize=True,
    )
    layers = [replace(layer, moe=True) for layer in equal_layers(config)]
    return describe_decoder(config, max_model_len, layers, moe=experts)


def _phi3(config: ModelConfig, max_model_len: int | None) -> DecoderSpec:
    config.refuse("attention_bias", False)
    return describe_decoder(config, max_model_len, equal_layers(config), partial_rope=True)


def _smollm3(config: ModelConfig, max_model_len: int | None) -> DecoderSpec:
    layers = layers_by_type(config)
    rotates = config.sequence("no_rope_layers", len(layers))  # 1 where a layer does rotate, despite the name
    layers = [replace(layer, rope=0 if rotate else None) for layer, rotate in zip(layers, rotates, strict=True)]
    mlp_bias = config.flag("mlp_bias")
    return describe_decoder(config, max_model_len, layers, mlp_bias=mlp_bias, **attention_bias(config))


FAMILIES = {
    "llama": Family("LlamaForCausalLM", _llama),
    "mistral": Family("MistralForCausalLM", _mistral),
    "mixtral": Family(
        "MixtralForCausalLM",
        _mixtral,
        replace(
            HUGGING_FACE,
            router="block_sparse_moe.gate",
            expert_gate_up=("block_sparse_moe.experts.{expert}.w1", "block_sparse_moe.experts.{expert}.w3"),
            expert_down="block_sparse_moe.experts.{expert}.w2",
        ),
    ),
    "phi3": Family(
        "Phi3ForCausalLM", _phi3, replace(HUGGING_FACE, qkv=("self_attn.qkv_proj",), gate_up=("mlp.gate_up_proj",))
    ),
    "smollm3": Family("SmolLM3ForCausalLM", _smollm3),
}
