"""Which attention a device gets."""

from __future__ import annotations

import torch

from pagemill.attention.interface import AttentionBackend


def select_attention(device: torch.device | str) -> AttentionBackend:
    """On CPU the C++ kernel (its threads are set by `select_ops`), elsewhere torch."""
    if torch.device(device).type == "cpu":
        from pagemill.attention.cpu_backend import CpuAttention

        return CpuAttention()
    from pagemill.attention.torch_backend import TorchAttention

    return TorchAttention()
