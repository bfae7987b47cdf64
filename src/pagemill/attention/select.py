"""Which attention a device gets."""

from __future__ import annotations

import torch

from pagemill.attention.interface import AttentionBackend
from pagemill.attention.torch_backend import TorchAttention


def select_attention(device: torch.device | str) -> AttentionBackend:
    return TorchAttention()
