"""Selects the operators of a device."""

from __future__ import annotations

import os

import torch

from pagemill.errors import ConfigError
from pagemill.machine import usable_cores
from pagemill.ops.interface import Ops


def select_ops(device: torch.device | str, num_threads: int | None = None) -> Ops:
    """Returns the C++ kernels on CPU, with `num_threads` threads (default: one per physical core); elsewhere torch.

    Raises ConfigError if the environment's PAGEMILL_ISA names kernels that this CPU cannot run.
    """
    if torch.device(device).type == "cpu":
        from pagemill import _kernels
        from pagemill.ops.cpu_ops import CpuOps

        asked = os.environ.get("PAGEMILL_ISA")
        if asked and asked not in _kernels.available_isas():
            raise ConfigError(
                f"PAGEMILL_ISA is {asked!r}; this CPU runs {', '.join(_kernels.available_isas())}", param="PAGEMILL_ISA"
            )
        _kernels.set_num_threads(num_threads or usable_cores())
        return CpuOps()
    from pagemill.ops.torch_ops import TorchOps

    return TorchOps()
