"""Products of few rows with dense weights in Triton: against float64 in the interpreter (or on a GPU), the same bits
beside any rows, nothing read beyond x and the weight, and code that fits every GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from gpu_compiler import compiled_by
from interpreter import CAPABILITY, DEVICE, multiply_rows_alike

pytest.importorskip("triton")

from pagemill.ops import triton_linear
from pagemill.ops.torch_ops import TorchLinear
from pagemill.ops.triton_linear import FORMS, Form, Limit, TritonLinear, forms_of, most_rows, multiply, pack, parts_of
from pagemill.ops.triton_ops import TritonOps

pytestmark = pytest.mark.gpu

ROUNDING = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
SMALL = (Form(1, 4, 64, 1, 1, 16), Form(16, 16, 32, 1, 2, 16), Form(32, 16, 32, 1, 2, 16, tiles=True))
"""Forms of small tiles: sizes of a test then have several, and parts."""
ROWS = (1, 2, 16, 17, 32)


def draw(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(DEVICE)


def poisoned(matrix: torch.Tensor, beside: int = 0) -> torch.Tensor:
    """A copy with NaN behind its last row, and behind each row where `beside` columns are added."""
    rows, columns = matrix.shape
    whole = torch.full((rows + 3, columns + beside), float("nan"), dtype=matrix.dtype, device=DEVICE)
    whole[:rows, :columns] = matrix
    return whole[:rows, :columns]


def form_for(rows: int, forms: tuple[Form, ...] = SMALL) -> Form:
    return next(form for form in forms if rows <= form.rows)


def check(found: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
    """Compares with float64 within what additions in float32 lose, one after the other, and one rounding."""
    exact, size = x.double() @ weight.double().T, x.double().abs() @ weight.double().abs().T
    if bias is not None:
        exact, size = exact + bias.double(), size + bias.double().abs()
    assert (found.shape, found.dtype) == (exact.shape, x.dtype)
    bound = x.shape[1] * 2.0**-24 * size + ROUNDING[x.dtype] * exact.abs() + 1e-7
    assert ((found.double() - exact).abs() <= bound).all()


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(("outputs", "inputs"), [(40, 256), (17, 100), (100, 712), (1, 8)])
def test_products(outputs: int, inputs: int, rows: int, dtype: torch.dtype) -> None:
    x, weight = draw(rows, inputs, dtype=dtype), draw(outputs, inputs, dtype=dtype, seed=1)
    bias = draw(outputs, dtype=dtype, seed=2) if rows % 2 else None
    found = multiply(poisoned(x, 16), poisoned(weight), bias, form_for(rows))
    check(found, x, weight, bias)


@pytest.mark.parametrize(("major", "rows"), [(major, form.rows) for major in FORMS for form in FORMS[major]])
def test_products_in_the_forms_of_gpus(major: int, rows: int) -> None:
    if DEVICE == "cuda" and major > CAPABILITY[0]:
        pytest.skip(f"needs compute capability {major}.0")
    x, weight = draw(rows, 1100, dtype=torch.bfloat16), draw(200, 1100, dtype=torch.bfloat16, seed=1)
    check(multiply(x, weight, None, form_for(rows, FORMS[major])), x, weight, None)


@pytest.mark.parametrize(("few", "many"), [(2, 16), (17, 32)])
def test_a_row_keeps_its_bits_beside_others(few: int, many: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The exact results are 0: what is found is what additions have lost, and tells their order."""
    multiply_rows_alike(monkeypatch)
    half, x = draw(40, 256, dtype=torch.bfloat16), draw(many, 256, dtype=torch.bfloat16, seed=1)
    weight, x = torch.cat([half, -half.flip(1)], 1), torch.cat([x, x.flip(1)], 1)
    assert parts_of(form_for(many), 40, 512) > 1
    whole = multiply(x, weight, None, form_for(many))
    assert whole.count_nonzero() > whole.numel() // 2
    assert torch.equal(multiply(x[-few:], weight, None, form_for(few)), whole[-few:])
    assert torch.equal(multiply(x.flip(0), weight, None, form_for(many)).flip(0), whole)


def test_columns_are_cut_into_parts_by_the_layer_alone() -> None:
    form = Form(16, 64, 128, 4, 4, 512)
    assert parts_of(form, 4096, 4096) == 8
    assert parts_of(form, 128256, 4096) == 1
    assert parts_of(form, 64, 14336) == 56, "no part has less than two tiles"
    assert parts_of(form, 64, 100) == 1


def test_tables_are_in_order() -> None:
    for forms in FORMS.values():
        assert [form.rows for form in forms] == sorted(form.rows for form in forms)
        assert forms[0].rows == 1
    for limits in triton_linear.LIMITS.values():
        assert [limit.outputs for limit in limits] == sorted(limit.outputs for limit in limits)
    assert forms_of((7, 5)) == ()
    assert forms_of((8, 9)) == FORMS[8]
    assert forms_of((10, 0)) == FORMS[9]
    assert forms_of((12, 0)) == FORMS[8]


def test_up_to_its_limit_a_layer_takes_rows_to_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    real = triton_linear.multiply
    monkeypatch.setattr(triton_linear, "multiply", lambda x, *more: calls.append(len(x)) or real(x, *more))
    monkeypatch.setattr(triton_linear, "FORMS", {8: SMALL})
    monkeypatch.setattr(triton_linear, "LIMITS", {8: (Limit(64, 20), Limit(128, 1000))})
    ops = TritonOps((8, 6))
    weight, bias = draw(50, 64, dtype=torch.bfloat16), draw(50, dtype=torch.float32)
    linear = ops.pack_linear(weight, bias)
    assert isinstance(linear, TritonLinear)
    for rows in (0, 1, 20, 21):
        x = draw(rows, 64, dtype=torch.bfloat16, seed=3)
        torch.testing.assert_close(linear(x), TorchLinear(weight, bias)(x), atol=0.05, rtol=0.02)
    linear(draw(2, 64, dtype=torch.float32))
    linear(draw(64, 2, dtype=torch.bfloat16).T)
    assert calls == [1, 20], "of other dtypes or strides, torch takes them"
    for wrong in (draw(2, 48, dtype=torch.bfloat16), draw(2, 96, dtype=torch.bfloat16)):
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            linear(wrong)
    assert torch.equal(linear.rows(torch.tensor([3, 0], device=DEVICE)), weight[[3, 0]])
    assert most_rows((8, 6), 65) == 1000
    assert pack(draw(100, 64, dtype=torch.bfloat16), None, (8, 6)).few == 32, "no form takes more"
    others = draw(129, 64, dtype=torch.bfloat16), weight.float(), draw(64, 50, dtype=torch.bfloat16).T
    assert all(type(ops.pack_linear(other)) is TorchLinear for other in others)
    assert type(TritonOps((7, 5)).pack_linear(weight)) is TorchLinear


def test_kernels_compile_for_every_gpu_and_fit() -> None:
    compiled = compiled_by(Path(__file__).with_name("compile_linear_for_gpus.py"))
    names = ["multiply_one" if form.rows == 1 else "multiply_few" for major in (8, 9) for form in FORMS[major]]
    assert [kernel for _, kernel, *_ in compiled if kernel != "add_parts"] == names
