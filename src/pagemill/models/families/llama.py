"""Llama 2 and 3, SmolLM2 (the same decoder) and Mistral (every layer with a window)."""

from __future__ import annotations

from pagemill.models.families.base import Family, ModelConfig, describe_decoder, one_rope, window_of_all
from pagemill.models.spec import DecoderSpec, LayerSpec


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


LLAMA = Family("LlamaForCausalLM", _llama)
MISTRAL = Family("MistralForCausalLM", _mistral)
