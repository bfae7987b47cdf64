"""Every attention backend, the CPU's on every instruction set of this CPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kernel_settings import kernels_of
from pagemill import _kernels
from pagemill.attention.cpu_backend import CpuAttention
from pagemill.attention.interface import AttentionBackend
from pagemill.attention.torch_backend import TorchAttention


@pytest.fixture(params=["torch", *_kernels.available_isas()])
def backend(request: pytest.FixtureRequest) -> Iterator[AttentionBackend]:
    if request.param == "torch":
        yield TorchAttention()
    else:
        with kernels_of(request.param, 2):
            yield CpuAttention()
