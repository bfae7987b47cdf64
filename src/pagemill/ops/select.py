"""Which operators a device gets."""

from __future__ import annotations

import torch

from pagemill.ops.interface import Ops


def select_ops(device: torch.device | str, num_threads: int | None = None) -> Ops:
    """On CPU the C++ kernels, on `num_threads` threads (by default one per physical core); elsewhere torch."""
    if torch.device(device).type == "cpu":
        from pagemill import _kernels
        from pagemill.ops.cpu_ops import CpuOps, default_num_threads

        _kernels.set_num_threads(num_threads or default_num_threads())
        return CpuOps()
    from pagemill.ops.torch_ops import TorchOps

    return TorchOps()
