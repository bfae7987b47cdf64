"""Linear layers on narrow weights in Triton: every weight exact, products against float64 in the interpreter (or on a
GPU), the same bits beside any rows, nothing read beyond x, and code that fits every GPU."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from gpu_compiler import compiled_by
from interpreter import CAPABILITY, DEVICE, multiply_rows_alike

pytest.importorskip("triton")

from pagemill.ops import triton_quantized
from pagemill.ops.packed_weight import PackedWeight, pack_affine, pack_float8, pack_quantized
from pagemill.ops.quantized import AffineWeight, Float8Weight, quantize_int8
from pagemill.ops.triton_quantized import (
    FORMS,
    HOPPER_FORMS,
    SCALAR_FORMS,
    NarrowLinear,
    TritonQuantizedOps,
    form_of,
    forms_of,
    parts_of,
)

pytestmark = pytest.mark.gpu

ROWS = (1, 2, 17, 70)
"""A number of rows for each form."""
ROUNDING = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


@pytest.fixture(autouse=True)
def _there() -> Iterator[None]:
    """Has weights drawn where kernels run."""
    with torch.device(DEVICE):
        yield


def numbers(rows: int, groups: int) -> torch.Tensor:
    return (torch.randn(rows, groups) * 2.0 ** torch.randint(-6, 3, (rows, 1))).half().float()


def k_quant(rows: int, groups: int, low: int, high: int) -> torch.Tensor:
    """Integers times a number in fp16 for each 256 columns, of groups of 32 or, with negative integers, of 16."""
    each = 16 if low < 0 else 8
    coarse = (numbers(rows, groups // each) / 64).half().float().repeat_interleave(each, dim=1)
    fine = torch.randint(low, high, (rows, groups)).float()
    fine[:, ::each] = high - 1
    return fine * coarse


def affine(form: str, rows: int, columns: int) -> AffineWeight:
    """Draws what files of a format hold."""
    groups, bits = columns // 32, {"Q4": 4, "Q5": 5, "Q6": 6, "Q8": 8}.get(form[:2], 4)
    if form == "Q6_K":
        scale = k_quant(rows, columns // 16, -128, 128)
        low = -32 * scale
    elif form in ("Q4_K", "Q5_K"):
        scale, low = k_quant(rows, groups, 0, 64), -k_quant(rows, groups, 0, 64)
    elif form.endswith("_1"):
        scale, low = numbers(rows, groups), numbers(rows, groups)
    elif form.startswith("GPTQ"):
        size = int(form[5:]) // 32
        scale = numbers(rows, groups // size)
        low = -scale * torch.randint(0, 16, scale.shape)
        scale, low = (part.repeat_interleave(size, dim=1) for part in (scale, low))
    else:
        scale = numbers(rows, groups)
        low = -(1 << bits - 1) * scale
    values = torch.randint(0, 1 << bits, (rows, columns), dtype=torch.uint8)
    values[0, 0] = (1 << bits) - 1
    return AffineWeight(values, scale.contiguous(), low.contiguous(), 4 if bits == 4 else 8)


def float8(rows: int, columns: int, group: int) -> Float8Weight:
    """Every finite number of fp8 is among them."""
    codes = torch.arange(rows * columns).view(rows, columns) % 256
    codes = torch.where(codes % 128 == 127, 0, codes).to(torch.uint8)
    scale = torch.rand(rows, -(-columns // group)) + 0.01
    return Float8Weight(codes.view(torch.float8_e4m3fn), scale, group)


AFFINE = {
    "Q4_0": ("int4", 32, 4 + 16 / 32),
    "Q4_1": ("int4", 32, 4 + 32 / 32),
    "Q4_K": ("int4", 32, 4 + 16 / 32 + 32 / 256),
    "Q5_0": ("int6", 32, 6 + 16 / 32),
    "Q5_K": ("int6", 32, 6 + 16 / 32 + 32 / 256),
    "Q6_K": ("int6", 16, 6 + 8 / 16 + 16 / 256),
    "Q8_0": ("int8", 32, 8 + 16 / 32),
    "GPTQ-64": ("int4", 64, 4 + 24 / 64),
    "GPTQ-128": ("int4", 128, 4 + 24 / 128),
}
"""How each format is packed: its kind, the columns of a scale, and bits per weight."""


def layer(packed: PackedWeight, bias: torch.Tensor | None = None) -> NarrowLinear:
    return NarrowLinear(packed, bias, torch.float32, CAPABILITY)


def poisoned(x: torch.Tensor) -> torch.Tensor:
    """A copy of x as rows of larger memory, which is NaN elsewhere."""
    whole = torch.full((len(x) + 1, x.shape[1] + 16), float("nan"), dtype=x.dtype, device=DEVICE)
    whole[: len(x), : x.shape[1]] = x
    return whole[: len(x), : x.shape[1]]


def check(linear: NarrowLinear, parts: torch.Tensor, dense: torch.Tensor, x: torch.Tensor) -> None:
    """Compares with float64 within what additions in float32 lose, one after the other, and one rounding.

    parts: magnitudes [outputs, columns] of what is added.
    """
    x, dense, parts = (each.to(DEVICE) for each in (x, dense, parts))
    bias = 0 if linear.bias is None else linear.bias.double()
    exact, size = x.double() @ dense.double().T + bias, x.double().abs() @ parts.double().T
    found = linear(poisoned(x))
    assert found.dtype == x.dtype
    bound = x.shape[1] * 2.0**-24 * (size + abs(exact)) + ROUNDING[x.dtype] * exact.abs() + 1e-7
    assert ((found.double() - exact).abs() <= bound).all()


@pytest.mark.parametrize("form", AFFINE)
def test_integers_are_packed_without_loss(form: str) -> None:
    weight = affine(form, 67, 512)
    packed = pack_affine(weight)
    kind, group, bits = AFFINE[form]
    assert (packed.kind, packed.group) == (kind, group)
    assert packed.nbytes * 8 == bits * weight.values.numel()
    assert torch.equal(packed.dense(), weight.dense())
    ids = torch.tensor([66, 0, 3, 3])
    assert torch.equal(layer(packed).rows(ids), weight.dense()[ids])


def test_scales_that_no_format_has_are_kept_in_float32() -> None:
    weight = AffineWeight(torch.randint(0, 256, (5, 256), dtype=torch.uint8), *torch.randn(2, 5, 8), 8)
    packed = pack_affine(weight)
    assert packed.scale.fine.dtype == packed.low.fine.dtype == torch.float32
    assert torch.equal(packed.dense(), weight.dense())
    zeros = AffineWeight(torch.zeros(5, 256, dtype=torch.uint8), *torch.zeros(2, 5, 8), 4)
    assert torch.equal(pack_affine(zeros).dense(), torch.zeros(5, 256))


@pytest.mark.parametrize("columns", [100, 576])
def test_other_narrow_weights_are_packed_without_loss(columns: int) -> None:
    rounded = quantize_int8(torch.randn(9, columns))
    assert torch.equal(pack_quantized(rounded).dense(), rounded.dense(torch.float32))
    for group in (128, columns):
        weight = float8(9, columns, group)
        assert torch.equal(pack_float8(weight).dense(), weight.dense())
    with pytest.raises(ValueError, match="a multiple of 64"):
        pack_float8(float8(9, columns, 48))


DTYPES = {torch.float32: ("Q4_K", "Q8_0"), torch.bfloat16: tuple(AFFINE), torch.float16: ("Q4_0", "Q6_K")}
CASES = [(form, rows, dtype) for dtype, forms in DTYPES.items() for form in forms for rows in ROWS]


@pytest.mark.parametrize(("form", "rows", "dtype"), CASES)
def test_products_with_integers(form: str, rows: int, dtype: torch.dtype) -> None:
    weight = affine(form, 37, 256)
    linear = layer(pack_affine(weight), torch.randn(37) if rows % 2 else None)
    steps = weight.values.view(*weight.scale.shape, -1) * weight.scale.abs().unsqueeze(-1)
    parts = (steps + weight.low.abs().unsqueeze(-1)).view(37, 256)
    check(linear, parts, weight.dense(), torch.randn(rows, 256).to(dtype))


@pytest.mark.parametrize("rows", ROWS[:2])
def test_scales_and_lows_have_blocks_of_one_size(rows: int) -> None:
    """Scales would do with one number in fp16 for all columns; lows need two."""
    weight = affine("Q4_K", 9, 512)
    weight.scale[:, 8:] = weight.scale[:, :8]
    packed = pack_affine(weight)
    assert packed.scale.coarse.shape == packed.low.coarse.shape == (9, 2)
    assert torch.equal(packed.dense(), weight.dense())
    parts = 15 * weight.scale.abs() + weight.low.abs()
    check(layer(packed), parts.repeat_interleave(32, dim=1), weight.dense(), torch.randn(rows, 512))


@pytest.mark.parametrize("columns", [96, 672])
def test_odd_sizes(columns: int) -> None:
    """Groups of 32 in an odd number, and parts of which the last is short."""
    weight = affine("Q4_0", 5, columns)
    for rows in ROWS:
        check(layer(pack_affine(weight)), weight.dense().abs(), weight.dense(), torch.randn(rows, columns))


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("rows", ROWS)
def test_products_with_other_narrow_weights(rows: int, dtype: torch.dtype) -> None:
    x, bias = torch.randn(rows, 200).to(dtype), torch.randn(34)
    for weight in (float8(34, 200, 128), float8(34, 200, 200)):
        check(layer(pack_float8(weight), bias), weight.dense().abs(), weight.dense(), x)
    rounded = quantize_int8(torch.randn(34, 200))
    dense = rounded.dense(torch.float32)
    check(layer(pack_quantized(rounded), bias), dense.abs(), dense, x)


@pytest.mark.parametrize(("few", "many"), [(2, 16), (17, 20), (65, 66)])
def test_a_row_keeps_its_bits_beside_others(few: int, many: int, monkeypatch: pytest.MonkeyPatch) -> None:
    multiply_rows_alike(monkeypatch)
    linear, x = layer(pack_affine(affine("Q4_K", 40, 512))), torch.randn(many, 512, device=DEVICE).bfloat16()
    whole = linear(x)
    assert torch.equal(linear(x[-few:]), whole[-few:])
    assert torch.equal(linear(x.flip(0)).flip(0), whole)


def test_columns_are_cut_into_parts_until_the_gpu_is_full() -> None:
    assert parts_of(FORMS[0], 4096, 128) == 8
    assert parts_of(FORMS[0], 128256, 128) == 1
    assert parts_of(FORMS[0], 1024, 448) == 16
    assert parts_of(FORMS[0], 64, 6) == 1
    assert parts_of(FORMS[-1], 64, 448) == 1
    for forms in (FORMS, HOPPER_FORMS, SCALAR_FORMS):
        assert [form.rows for form in forms] == [*sorted(form.rows for form in forms[:-1]), None]


def test_what_does_not_fit_is_refused() -> None:
    linear = layer(pack_affine(affine("Q4_0", 4, 64)))
    for x in (torch.zeros(2, 63), torch.zeros(64), torch.zeros(2, 64, dtype=torch.float64)):
        with pytest.raises(ValueError, match=r"it must be \[tokens, 64\]"):
            linear(x.to(DEVICE))


def test_names_tell_gpus_and_kernels_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    names = {TritonQuantizedOps(capability).name for capability in ((8, 0), (8, 9), (9, 0))}
    monkeypatch.setattr(triton_quantized, "KERNEL_VERSION", triton_quantized.KERNEL_VERSION + 1)
    assert len(names | {TritonQuantizedOps((9, 0)).name}) == 4


def test_forms_have_no_rows_in_common() -> None:
    for forms in (FORMS, HOPPER_FORMS):
        chosen = [form_of(rows, forms) for rows in (2, 16, 17, 64, 65, 4096)]
        assert chosen == [forms[0], forms[0], forms[1], forms[1], forms[2], forms[2]]
    assert form_of(5000, SCALAR_FORMS) == SCALAR_FORMS[-1]


def test_forms_follow_from_the_gpu_and_from_columns_at_a_time() -> None:
    halves = [(capability, columns) for capability in ((8, 9), (9, 0), (10, 0)) for columns in (16, 32, 64)]
    found = [forms_of(capability, torch.bfloat16, columns) for capability, columns in halves]
    assert found == [HOPPER_FORMS if each == ((9, 0), 32) else FORMS for each in halves]
    assert forms_of((7, 5), torch.float16, 64) == forms_of((9, 0), torch.float32, 32) == SCALAR_FORMS


def test_kernels_compile_for_every_gpu_and_fit() -> None:
    compiled = compiled_by(Path(__file__).with_name("compile_quantized_for_gpus.py"))
    kernels = [kernel for _, kernel, *_ in compiled if kernel != "add_parts"]
    assert kernels == ["multiply_rows", "multiply_row", *["multiply_rows"] * 2]
