"""The CPU's operators on every instruction set of this CPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kernel_settings import kernels_of
from pagemill import _kernels
from pagemill.ops.cpu_ops import CpuOps


@pytest.fixture(params=_kernels.available_isas())
def ops(request: pytest.FixtureRequest) -> Iterator[CpuOps]:
    with kernels_of(request.param, 2):
        yield CpuOps()
