"""Names each weight of a decoder as checkpoints do: one table for each format, with changes for some families."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class WeightNames:
    """Holds tensor names without `.weight` or `.bias`. A layer's names follow `layer`, where `{layer}` is its index.

    qkv, gate_up, expert_gate_up: the parts, in order, that are joined row by row; a single name is already joined.
    expert_*:    `{expert}` is the expert's index.
    norm_offset: added to every norm's weight at load, in fp32 (Gemma stores weight - 1).
    paired_rope: q and k rows hold each head's rotary pairs side by side (llama.cpp's llama), not in halves; undone at
                 load.
    ignored:     endings of tensors that hold nothing a decoder needs.

    Of latent attention, `qkv` are the projections of the hidden state: to queries, and to the latent and the shared
    key. With a latent for queries, query_down makes that in the place of the first, and query_up queries of it.
    latent_up makes keys and values, head by head.
    router_correction: the whole name of the tensor, which has no `.weight`.
    """

    embedding: str
    final_norm: str
    lm_head: str
    layer: str
    input_norm: str
    qkv: tuple[str, ...]
    o: str
    pre_mlp_norm: str
    gate_up: tuple[str, ...]
    down: str
    q_norm: str = ""
    k_norm: str = ""
    post_attention_norm: str = ""
    post_mlp_norm: str = ""
    router: str = ""
    expert_gate_up: tuple[str, ...] = ()
    expert_down: str = ""
    shared_gate_up: tuple[str, ...] = ()
    shared_down: str = ""
    router_correction: str = ""
    query_down: str = ""
    query_norm: str = ""
    query_up: str = ""
    latent_norm: str = ""
    latent_up: str = ""
    norm_offset: float = 0.0
    paired_rope: bool = False
    ignored: tuple[str, ...] = ()


HUGGING_FACE = WeightNames(
    embedding="model.embed_tokens",
    final_norm="model.norm",
    lm_head="lm_head",
    layer="model.layers.{layer}.",
    input_norm="input_layernorm",
    qkv=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    o="self_attn.o_proj",
    q_norm="self_attn.q_norm",
    k_norm="self_attn.k_norm",
    pre_mlp_norm="post_attention_layernorm",
    gate_up=("mlp.gate_proj", "mlp.up_proj"),
    down="mlp.down_proj",
    router="mlp.gate",
    expert_gate_up=("mlp.experts.{expert}.gate_proj", "mlp.experts.{expert}.up_proj"),
    expert_down="mlp.experts.{expert}.down_proj",
    ignored=("rotary_emb.inv_freq",),
)

GGUF = WeightNames(
    embedding="token_embd",
    final_norm="output_norm",
    lm_head="output",
    layer="blk.{layer}.",
    input_norm="attn_norm",
    qkv=("attn_q", "attn_k", "attn_v"),
    o="attn_output",
    q_norm="attn_q_norm",
    k_norm="attn_k_norm",
    post_attention_norm="post_attention_norm",
    pre_mlp_norm="ffn_norm",
    gate_up=("ffn_gate", "ffn_up"),
    down="ffn_down",
    post_mlp_norm="post_ffw_norm",
    router="ffn_gate_inp",
    expert_gate_up=("ffn_gate.{expert}", "ffn_up.{expert}"),
    expert_down="ffn_down.{expert}",
    ignored=("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"),
)
