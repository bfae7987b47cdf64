"""The operators in Triton: against float64 in the interpreter (or on a GPU), the bits of the same work in several
operators, strided views, and that nothing else is read or written."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from gpu_compiler import compiled_by
from interpreter import CAPABILITY, DEVICE

pytest.importorskip("triton")

from pagemill.ops.torch_ops import TorchOps
from pagemill.ops.triton_ops import WIDEST, TritonOps

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
EPS = {torch.float32: 3e-7, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
"""Of a rounded result, relative to it; in float32 several roundings."""
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore::RuntimeWarning")]  # NumPy's, of exp(1000)
ops = TritonOps(CAPABILITY)


def draw(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    random = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=random) * scale).to(dtype).to(DEVICE)


def inside(x: torch.Tensor, *more: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A copy of x as a view into larger memory, which is NaN elsewhere; and all of that memory."""
    sizes = [size + extra for size, extra in zip(x.shape, more, strict=True)]
    whole = torch.full(sizes, float("nan"), dtype=x.dtype, device=x.device)
    view = whole[tuple(slice(size) for size in x.shape)]
    view.copy_(x)
    return view, whole


def close(got: torch.Tensor, expected: torch.Tensor, least: float = 1e-6) -> None:
    assert not expected.isnan().any()
    torch.testing.assert_close(got.double(), expected, rtol=EPS[got.dtype], atol=least)


def normed(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    wide = x.double()
    return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.double()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(3, 1), (5, 72), (2, 4096), (0, 64)])
def test_rms_norm(shape: tuple[int, int], dtype: torch.dtype) -> None:
    x, weight = draw(*shape, dtype=dtype, scale=3.0), draw(shape[1], seed=1)
    close(ops.rms_norm(inside(x, 0, 5)[0], weight, 1e-3), normed(x, weight, 1e-3))


def test_rms_norm_of_heads_in_a_joined_projection() -> None:
    heads, weight = draw(7, 11, 80), draw(80, seed=1)
    close(ops.rms_norm(heads[:, 2:9], weight, 1e-6), normed(heads[:, 2:9], weight, 1e-6))
    apart = heads.transpose(1, 2)
    close(ops.rms_norm(apart, draw(11), 1e-6), normed(apart, draw(11), 1e-6))


def test_rows_wider_than_registers_are_refused() -> None:
    with pytest.raises(ValueError, match=f"rows of {WIDEST + 1} elements"):
        ops.rms_norm(torch.zeros(1, WIDEST + 1), torch.zeros(WIDEST + 1), 1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("post", [False, True])
@pytest.mark.parametrize("size", [72, 1024])
def test_added_and_normed_at_once(dtype: torch.dtype, post: bool, size: int) -> None:
    x, added = (draw(9, size, dtype=dtype, seed=seed, scale=2.0) for seed in (0, 1))
    weight, post_weight = draw(size, seed=2), draw(size, seed=3)
    more = ops.rms_norm(added, post_weight, 1e-6) if post else added
    total = x + more
    y = ops.add_rms_norm(x, added, weight, 1e-6, post_weight if post else None)
    assert torch.equal(x, total), "the sum is rounded as torch rounds it, and lies in x"
    assert torch.equal(y, ops.rms_norm(total, weight, 1e-6))
    close(y, normed(total, weight, 1e-6))
    assert torch.equal(ops.add_rms_norm(x[:0], added[:0], weight, 1e-6), y[:0])


def test_what_is_added_must_fit() -> None:
    x, weight = draw(4, 64), draw(64)
    for added in (draw(3, 64), draw(4, 64, dtype=torch.float16), draw(4, 128)[:, :64]):
        with pytest.raises(ValueError, match="added must be contiguous"):
            ops.add_rms_norm(x, added, weight, 1e-6)
    with pytest.raises(ValueError, match=r"weight must be contiguous torch\.float32"):
        ops.add_rms_norm(x, x.clone(), weight.half(), 1e-6)


def angles(tokens: int, half: int) -> tuple[torch.Tensor, torch.Tensor]:
    angle = draw(tokens, half, seed=5, scale=10.0)
    return angle.cos(), angle.sin()


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    half, wide = cos.shape[1], x.double()
    a, b = wide[..., :half], wide[..., half : 2 * half]
    c, s = cos.double().unsqueeze(1), sin.double().unsqueeze(1)
    return torch.cat([a * c - b * s, b * c + a * s, wide[..., 2 * half :]], -1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "head_dim", "half"), [(5, 64, 32), (1, 80, 40), (9, 96, 20), (3, 256, 128)])
