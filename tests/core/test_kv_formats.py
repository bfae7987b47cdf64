"""Tests what a KV format costs the real model. Tokens come again, and the model finds them only if keys are sound."""

from __future__ import annotations

import random

import pytest
import torch

from harness import PagedSequences, load_on
from pagemill.attention.cpu_backend import CpuAttention
from pagemill.config import EngineConfig
from pagemill.errors import ConfigError
from pagemill.executor.backend import torch_backend
from pagemill.executor.load import open_executor
from pagemill.hub import resolve_model
from pagemill.models.decoder import Decoder

TOKENS = random.Random(3).choices(range(100, 5000), k=256)
LEAST_FOUND = {"int8": 0.96, "fp8_e4m3": 0.9, "fp8_e5m2": 0.75, "int8/int4": 0.9, "int4": 0.75, "int4_mixed": 0.75}
"""As a share of what the model finds with keys and values in bfloat16."""


def found(decoder: Decoder, format: str) -> float:
    """The share of random tokens that are the most likely ones when they come again."""
    logits = PagedSequences(decoder, [TOKENS + TOKENS], kv_dtype=format).run(300)[0]
    return float((logits[len(TOKENS) : -1].argmax(-1) == torch.tensor(TOKENS[1:])).float().mean())


class Damaged(CpuAttention):
    """Writes keys with the noise of 3 bits."""

    def write(self, key, value, cache, slots, remainder_slots=None):
        step = key.float().abs().amax(-1, keepdim=True) / 3
        super().write((torch.round(key / step) * step).to(key.dtype), value, cache, slots, remainder_slots)


def test_what_came_before_is_found_again():
    decoder = load_on("cpu", resolve_model("smollm2-135m"), dtype="bfloat16").decoder
    whole = found(decoder, "bfloat16")
    assert whole > 0.6
    for format, least in LEAST_FOUND.items():
        assert found(decoder, format) >= least * whole, format
    decoder.attention = Damaged()
    decoder.forward = lambda *arguments: Decoder.forward(decoder, *arguments)
    assert found(decoder, "bfloat16") < min(LEAST_FOUND.values()) * whole, "the task sees damaged keys"


def test_a_format_that_the_backend_does_not_take_is_refused():
    backend = torch_backend(torch.device("cpu"))
    backend.attention.kv_formats = ("float32", "int8")
    with pytest.raises(ConfigError, match=r"'int8/int4' cannot be used.*takes float32, int8; use 'int8' or 'auto'"):
        open_executor(EngineConfig(model="smollm2-135m", kv_cache_dtype="int8/int4"), backend=backend)
