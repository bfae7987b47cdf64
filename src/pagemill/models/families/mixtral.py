"""Mixtral: Mistral with a mixture of experts in every layer."""

from __future__ import annotations

from dataclasses import replace

from pagemill.models.families.base import Family, ModelConfig, describe_decoder, one_rope, window_of_all
from pagemill.models.names import HUGGING_FACE
from pagemill.models.spec import DecoderSpec, LayerSpec, MoESpec

_NAMES = replace(
    HUGGING_FACE,
    router="block_sparse_moe.gate",
    expert_gate_up=("block_sparse_moe.experts.{expert}.w1", "block_sparse_moe.experts.{expert}.w3"),
    expert_down="block_sparse_moe.experts.{expert}.w2",
)


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


MIXTRAL = Family("MixtralForCausalLM", _mixtral, _NAMES)
