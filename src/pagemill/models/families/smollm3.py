"""SmolLM3: Llama with some layers that have no positions (NoPE)."""

from __future__ import annotations

from pagemill.models.families.base import Family, ModelConfig, describe_decoder, one_rope, windows_by_type
from pagemill.models.spec import DecoderSpec, LayerSpec


def _smollm3(config: ModelConfig, max_model_len: int | None) -> DecoderSpec:
    rope, max_position = one_rope(config, max_model_len)
    windows = windows_by_type(config)
    rotates = config.sequence("no_rope_layers", len(windows))  # 1 where a layer does rotate, despite the name
    layers = [LayerSpec(window, 0 if rotate else None) for window, rotate in zip(windows, rotates, strict=True)]
    bias = config.flag("attention_bias")
    return describe_decoder(
        config, layers, (rope,), max_position, qkv_bias=bias, o_bias=bias, mlp_bias=config.flag("mlp_bias")
    )


SMOLLM3 = Family("SmolLM3ForCausalLM", _smollm3)
