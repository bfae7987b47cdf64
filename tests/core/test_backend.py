from __future__ import annotations

import pytest
import torch

from pagemill import _kernels
from pagemill.attention.cpu_backend import CpuAttention
from pagemill.attention.torch_backend import TorchAttention
from pagemill.errors import ConfigError
from pagemill.executor.backend import cpu_backend, select_backend
from pagemill.ops.cpu_ops import CpuOps
from pagemill.ops.torch_ops import TorchOps
from pagemill.sampling.cpu_kernels import CpuSamplingKernels
from pagemill.sampling.torch_kernels import TorchSamplingKernels


def test_each_device_gets_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = _kernels.num_threads()
    on_cpu = select_backend("cpu", 3)
    assert _kernels.num_threads() == 3
    cpu_backend(threads)
    assert list(map(type, (on_cpu.ops, on_cpu.attention, on_cpu.sampling))) == [
        CpuOps,
        CpuAttention,
        CpuSamplingKernels,
    ]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for name in ("cuda", "auto"):
        on_gpu = select_backend(name)
        assert on_gpu.device == torch.device("cuda")
        assert list(map(type, (on_gpu.ops, on_gpu.attention, on_gpu.sampling))) == [
            TorchOps,
            TorchAttention,
            TorchSamplingKernels,
        ]


def test_kernels_that_this_cpu_lacks_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGEMILL_ISA", "altivec")
    with pytest.raises(ConfigError, match="altivec"):
        select_backend("cpu")
