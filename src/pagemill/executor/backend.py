"""Backend: the operators, the attention and the layout of K/V that a device runs, chosen together."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from pagemill.attention.interface import AttentionBackend
from pagemill.attention.select import select_attention
from pagemill.attention.torch_backend import TorchAttention
from pagemill.errors import ConfigError
from pagemill.kvcache.layout import KVLayout, block_major, layer_major
from pagemill.ops.interface import Ops
from pagemill.ops.select import select_ops
from pagemill.ops.torch_ops import TorchOps


class Backend(NamedTuple):
    """layout: constructor of the layout that the attention reads fastest."""

    device: torch.device
    ops: Ops
    attention: AttentionBackend
    layout: Callable[..., KVLayout]


def torch_backend(device: torch.device) -> Backend:
    """Returns the readable reference, for any device."""
    return Backend(device, TorchOps(), TorchAttention(), block_major)


def select_backend(name: str, num_threads: int | None = None) -> Backend:
    """Returns the C++ kernels for "cpu", torch for "cuda", the better of what the machine has for "auto".

    Raises ConfigError for a device that is not there.
    """
    device = _device(name)
    if device.type != "cpu":
        return torch_backend(device)
    return Backend(device, select_ops(device, num_threads), select_attention(device), layer_major)


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"device is {name!r}; it must be 'auto', 'cpu' or 'cuda'", param="device") from error
    if device.type not in ("cpu", "cuda") or (device.type == "cuda" and not torch.cuda.is_available()):
        raise ConfigError(f"device {name!r} is not available on this machine; use 'auto' or 'cpu'", param="device")
    return device
