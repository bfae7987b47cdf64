"""Describes Qwen2 (bias on q, k, v), Qwen3 (norms on q and k) and its mixture of experts."""

from __future__ import annotations

from pagemill.models.families.base import Family, ModelConfig, attention_bias, describe_decoder, layers_by_type
from pagemill.models.spec import DecoderSpec, LayerSpec, MoESpec


def _qwen2(config: ModelConfig, max_model_len: int | None) -> DecoderSpec:
    return describe_decoder(config, max_model_len, layers_by_type(config), qkv_bias=True)


def _qwen3(config: ModelConfig, max_model_len: int | None) -> DecoderSpec:
    return describe_decoder(config, max_model_len, layers_by_type(config), qk_norm=True, **attention_bias(config))


def _qwen3_moe(config: ModelConfig, max_model_len: int | None) -> DecoderSpec:
    config.refuse("layer_types")
    window = config.integer("sliding_window") if config.flag("use_sliding_window") else None
    dense, step = config.get("mlp_only_layers") or [], config.integer("decoder_sparse_step")
    layers = [
        LayerSpec(window, moe=index not in dense and (index + 1) % step == 0) for index in range(config.layer_count())
    ]
    experts = MoESpec(
        num_experts=config.integer("num_experts" if config.get("num_experts") is not None else "num_local_experts"),
        experts_per_token=config.integer("num_experts_per_tok"),
        intermediate_size=config.integer("moe_intermediate_size"),
        normalize=config.flag("norm_topk_prob"),
    )
    return describe_decoder(config, max_model_len, layers, qk_norm=True, moe=experts, **attention_bias(config))


FAMILIES = {
    "qwen2": Family("Qwen2ForCausalLM", _qwen2),
    "qwen3": Family("Qwen3ForCausalLM", _qwen3),
    "qwen3_moe": Family("Qwen3MoeForCausalLM", _qwen3_moe),
}
