"""Describes Gemma 2 and 3 (text): alternating windows, norms on both sides of each block, scaled embeddings.

Gemma 2 has soft caps. Gemma 3 has norms on q and k, and a rotary embedding for each kind of layer.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from pagemill.errors import ModelConfigError
from pagemill.models.families.base import (
    Family,
    ModelConfig,
    Positions,
    attention_bias,
    check_model_len,
    describe_decoder,
    head_dim_of,
    layers_by_type,
)
from pagemill.models.names import HUGGING_FACE
from pagemill.models.rope import resolve_rope
from pagemill.models.spec import DecoderSpec, RopeSpec

_NAMES = replace(
    HUGGING_FACE,
    post_attention_norm="post_attention_layernorm",
    pre_mlp_norm="pre_feedforward_layernorm",
    post_mlp_norm="post_feedforward_layernorm",
    norm_offset=1.0,
)


def _features(config: ModelConfig) -> dict[str, Any]:
    config.refuse("use_bidirectional_attention", False)
    return {
        "activation_key": "hidden_activation",
        "scale": config.number("query_pre_attn_scalar") ** -0.5,
        "post_norms": True,
        "attention_soft_cap": config.optional_number("attn_logit_softcapping"),
        "final_soft_cap": config.optional_number("final_logit_softcapping"),
        "embedding_scale": config.integer("hidden_size") ** 0.5,
        **attention_bias(config),
    }


def _gemma2(config: ModelConfig, max_model_len: int | None) -> DecoderSpec:
    return describe_decoder(config, max_model_len, layers_by_type(config), **_features(config))


def _gemma3(config: ModelConfig, max_model_len: int | None) -> DecoderSpec:
    max_position = config.integer("max_position_embeddings")  # counts the scaling already
    length = check_model_len(max_model_len, max_position)
    parameters = config.get("rope_parameters")

    def rope(kind: str) -> RopeSpec:
        if not isinstance(parameters, dict) or not isinstance(parameters.get(kind), dict):
            raise ModelConfigError(
                f"rope_parameters is {parameters!r}; it must hold a table for {kind}", param="rope_parameters"
            )
        return resolve_rope(parameters[kind], head_dim_of(config), max_position=max_position, max_model_len=length)

    positions = Positions((rope("full_attention"), rope("sliding_attention")), max_position)
    layers = [replace(layer, rope=0 if layer.window is None else 1) for layer in layers_by_type(config)]
    return describe_decoder(config, max_model_len, layers, positions=positions, qk_norm=True, **_features(config))


FAMILIES = {
    "gemma2": Family("Gemma2ForCausalLM", _gemma2, _NAMES),
    "gemma3_text": Family("Gemma3ForCausalLM", _gemma3, _NAMES),
}
