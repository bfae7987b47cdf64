"""Figures that follow from a decoder's description."""

import dataclasses

import pytest

from pagemill.models.spec import DecoderSpec, LayerSpec, MoESpec

LAYER = LayerSpec(window=None, rope=None)
SPEC = DecoderSpec(
    family="llama", vocab_size=100, hidden_size=64, num_heads=4, num_kv_heads=2, head_dim=32, intermediate_size=96,
    layers=(LAYER, LAYER), ropes=(), norm_eps=1e-6, activation="silu", scale=1.0, max_position=128,
)  # fmt: skip
PARAMETERS = 64 * (4 + 2 + 2) * 32 + 4 * 32 * 64 + 3 * 64 * 96
"""Of one layer: q, k and v; o; gate, up and down."""


def test_the_share_of_attention_counts_two_products_per_key():
    # Multiply-adds per token and layer: one per parameter; head_dim for q·k and head_dim for p·v, per head and key.
    assert SPEC.attention_share(10) == pytest.approx(10 * 4 * 2 * 32 / PARAMETERS)


def test_windows_do_not_grow_with_the_context_and_experts_count_as_used():
    windowed = dataclasses.replace(SPEC, layers=(LAYER, LayerSpec(window=8, rope=None)))
    assert windowed.attention_share(10) == pytest.approx(SPEC.attention_share(10) / 2)
    moe = MoESpec(num_experts=8, experts_per_token=2, intermediate_size=96, normalize=True)
    experts = dataclasses.replace(SPEC, layers=(LayerSpec(None, None, moe=True),) * 2, moe=moe)
    assert experts.attention_share(10) == pytest.approx(10 * 4 * 2 * 32 / (PARAMETERS + 3 * 64 * 96))
