"""The devices of ranks: which each has, and how they exchange."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from pagemill.config import EngineConfig
from pagemill.errors import ConfigError
from pagemill.executor.backend import find_device
from pagemill.executor.device import Device
from pagemill.executor.process_group import Transport


def transport_of(config: EngineConfig, device: Device | None = None) -> Transport | None:
    """Returns by which ranks exchange on devices that work by themselves: NCCL on GPUs; None on CPUs.

    device: what rank 0 is given for such a device, if it is not the configuration's. Raises ConfigError where there are
    too few GPUs, or one is asked for by number.
    """
    if device is not None:
        return "gloo"
    asked, size = find_device(config.device), config.tensor_parallel_size
    if asked.type == "cpu":
        return None
    if asked.index is not None:
        raise ConfigError(
            f"device is {config.device!r}, but with tensor_parallel_size {size} rank r takes GPU r; use 'cuda', and "
            f"name the GPUs in CUDA_VISIBLE_DEVICES",
            param="device",
        )
    if (count := torch.cuda.device_count()) < size:
        raise ConfigError(
            f"tensor_parallel_size is {size}, but there {'is 1 GPU' if count == 1 else f'are {count} GPUs'} (of those "
            f"that CUDA_VISIBLE_DEVICES leaves), and each rank needs one; lower it, or use device 'cpu'",
            param="tensor_parallel_size",
        )
    return "nccl"


def config_of_rank(config: EngineConfig, rank: int) -> EngineConfig:
    """Returns the configuration by which a rank loads its part onto its GPU."""
    return replace(config, device=f"cuda:{rank}")


def check_alike(attention: Sequence[str]) -> None:
    """Raises ConfigError where ranks attend with different backends, named in their order: not all might be captured in
    graphs."""
    if len(set(attention)) > 1:
        raise ConfigError(
            f"ranks have chosen different attention for their GPUs: {', '.join(attention)}; name one that all can use "
            f"(attention_backend 'triton')",
            param="attention_backend",
        )
