"""Phi-3 and Phi-4-mini: fused projections, longrope, heads that rotate in part."""

from __future__ import annotations

from dataclasses import replace

from pagemill.models.families.base import Family, ModelConfig, describe_decoder, one_rope, window_of_all
from pagemill.models.names import HUGGING_FACE
from pagemill.models.spec import DecoderSpec, LayerSpec

_NAMES = replace(HUGGING_FACE, qkv=("self_attn.qkv_proj",), gate_up=("mlp.gate_up_proj",))


def _phi3(config: ModelConfig, max_model_len: int | None) -> DecoderSpec:
    rope, max_position = one_rope(config, max_model_len, partial=True)
    config.refuse("attention_bias", False)
    return describe_decoder(config, [LayerSpec(window, 0) for window in window_of_all(config)], (rope,), max_position)


PHI3 = Family("Phi3ForCausalLM", _phi3, _NAMES)
