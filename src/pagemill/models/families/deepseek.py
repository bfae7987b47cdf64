"""Describes DeepSeek-V2 and V3 (R1): latent attention, and many small experts beside shared ones."""

from __future__ import annotations

from dataclasses import replace

from pagemill.errors import ModelConfigError
from pagemill.models.families.base import Family, ModelConfig, describe_decoder, equal_layers
from pagemill.models.names import HUGGING_FACE
from pagemill.models.rope import magnitude
from pagemill.models.spec import DecoderSpec, LatentSpec, MoESpec

_NAMES = replace(
    HUGGING_FACE,
    qkv=("self_attn.q_proj", "self_attn.kv_a_proj_with_mqa"),
    query_down="self_attn.q_a_proj",
    query_norm="self_attn.q_a_layernorm",
    query_up="self_attn.q_b_proj",
    latent_norm="self_attn.kv_a_layernorm",
    latent_up="self_attn.kv_b_proj",
    shared_gate_up=("mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj"),
    shared_down="mlp.shared_experts.down_proj",
    router_correction="mlp.gate.e_score_correction_bias",
)


def _deepseek_v2(config: ModelConfig, max_model_len: int | None) -> DecoderSpec:
    config.refuse("scoring_func", "softmax")
    config.refuse("topk_method", "greedy", "group_limited_greedy")
    config.refuse("norm_topk_prob", False)  # implementations differ in what it then does to the scaling factor
    limited = config.get("topk_method") == "group_limited_greedy"
    experts = _experts(config, normalize=False)
    return _describe(config, max_model_len, _with_groups(config, experts) if limited else experts)


def _deepseek_v3(config: ModelConfig, max_model_len: int | None) -> DecoderSpec:
    config.refuse("scoring_func", "sigmoid")
    config.refuse("topk_method", "noaux_tc")
    experts = _experts(config, normalize=config.flag("norm_topk_prob"))
    experts = replace(_with_groups(config, experts), sigmoid=True, correction=True, group_best=2)
    spec = _describe(config, max_model_len, experts, paired=config.get("rope_interleave") is not False)
    drafting = "num_nextn_predict_layers"
    return replace(spec, draft_layers=config.integer(drafting, maximum=100)) if config.get(drafting) else spec


def _experts(config: ModelConfig, *, normalize: bool) -> MoESpec:
    size = config.integer("moe_intermediate_size")
    return MoESpec(
        num_experts=config.integer("n_routed_experts"),
        experts_per_token=config.integer("num_experts_per_tok"),
        intermediate_size=size,
        normalize=normalize,
        scale=config.number("routed_scaling_factor"),
        shared_size=size * config.integer("n_shared_experts"),
    )


def _with_groups(config: ModelConfig, experts: MoESpec) -> MoESpec:
    groups, kept = config.integer("n_group"), config.integer("topk_group")
    if experts.num_experts % groups or kept > groups:
        raise ModelConfigError(
            f"n_group is {groups} and topk_group {kept}; the first must divide n_routed_experts "
            f"({experts.num_experts}), the second may not be larger than the first",
            param="n_group",
        )
    return replace(experts, groups=groups, kept_groups=kept)


def _describe(config: ModelConfig, max_model_len: int | None, experts: MoESpec, *, paired: bool = True) -> DecoderSpec:
    config.refuse("moe_layer_freq", 1)
    config.refuse("attention_bias", False)
    config.refuse("mlp_bias", False)
    dense = config.get("first_k_dense_replace") or 0
    layers = [replace(layer, moe=index >= dense) for index, layer in enumerate(equal_layers(config))]
    latent = LatentSpec(
        rank=config.integer("kv_lora_rank"),
        rope_dim=config.integer("qk_rope_head_dim"),
        nope_dim=config.integer("qk_nope_head_dim"),
        value_dim=config.integer("v_head_dim"),
        query_rank=None if config.get("q_lora_rank") is None else config.integer("q_lora_rank"),
        paired=paired,
    )
    spec = describe_decoder(config, max_model_len, layers, scale=_scale(config, latent), moe=experts, latent=latent)
    return replace(spec, num_kv_heads=1, head_dim=latent.rank + latent.rope_dim)


def _scale(config: ModelConfig, latent: LatentSpec) -> float:
    """Returns what multiplies query·key: with scaled positions also the square of yarn's magnitude over all dimensions
    (as DeepSeek's own code has it)."""
    scale: float = latent.query_dim**-0.5
    parameters = config.get("rope_parameters")
    if not isinstance(parameters, dict) or parameters.get("rope_type", "default") == "default":
        return scale
    factor, weight = parameters.get("factor") or 1.0, parameters.get("mscale_all_dim") or 0.0
    if not all(isinstance(each, int | float) for each in (factor, weight)):
        raise ModelConfigError(
            f"rope_parameters have factor {factor!r} and mscale_all_dim {weight!r}; both must be numbers",
            param="rope_parameters",
        )
    return scale * magnitude(factor, weight) ** 2 if weight else scale


FAMILIES = {
    "deepseek_v2": Family("DeepseekV2ForCausalLM", _deepseek_v2, _NAMES),
    "deepseek_v3": Family("DeepseekV3ForCausalLM", _deepseek_v3, _NAMES),
}
