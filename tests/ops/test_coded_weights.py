"""bf16 weights that tiles hold in 12 bits: every one comes back, and no output changes a bit."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from kernel_settings import kernels_of
from pagemill import _kernels
from pagemill.ops.cpu_ops import CpuLinear, CpuOps

pytestmark = pytest.mark.skipif("amx_bf16" not in _kernels.available_isas(), reason="weights are coded for tiles only")

STEP = 32  # outputs and k in a step of a panel
PATCHES = 4  # per step
ROWS = (1, 2, 15, 16, 17, 31, 32, 33, 47, 48, 49, 64, 65, 80, 100, 128, 129, 250, 256, 257, 400, 512, 600)


@pytest.fixture(params=[1, 2])
def tiles(request: pytest.FixtureRequest) -> Iterator[CpuOps]:
    with kernels_of("amx_bf16", request.param):
        yield CpuOps()


def is_coded(linear: CpuLinear) -> bool:
    return linear.nbytes < -(-linear.out_features // STEP) * -(-linear.in_features // STEP) * STEP * STEP * 2


def every_pattern(count: int) -> torch.Tensor:
    return torch.arange(count).to(torch.int16).view(torch.bfloat16)  # wraps around after 65,536


def of_16_exponents(count: int) -> torch.Tensor:
    return ((1 + torch.rand(count)).bfloat16().clamp_max(1.9) * 2.0 ** -(torch.arange(count) % 16)).bfloat16()


def equal_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.view(torch.int16), b.view(torch.int16))


def test_every_weight_comes_back_from_every_place(tiles: CpuOps) -> None:
    """All patterns of 16 bits, NaN and subnormal numbers too, as many in a step as can be patched, each 4 places on."""
    steps = 65536 // PATCHES
    count = steps * STEP * STEP
    weight = (of_16_exponents(count) * (torch.randint(0, 2, (count,)) * 2 - 1)).view(steps, STEP * STEP)
    places = (torch.arange(65536) % (STEP * STEP)).view(steps, PATCHES)
    weight.scatter_(1, places, every_pattern(65536).view(steps, PATCHES))
    weight = weight.view(steps * STEP, STEP)
    linear = tiles.pack_linear(weight)
    assert is_coded(linear)
    assert equal_bits(linear.rows(torch.arange(len(weight))), weight)


@pytest.mark.parametrize("more", [0, 1])
def test_a_weight_with_too_many_other_exponents_is_held_as_it_is(tiles: CpuOps, more: int) -> None:
    weight = of_16_exponents(5 * STEP * 3 * STEP).view(5 * STEP, 3 * STEP)
    weight[STEP : 2 * STEP].view(-1)[: 3 * PATCHES + more] = 1e30  # of one panel
    linear = tiles.pack_linear(weight)
    assert is_coded(linear) == (more == 0)
    assert equal_bits(linear.rows(torch.arange(len(weight))), weight)


@pytest.mark.parametrize(("n", "k"), [(1, 1), (31, 33), (200, 1100), (576, 576), (97, 1536), (1000, 70)])
def test_outputs_are_those_of_the_weight_as_it_is(tiles: CpuOps, n: int, k: int) -> None:
    """Rows of any patterns behind the weight keep all of it from being coded."""
    weight = torch.randn(n, k).bfloat16()
    assert not is_coded(tiles.pack_linear(weight, dtype=torch.float32))
    some = torch.randperm(n * k)[: n * k // 2048 + 1]
    rare = torch.tensor([0.0, -0.0, 1e-40, -1e-30, 2.0**-60, 3e20, -7e9]).bfloat16()
    weight.view(-1)[some] = rare[torch.arange(len(some)) % len(rare)]
    bias = torch.randn(n) if n % 2 else None
    coded = tiles.pack_linear(weight, bias)
    assert is_coded(coded)
    others = torch.randint(0, 0x7F80, (STEP, k)).to(torch.int16).view(torch.bfloat16)
    more_bias = None if bias is None else torch.cat([bias, torch.zeros(STEP)])
    plain = tiles.pack_linear(torch.cat([weight, others]), more_bias)
    assert not is_coded(plain)
    x = torch.randn(max(ROWS), k + 3).bfloat16()[:, 1 : k + 1]
    for m in ROWS:
        assert equal_bits(coded(x[:m]), plain(x[:m])[:, :n].contiguous()), m
    for m in (1, 15, 40):
        assert torch.equal(coded(x[:m].float()), plain(x[:m].float())[:, :n]), m


def test_the_argmax_are_those_of_the_outputs(tiles: CpuOps) -> None:
    linear = tiles.pack_linear(torch.randn(5000, 576).bfloat16())
    assert is_coded(linear)
    x = torch.randn(300, 576).bfloat16()
    for m in (1, 17, 40, 64, 128, 300):
        assert linear.argmax(x[:m]).tolist() == linear(x[:m]).float().argmax(1).tolist()
