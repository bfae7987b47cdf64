from __future__ import annotations

import pytest
import torch

from pagemill import _kernels
from pagemill.attention.cpu_backend import CpuAttention
from pagemill.attention.select import select_attention
from pagemill.attention.torch_backend import TorchAttention
from pagemill.errors import ConfigError
from pagemill.ops.cpu_ops import CpuOps
from pagemill.ops.select import select_ops
from pagemill.ops.torch_ops import TorchOps


def test_each_device_gets_its_own() -> None:
    threads = _kernels.num_threads()
    assert isinstance(select_ops("cpu", 3), CpuOps)
    assert _kernels.num_threads() == 3
    select_ops("cpu", threads)
    assert isinstance(select_attention("cpu"), CpuAttention)
    assert isinstance(select_ops(torch.device("cuda")), TorchOps)
    assert isinstance(select_attention(torch.device("cuda")), TorchAttention)


def test_kernels_that_this_cpu_lacks_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGEMILL_ISA", "altivec")
    with pytest.raises(ConfigError, match="altivec"):
        select_ops("cpu")
