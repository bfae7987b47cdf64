"""Linear layers on integers: against fp64 on the integers' own values; equal bits whatever runs beside a row."""

from __future__ import annotations

import pytest
import torch

from kernel_settings import kernels_of
from pagemill import _kernels
from pagemill.ops.cpu_ops import CpuOps
from pagemill.ops.quantized import QuantizedWeight, keep_integers, quantize_int8
from pagemill.ops.torch_ops import TorchOps

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
FUSED = [isa for isa in _kernels.available_isas() if isa != "generic"]


BITS = (4, 5, 6, 8)


def kept(n: int, k: int, bits: int) -> tuple[QuantizedWeight, torch.Tensor]:
    """A weight as a file would hold it, scales of both signs, and what it stands for."""
    middle, block = 1 << bits - 1, 16 if bits == 6 else 32
    values = torch.randint(0, 1 << bits, (n, k), dtype=torch.uint8)
    scale = torch.randn(n, k // block).half().float() / (6 * middle)
    low = -middle * scale
    if bits < 6:
        low = (low + torch.randn(n, k // 32) / 100).half().float()
    scale[0] = 0
    low[0] *= bits < 6
    value = 32 if bits == 6 else 3
    values[-1, :block] = value  # a block of one value, whose scale says nothing about its size
    scale[-1, 0], low[-1, 0] = 8.0, -8.0 * value
    wide = values.double().view(n, -1, block) * scale.unsqueeze(-1) + low.unsqueeze(-1)
    return keep_integers(values, scale, low, bits), wide.view(n, k)


def rows_of(m: int, k: int) -> torch.Tensor:
    """Rows as models have them: a few channels are far larger than the others, in some rows."""
    x = torch.randn(m, k)
    x[::2, torch.randperm(k)[: (k + 99) // 100]] *= 300
    return x


def step_of_x(x: torch.Tensor) -> torch.Tensor:
    """What each element is rounded to a multiple of."""
    groups = torch.nn.functional.pad(x.double(), (0, -x.shape[1] % 192)).view(len(x), -1, 192).abs()
    largest, mean = groups.amax(-1), groups.mean(-1)
    steps = torch.maximum(largest / 32512, torch.minimum(largest, 4 * mean) / 127)
    return steps.repeat_interleave(192, dim=1)[:, : x.shape[1]]


def weight_of(bits: int, n: int, k: int) -> QuantizedWeight:
    return kept(n, k, bits)[0] if bits < 8 else quantize_int8(torch.randn(n, k))


@pytest.mark.parametrize("bits", BITS[:3])
@pytest.mark.parametrize("k", [32, 64, 160, 576])
def test_kept_values_are_within_half_a_step(k, bits):
    weight, exact = kept(20, k, bits)
    steps = weight.scales.double().repeat_interleave(192, dim=1)[:, :k]
    assert ((weight.dense(torch.float32) - exact).abs() <= 0.57 * steps + 1e-12).all()


@pytest.mark.parametrize("k", [1, 63, 200, 576])
def test_8_bit_values_are_within_half_a_step(k):
    exact = torch.randn(20, k) * torch.logspace(-6, 3, 20).unsqueeze(1)
    exact[3] = 0
    weight = quantize_int8(exact)
    steps = weight.scales.float().repeat_interleave(192, dim=1)[:, :k]
    assert ((weight.dense(torch.float32) - exact).abs() <= 0.501 * steps).all()
    assert weight.values.abs().max() <= 127


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize(("n", "k"), [(1, 32), (33, 64), (100, 96), (129, 608), (50, 1536)])
def test_linear_equals_fp64(ops, n, k, bits):
    weight = weight_of(bits, n, k)
    wide = weight.dense(torch.float32).double()
    for m in (1, 2, 3, 5, 16, 17, 40):
        bias = torch.randn(n) if m % 2 else None
        linear = ops.pack_quantized(weight, bias, torch.float32)
        for dtype in DTYPES if m in (1, 17) else (torch.float32,):
            x = rows_of(m, k + 3).to(dtype)[:, 1 : k + 1]  # strided rows
            exact = x.double() @ wide.T + (0 if bias is None else bias.double())
            y = linear(x)
            assert y.dtype == dtype
            bound = 0.5 * step_of_x(x) @ wide.abs().T + 1e-6 * (x.double().abs() @ wide.abs().T) + 1e-5
            bound = bound + {torch.float32: 0, torch.bfloat16: 2**-8, torch.float16: 2**-11}[dtype] * exact.abs()
            assert ((y.double() - exact).abs() <= bound).all()
            reference = TorchOps().pack_quantized(weight, bias, torch.float32)(x.float())
            assert ((reference.double() - exact).abs() <= bound).all()


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize(("n", "k"), [(200, 576), (40, 1120)])
def test_a_rows_linear_depends_on_no_other_row_nor_thread(ops, n, k, bits):
    linear = ops.pack_quantized(weight_of(bits, n, k), torch.randn(n), torch.float32)
    x = rows_of(530, k)
    _kernels.set_num_threads(1)
    whole = linear(x)
    _kernels.set_num_threads(2)
    assert torch.equal(linear(x), whole)
    for count in (1, 2, 3, 5, 8, 15, 16, 17, 31, 33, 64, 257, 513):
        begin = int(torch.randint(0, 530 - count + 1, ()))
        assert torch.equal(linear(x[begin : begin + count]), whole[begin : begin + count]), count


@pytest.mark.parametrize("bits", BITS)
def test_instruction_sets_that_fuse_agree_to_the_last_bit(bits):
    weight, x, bias = weight_of(bits, 70, 800), rows_of(21, 800), torch.randn(70)
    results = []
    for isa in FUSED:
        with kernels_of(isa, 2):
            results.append(CpuOps().pack_quantized(weight, bias, torch.float32)(x))
    assert all(torch.equal(result, results[0]) for result in results)


@pytest.mark.parametrize("bits", BITS)
def test_what_is_not_finite_stays_in_its_row(ops, bits):
    linear = ops.pack_quantized(weight_of(bits, 40, 224), None, torch.float32)
    x = torch.randn(20, 224)
    x[4] = 0
    clean = linear(x)
    assert (clean[4] == 0).all()
    for row, poison in ((0, float("nan")), (7, float("inf")), (19, float("-inf"))):
        poisoned = x.clone()
        poisoned[row, 3] = poison
        y = linear(poisoned)
        assert y[row].isnan().all()
        keep = torch.arange(20) != row
        assert torch.equal(y[keep], clean[keep])


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_are_what_the_integers_stand_for(ops, bits, dtype):
    weight = weight_of(bits, 50, 224)
    ids = torch.tensor([0, 49, 17, 49])
    expected = weight.dense(torch.float32)[ids].to(dtype)
    assert torch.equal(ops.pack_quantized(weight, None, dtype).rows(ids), expected)
    assert torch.equal(TorchOps().pack_quantized(weight, None, dtype).rows(ids), expected)


@pytest.mark.parametrize(("bits", "held"), [(4, 5.1), (5, 6.1), (6, 7.1), (8, 8.1)])
def test_memory_is_that_of_the_integers(ops, bits, held):
    packed = ops.pack_quantized(weight_of(bits, 576, 1536), None, torch.float32)
    assert packed.nbytes <= 576 * 1536 * held / 8 + 4096


def test_wrong_shapes_are_refused(ops):
    weight = quantize_int8(torch.randn(8, 64))
    with pytest.raises(ValueError, match="scales must be"):
        ops.pack_quantized(QuantizedWeight(weight.values, weight.scales[:4]), None, torch.float32)
    with pytest.raises(ValueError, match="bias must be"):
        ops.pack_quantized(weight, torch.randn(9), torch.float32)
