"""The CPU kernels against fp64, on every instruction set of this CPU; and equal bits whatever runs beside a row."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from pagemill import _kernels
from pagemill.ops.cpu_ops import CpuOps
from pagemill.ops.torch_ops import TorchOps

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
EPS = {torch.float32: 2**-23, torch.bfloat16: 2**-8, torch.float16: 2**-11}


def apply(kernel: object, x: torch.Tensor) -> torch.Tensor:
    y = torch.empty_like(x)
    kernel(x.data_ptr(), y.data_ptr(), x.numel())
    return y


def ulps(y: torch.Tensor, exact: torch.Tensor) -> float:
    spacing = 2.0 ** (torch.frexp(exact.abs().clamp_min(2**-126)).exponent - 24).double()
    return float(((y.double() - exact).abs() / spacing).max())


def test_exp_is_within_two_ulps(ops: CpuOps) -> None:
    x = torch.cat([torch.linspace(-86.5, 88.7, 200_001), torch.randn(10_000) * 1e-3])
    assert ulps(apply(_kernels.exp, x), x.double().exp()) <= 2
    edges = torch.tensor([float("-inf"), -200.0, 0.0, 89.0, float("inf"), float("nan")])
    assert apply(_kernels.exp, edges)[:5].tolist() == [0.0, 0.0, 1.0, float("inf"), float("inf")]
    assert apply(_kernels.exp, edges)[5].isnan()


def test_tanh_is_within_three_ulps(ops: CpuOps) -> None:
    x = torch.cat([torch.linspace(-12, 12, 200_001), torch.randn(10_000) * 1e-3])
    assert ulps(apply(_kernels.tanh, x), x.double().tanh()) <= 3
    edges = torch.tensor([float("-inf"), -0.0, float("inf"), float("nan")])
    assert apply(_kernels.tanh, edges)[:3].tolist() == [-1.0, 0.0, 1.0]
    assert apply(_kernels.tanh, edges)[3].isnan()


@pytest.mark.parametrize("weight_dtype", DTYPES)
@pytest.mark.parametrize(("n", "k"), [(1, 1), (33, 65), (100, 70), (129, 600), (576, 1500), (61, 1025)])
def test_linear_equals_fp64(ops: CpuOps, n: int, k: int, weight_dtype: torch.dtype) -> None:
    for m in (1, 2, 3, 6, 7, 14, 15, 29, 64, 300):
        weight = torch.randn(n, k).to(weight_dtype)
        bias = torch.randn(n) if m % 2 else None
        linear = ops.pack_linear(weight, bias)
        for dtype in DTYPES if m in (1, 15) else {torch.float32, weight_dtype}:
            x = torch.randn(m, k + 3).to(dtype)[:, 1 : k + 1]  # strided rows
            exact = x.double() @ weight.double().T + (0 if bias is None else bias.double())
            bound = EPS[torch.float32] * k * (x.double().abs() @ weight.double().abs().T + 1) + EPS[dtype] * exact.abs()
            y = linear(x)
            assert y.dtype == dtype
            assert ((y.double() - exact).abs() <= bound).all()


@pytest.mark.parametrize("k", [1100, 1536, 1055])
@pytest.mark.parametrize(("weight_dtype", "dtype"), [(d, torch.float32) for d in DTYPES] + [(torch.bfloat16,) * 2])
def test_a_rows_linear_depends_on_no_other_row_nor_thread(
    ops: CpuOps, weight_dtype: torch.dtype, dtype: torch.dtype, k: int
) -> None:
    n = 200  # panels that do not come in pairs; k: more than one piece, whole and broken steps
    linear = ops.pack_linear(torch.randn(n, k).to(weight_dtype), torch.randn(n))
    x = torch.randn(300, k).to(dtype)
    _kernels.set_num_threads(1)
    whole = linear(x)
    _kernels.set_num_threads(2)
    assert torch.equal(linear(x), whole)
    for count in (1, 2, 3, 5, 6, 7, 8, 13, 14, 15, 16, 17, 28, 31, 32, 33, 64, 253, 257, 299):
        begin = int(torch.randint(0, 300 - count + 1, ()))
        assert torch.equal(linear(x[begin : begin + count]), whole[begin : begin + count]), count


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("n", "k"), [(1, 1), (33, 7), (200, 64), (161, 577), (16, 1153), (1100, 70)])
def test_float32_rows_meet_a_narrow_weight_as_the_same_weight_in_float32(ops: CpuOps, n, k, dtype) -> None:
    weight = torch.randn(n, k).to(dtype)
    weight[::3, ::2] *= torch.finfo(dtype).tiny / 4  # subnormal ones too
    bias = torch.randn(n) if k % 2 else None
    narrow, wide = ops.pack_linear(weight, bias), ops.pack_linear(weight.float(), bias)
    around = torch.full((600, k + 7), float("nan"))
    x = around[:, 3 : k + 3]
    x.copy_(torch.randn(600, k))
    for m in (*range(1, 10), 13, 14, 15, 16, 17, 28, 30, 42, 43, 64, 253, 600):
        rows = x[600 - m :]
        assert torch.equal(narrow(rows), wide(rows)), m
        assert (narrow.argmax(rows) == wide.argmax(rows)).all(), m


def test_linear_takes_no_rows_and_refuses_wrong_shapes(ops: CpuOps) -> None:
    linear = ops.pack_linear(torch.randn(8, 4))
    assert linear(torch.randn(0, 4)).shape == (0, 8)
    with pytest.raises(ValueError, match="4"):
        linear(torch.randn(2, 5))
    with pytest.raises(TypeError, match="float64"):
        ops.pack_linear(torch.randn(8, 4, dtype=torch.float64))


def test_linear_does_not_keep_the_weight(ops: CpuOps) -> None:
    weight = torch.randn(64, 32)
    linear = ops.pack_linear(weight)
    x = torch.randn(3, 32)
    before = linear(x)
    weight.fill_(0)
    assert torch.equal(linear(x), before)
    assert 64 * 32 * 4 <= linear.nbytes <= 64 * 32 * 4 + 4096


def test_packed_weights_that_share_memory_come_and_go_apart() -> None:
    x = torch.randn(2, 300)
    ops, held = CpuOps(), {}
    for turn in range(60):  # some larger than a chunk, most not
        n = 40_000 if turn % 20 == 7 else int(torch.randint(1, 9000, ()))
        linear = ops.pack_linear(torch.randn(n, 300))
        held[turn] = linear, linear(x)
        if turn % 3 == 2:
            del held[list(held)[int(torch.randint(0, len(held), ()))]]
        for other, y in held.values():
            assert torch.equal(other(x), y)


def test_memory_of_packed_weights_comes_back() -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    weight = torch.randn(1000, 1000)
    linears = [CpuOps().pack_linear(weight) for _ in range(100)]
    before = resident()
    del linears
    assert resident() < before - 300 * 2**20


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("k", [30, 64])
def test_a_nan_in_one_row_stays_there(ops: CpuOps, dtype: torch.dtype, k: int) -> None:
    linear = ops.pack_linear(torch.randn(40, k).to(dtype))
    x = torch.randn(20, k).to(dtype)
    clean = linear(x)
    for row in (0, 7, 10, 19):
        poisoned = x.clone()
        poisoned[row, 3] = float("nan")
        y = linear(poisoned)
        assert y[row].isnan().all()
        keep = torch.arange(20) != row
        assert torch.equal(y[keep], clean[keep])


@pytest.mark.parametrize("k", [33, 64, 70])
def test_what_lies_around_the_rows_is_not_used(ops: CpuOps, k: int) -> None:
    """Strided bf16 rows among NaN, and scratch that earlier calls left full of it."""
    weight = torch.randn(50, k).bfloat16()
    linear = ops.pack_linear(weight)
    for m in (1, 3, 17, 40):
        around = torch.full((m, k + 40), float("nan"), dtype=torch.bfloat16)
        ops.pack_linear(torch.randn(8, k).bfloat16())(around[:, :k])
        x = around[:, 8 : 8 + k]
        x.copy_(torch.randn(m, k))
        y = linear(x)
        assert torch.equal(y, linear(x.contiguous()))
        close(y, x.double() @ weight.double().T, torch.bfloat16, atol=1e-4)


@pytest.mark.parametrize("dtype", DTYPES)
def test_widening_keeps_numbers_or_caps_them(ops: CpuOps, dtype: torch.dtype) -> None:
    for rows, size in ((1, 5), (3, 16384), (2, 49157)):
        x = (torch.randn(rows, size) * 9).to(dtype)
        capped = ops.widen(x.clone(), 7.0, torch.full((rows, size), torch.nan))
        close(capped, 7 * (x.double() / 7).tanh(), torch.float32)
        out = torch.full((rows, size), torch.nan)
        assert torch.equal(ops.widen(x, out=out), x.float())
        assert dtype == torch.float32 or torch.equal(out, x.float())
        assert torch.equal(ops.widen(x), x.float())
    with pytest.raises(ValueError, match="out must be contiguous"):
        ops.widen(torch.zeros(2, 4, dtype=torch.bfloat16), out=torch.empty(2, 5))


@pytest.mark.parametrize("dtype", DTYPES)
def test_elementwise_operators_equal_torch_in_fp64(ops: CpuOps, dtype: torch.dtype) -> None:
    for rows, size in ((1, 8), (3, 576), (65, 100), (300, 64)):
        x = torch.randn(rows, size).to(dtype)
        weight = torch.randn(size)
        wide = x.double()
        normed = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
        close(ops.rms_norm(x, weight, 1e-5), normed, dtype)
        gate, up = wide.chunk(2, -1)
        close(ops.gated(x, "silu"), torch.nn.functional.silu(gate) * up, dtype)
        close(ops.gated(x, "gelu_tanh"), torch.nn.functional.gelu(gate, approximate="tanh") * up, dtype)


def close(y: torch.Tensor, exact: torch.Tensor, dtype: torch.dtype, atol: float = 2e-6) -> None:
    assert y.dtype == dtype
    assert y.shape == exact.shape
    torch.testing.assert_close(y.double(), exact, rtol=2 * EPS[dtype] + 2e-6, atol=atol)


def test_rms_norm_keeps_the_shape_of_what_is_not_contiguous(ops: CpuOps) -> None:
    x = torch.randn(64, 5, 3).permute(2, 1, 0)
    assert torch.equal(ops.rms_norm(x, torch.ones(64), 1e-6), ops.rms_norm(x.contiguous(), torch.ones(64), 1e-6))


def test_rms_norm_of_heads_in_a_strided_view(ops: CpuOps) -> None:
    fused = torch.randn(5, 10, 64)
    weight = torch.randn(64)
    heads = fused[:, 2:7]
    assert torch.equal(ops.rms_norm(heads, weight, 1e-6), ops.rms_norm(heads.contiguous(), weight, 1e-6))
    close(ops.rms_norm(heads, weight, 1e-6), TorchOps().rms_norm(heads, weight, 1e-6).double(), torch.float32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("size", "rotary"), [(64, 64), (80, 32), (96, 96), (64, 20)])
def test_rotate_turns_strided_views_in_place(ops: CpuOps, size: int, rotary: int, dtype: torch.dtype) -> None:
    fused = torch.randn(40, 7, size).to(dtype)
    angle = torch.rand(40, rotary // 2) * 6
    expected = fused.clone()
    TorchOps().rotate(expected[:, 1:5], angle.cos(), angle.sin())
    ops.rotate(fused[:, 1:5], angle.cos(), angle.sin())
    torch.testing.assert_close(fused, expected, rtol=EPS[dtype], atol=1e-6 if dtype == torch.float32 else 1e-2)
    assert torch.equal(fused[:, [0, 5, 6]], expected[:, [0, 5, 6]])
    assert torch.equal(fused[..., rotary:], expected[..., rotary:])


def test_elementwise_rows_depend_on_no_other_row_nor_thread(ops: CpuOps) -> None:
    x, weight = torch.randn(300, 1152), torch.randn(1152)
    whole = ops.rms_norm(x, weight, 1e-5), ops.gated(x, "silu"), ops.gated(x, "gelu_tanh")
    _kernels.set_num_threads(1)
    one = x[17:18]
    parts = ops.rms_norm(one, weight, 1e-5), ops.gated(one, "silu"), ops.gated(one, "gelu_tanh")
    for part, all_rows in zip(parts, whole, strict=True):
        assert torch.equal(part, all_rows[17:18])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_converts_as_torch_does(ops: CpuOps, dtype: torch.dtype) -> None:
    """Every finite value widens exactly; values between two neighbours, subnormals included, round to nearest even."""
    values = torch.arange(-32768, 32768, dtype=torch.int32).to(torch.int16).view(dtype)
    values = values[values.isfinite()]
    one = torch.ones(1, 1, dtype=dtype)
    assert torch.equal(ops.pack_linear(values.unsqueeze(1))(one.float())[0], values.float())
    # x = value in a weight of one: what comes out is x + 0 rounded; a bias of half a step moves it between neighbours
    for share in (0.25, 0.5, 0.75):
        following = values.view(torch.int16).add(1).view(dtype)
        between = values.float() + share * (following.float() - values.float())
        between = between[between.isfinite()]
        linear = ops.pack_linear(torch.zeros(len(between), 1, dtype=dtype), between)
        assert torch.equal(linear(one)[0], between.to(dtype))


def test_threads_and_instruction_sets_are_checked() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        _kernels.set_num_threads(0)
    with pytest.raises(ValueError, match="mmx"):
        _kernels.use_isa("mmx")


@pytest.mark.parametrize("isa", [_kernels.available_isas()[0], "generic"])
def test_the_environment_forces_an_instruction_set(isa: str) -> None:
    code = "from pagemill.executor.backend import cpu_backend; print(cpu_backend().ops.name)"
    run = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "PAGEMILL_ISA": isa}, capture_output=True, text=True
    )
    assert run.stdout.startswith(f"cpu-{isa}-"), run.stderr


def test_the_name_tells_the_instruction_set(ops: CpuOps) -> None:
    assert _kernels.isa() in ops.name
