"""Chooses the attention that runs a model on a GPU, as `attention_backend` says."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch

from pagemill.attention.interface import AttentionBackend
from pagemill.attention.measured_choice import MeasuredChoice, time_attention
from pagemill.attention.selection import candidates, choose_attention
from pagemill.attention.support import AttentionNeeds
from pagemill.config import EngineConfig
from pagemill.hub.registry import cache_dir
from pagemill.kvcache.kv_format import KVFormat, kv_format
from pagemill.models.spec import DecoderSpec

DRIVER = Path("/proc/driver/nvidia/version")


def cache_format(config: EngineConfig, dtype: torch.dtype) -> KVFormat:
    """Returns the format of keys and values, where weights have this dtype."""
    weights = str(dtype).removeprefix("torch.")
    return kv_format(weights if config.kv_cache_dtype == "auto" else config.kv_cache_dtype)


def gpu_attention(
    config: EngineConfig, device: torch.device, spec: DecoderSpec, dtype: torch.dtype
) -> AttentionBackend:
    """Returns the attention for a model on a GPU.

    Raises ConfigError where the one that is named does not take the model, its cache or the GPU.
    """
    needs = AttentionNeeds(
        dtype=dtype,
        kv_format=cache_format(config, dtype).name,
        block_size=config.block_size,
        heads=spec.num_heads,
        kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        value_dim=None if spec.latent is None else spec.value_dim,
        windows=tuple(dict.fromkeys(layer.window for layer in spec.layers)),
        soft_cap=spec.attention_soft_cap,
        # ROCm's numbers mean other GPUs.
        capability=torch.cuda.get_device_capability(device) if torch.version.hip is None else None,
        step_tokens=config.max_num_batched_tokens,
    )
    measure = MeasuredChoice(
        cache_dir() / "attention.json", _machine(device), needs, partial(time_attention, needs=needs, device=device)
    )
    return choose_attention(config.attention_backend, needs, candidates(needs, device), measure)


def _machine(device: torch.device) -> str:
    """Names what times depend on, beside the libraries, whose versions are in the backends' names."""
    properties = torch.cuda.get_device_properties(device)
    return f"{properties.name} with {properties.multi_processor_count} SMs, {_driver()}, torch {torch.__version__}"


def _driver() -> str:
    """Returns the first line of what the driver says of itself; nothing where it does not, as in some containers."""
    try:
        return DRIVER.read_text().partition("\n")[0]
    except OSError:
        return "unknown driver"
