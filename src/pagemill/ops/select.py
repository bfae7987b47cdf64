"""Which operators a device gets."""

from __future__ import annotations

import torch

from pagemill.ops.interface import Ops
from pagemill.ops.torch_ops import TorchOps


def select_ops(device: torch.device | str) -> Ops:
    return TorchOps()