def test_rotate(dtype: torch.dtype, heads: int, head_dim: int, half: int) -> None:
    x, (cos, sin) = draw(6, heads, head_dim, dtype=dtype), angles(6, half)
    (mine, whole), (torchs, _) = inside(x, 0, 2, 16), inside(x, 0, 2, 16)
    ops.rotate(mine, cos, sin)
    close(mine, rotated(x, cos, sin), least=2 * EPS[dtype])
    TorchOps().rotate(torchs, cos, sin)
    assert torch.equal(mine, torchs)
    assert torch.isnan(whole[:, heads:]).all()
    assert torch.isnan(whole[..., head_dim:]).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("head_dim", "half"), [(128, 64), (80, 40), (96, 20)])
def test_heads_are_normed_and_rotated_at_once(dtype: torch.dtype, head_dim: int, half: int) -> None:
    x, (cos, sin) = draw(4, 19, head_dim, dtype=dtype, scale=3.0), angles(4, half)
    q_norm, k_norm = draw(head_dim, seed=1), draw(head_dim, seed=2)
    joined, whole = inside(x, 0, 7, 0)
    ops.norm_and_rotate(joined, 14, q_norm, k_norm, 1e-5, cos, sin)
    weights = torch.stack([q_norm] * 14 + [k_norm] * 5)
    between = normed(x, weights, 1e-5).to(dtype)
    expected = rotated(between, cos, sin)
    largest = float(between.abs().max())
    torch.testing.assert_close(joined.double(), expected, rtol=0, atol=2.5 * EPS[dtype] * largest)
    assert torch.isnan(whole[:, 19:]).all()


def test_angles_and_heads_must_fit() -> None:
    cos, sin = angles(4, 40)
    with pytest.raises(ValueError, match="must hold the 80 that rotate"):
        ops.rotate(draw(4, 2, 64), cos, sin)
    with pytest.raises(ValueError, match=r"cos must be contiguous torch.float32 \(3, 40\)"):
        ops.rotate(draw(3, 2, 80), cos, sin)
    with pytest.raises(ValueError, match=r"k_norm must be contiguous torch.float32 \(80,\)"):
        ops.norm_and_rotate(draw(4, 2, 80), 1, draw(80), draw(40), 1e-6, cos, sin)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("size", [75, 1300])
def test_gated(dtype: torch.dtype, activation: str, size: int) -> None:
    x = draw(3, 2 * size, dtype=dtype, scale=6.0)
    x[0, :4] = torch.tensor([-1e3, 1e3, -100.0, 100.0])
    wide, up = x.double().chunk(2, -1)
    active = wide * torch.sigmoid(wide)
    if activation == "gelu_tanh":
        active = wide / 2 * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (wide + 0.044715 * wide**3)))
    got = ops.gated(inside(x, 0, 3)[0], activation)
    least = 2e-6 if dtype == torch.float32 else 1e-5
    torch.testing.assert_close(got.double(), active * up, rtol=4 * EPS[dtype], atol=least)
    with pytest.raises(ValueError, match="2 n"):
        ops.gated(x[:, 1:], activation)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_spoils_its_own_row_only(bad: float) -> None:
    x, weight = draw(3, 64), draw(64)
    spoilt = x.clone()
    spoilt[1, 5] = bad
    for run in (lambda x: ops.rms_norm(x, weight, 1e-6), lambda x: ops.gated(x, "silu")):
        got, sound = run(spoilt.clone()), run(x.clone())
        assert got[1].isnan().any() or got[1].isinf().any()
        assert torch.equal(got[::2], sound[::2])


def test_names_tell_kernels_apart() -> None:
    assert ops.name.startswith(TorchOps.name)
    assert ops.name != TorchOps.name


def test_kernels_compile_for_every_gpu_and_fit() -> None:
    compiled = compiled_by(Path(__file__).with_name("compile_for_gpus.py"))
    dense = ["normalize", "normalize", "turn_heads", "gate"]
    mixture = ["route", "arrange", "multiply_experts", "multiply_experts", "combine"]
    normed = ["normalize", "normalize", "normalize", "turn_heads", "gate"]
    runs = {"75": dense, "90": [*mixture, "shrink", "expand"], "100": normed}
    expected = [[capability, kernel] for capability, kernels in runs.items() for kernel in kernels]
    assert [line[:2] for line in compiled] == expected
