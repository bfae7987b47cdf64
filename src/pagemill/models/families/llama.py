"""Describes the Llama line: Llama 2 and 3, SmolLM2, and what differs from them in a feature or two.

Mistral has windows, Mixtral has experts too, Phi-3 has fused projections and heads that rotate in part, and SmolLM3 has
layers without positions (NoPE).
"""

from __future__ import annotations

from dataclasses import replace

from pagemill.models.families.base import (
    Family,
    ModelConfig,
    describe_decoder,
    one_rope,
    window_of_all,
    windows_by_type,
)
from pagemill.models.names import HUGGING_FACE
from pagemill.models.spec import DecoderSpec, LayerSpec, MoESpec


def _llama(config: ModelConfig, max_model_len: int | None) -> DecoderSpec:
    config.refuse("sliding_window")
    rope, max_position = one_rope(config, max_model_len)
    bias = config.flag("attention_bias")
    return describe_decoder(
        config,
        [LayerSpec(window, 0) for window in window_of_all(config)],
        (rope,),
        max_position,
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=config.flag("mlp_bias"),
    )


def _mistral(config: ModelConfig, max_model_len: int | None) -> DecoderSpec:
    rope, max_position = one_rope(config, max_model_len)
    return describe_decoder(config, [LayerSpec(window, 0) for window in window_of_all(config)], (rope,), max_position)


def _mixtral(config: ModelConfig, max_model_len: int | None) -> DecoderSpec:
    rope, max_position = one_rope(config, max_model_len)
    experts = MoESpec(
        num_experts=config.integer("num_local_experts"),
        experts_per_token=config.integer("num_experts_per_tok"),
        intermediate_size=config.integer("intermediate_size"),
        normalize=True,
    )
    layers = [LayerSpec(window, 0, moe=True) for window in window_of_all(config)]
    return describe_decoder(config, layers, (rope,), max_position, moe=experts)


def _phi3(config: ModelConfig, max_model_len: int | None) -> DecoderSpec:
    rope, max_position = one_rope(config, max_model_len, partial=True)
    config.refuse("attention_bias", False)
    return describe_decoder(config, [LayerSpec(window, 0) for window in window_of_all(config)], (rope,), max_position)


def _smollm3(config: ModelConfig, max_model_len: int | None) -> DecoderSpec:
    rope, max_position = one_rope(config, max_model_len)
    windows = windows_by_type(config)
    rotates = config.sequence("no_rope_layers", len(windows))  # 1 where a layer does rotate, despite the name
    layers = [LayerSpec(window, 0 if rotate else None) for window, rotate in zip(windows, rotates, strict=True)]
    bias = config.flag("attention_bias")
    return describe_decoder(
        config, layers, (rope,), max_position, qkv_bias=bias, o_bias=bias, mlp_bias=config.flag("mlp_bias")
    )


LLAMA = Family("LlamaForCausalLM", _llama)
MISTRAL = Family("MistralForCausalLM", _mistral)
MIXTRAL = Family(
    "MixtralForCausalLM",
    _mixtral,
    replace(
        HUGGING_FACE,
        router="block_sparse_moe.gate",
        expert_gate_up=("block_sparse_moe.experts.{expert}.w1", "block_sparse_moe.experts.{expert}.w3"),
        expert_down="block_sparse_moe.experts.{expert}.w2",
    ),
)
PHI3 = Family(
    "Phi3ForCausalLM", _phi3, replace(HUGGING_FACE, qkv=("self_attn.qkv_proj",), gate_up=("mlp.gate_up_proj",))
)
SMOLLM3 = Family("SmolLM3ForCausalLM", _smollm3)
