"""GGUF's formats: their table, the kernels' fp32 weights, bit for bit those of the gguf package, and rounded ones."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from gguf.quants import dequantize

from pagemill import _kernels
from pagemill.models.loading.gguf_file import FORMATS
from pagemill.models.loading.gguf_integers import integers_of
from pagemill.ops.quantized import QuantizedWeight, keep_int4, quantize_int8

NAMES = ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K"]


def test_formats_are_the_packages_own():
    theirs = {kind.value: (kind.value, kind.name, *gguf.GGML_QUANT_SIZES[kind]) for kind in Kind}
    assert {form.number: tuple(form) for form in FORMATS.values()} == theirs


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("blocks", [1, 8191])
def test_widens_every_bit_pattern_as_the_package_does(name, blocks):
    """Scales that are infinite, subnormal or no numbers at all are among them; nothing is written behind the end."""
    kind = Kind[name]
    weights, nbytes = gguf.GGML_QUANT_SIZES[kind]
    stored = np.random.default_rng().integers(0, 256, (blocks, nbytes), dtype=np.uint8)
    with np.errstate(all="ignore"):
        expected = dequantize(stored, kind)
    out = np.full(blocks * weights + 1, np.nan, dtype=np.float32)
    out[-1] = 7.0
    _kernels.dequantize(kind.value, stored.reshape(-1), out[:-1])
    assert out[-1] == 7.0
    assert np.array_equal(out[:-1].reshape(expected.shape), expected, equal_nan=True)


def test_refuses_a_format_without_kernel():
    with pytest.raises(ValueError, match="number 10"):
        _kernels.dequantize(10, np.empty(0, np.uint8), np.empty(0, np.float32))


def random_blocks(name: str, rows: int, columns: int, wild: bool) -> tuple[Kind, np.ndarray]:
    """Returns random blocks, uint8 [rows, bytes]; unless they are wild, with finite scales of usual sizes."""
    kind, draw = Kind[name], np.random.default_rng()
    weights, nbytes = gguf.GGML_QUANT_SIZES[kind]
    stored = draw.integers(0, 256, (rows, columns // weights, nbytes), dtype=np.uint8)
    if not wild:
        places = [208] if name == "Q6_K" else [0, 2] if name.endswith(("_1", "4_K", "5_K")) else [0]
        for place in places:
            scales = draw.uniform(-1e-2, 1e-2, stored.shape[:2]) * draw.choice([0, 1, 1, 1], stored.shape[:2])
            stored[..., place : place + 2] = scales.astype(np.float16)[..., None].view(np.uint8)
    return kind, stored.reshape(rows, -1)


def widened(kind: Kind, stored: np.ndarray, columns: int) -> torch.Tensor:
    wide = np.empty(len(stored) * columns, np.float32)
    _kernels.dequantize(kind.value, stored.reshape(-1), wide)
    return torch.from_numpy(wide).view(len(stored), columns)


@pytest.mark.parametrize("columns", [256, 768, 1280])
@pytest.mark.parametrize("name", NAMES)
def test_rounds_to_8_bits_as_what_is_widened_is_rounded(name, columns):
    kind, stored = random_blocks(name, 37, columns, wild=False)
    expected, found = quantize_int8(widened(kind, stored, columns)), QuantizedWeight.empty(37, columns, 8)
    found.values.fill_(77)
    assert _kernels.round_stored(kind.value, stored.reshape(-1), found.values, found.scales)
    assert all(map(torch.equal, found.parts, expected.parts))


@pytest.mark.parametrize("columns", [256, 768, 1280])
@pytest.mark.parametrize("name", ["Q4_0", "Q4_1", "Q4_K"])
def test_takes_4_bits_apart_as_the_reference_does(name, columns):
    kind, stored = random_blocks(name, 37, columns, wild=False)
    blocks = stored.reshape(37, -1, gguf.GGML_QUANT_SIZES[kind][1])
    whole = [torch.from_numpy(np.ascontiguousarray(part)).view(37, -1) for part in integers_of(blocks, name)]
    expected, found = keep_int4(*whole), QuantizedWeight.empty(37, columns, 4)
    for part in found.parts:
        part.fill_(77)
    values, scales, slopes, offsets = found.parts
    assert _kernels.keep_int4(kind.value, stored.reshape(-1), values, slopes, offsets, scales)
    assert all(map(torch.equal, found.parts, expected.parts))


@pytest.mark.parametrize("name", NAMES)
def test_says_whether_all_weights_are_finite(name):
    kind, stored = random_blocks(name, 400, 256, wild=True)
    finite = torch.isfinite(widened(kind, stored, 256)).all(dim=1)
    assert 0 < finite.sum() < 400
    for row, is_finite in zip(stored, finite, strict=True):
        for bits in (8, 4) if name in ("Q4_0", "Q4_1", "Q4_K") else (8,):
            values, scales, *of_halves = QuantizedWeight.empty(1, 256, bits).parts
            kernel = _kernels.keep_int4 if of_halves else _kernels.round_stored
            assert kernel(kind.value, row, values, *of_halves, scales) == is_finite


@pytest.mark.parametrize(("number", "columns", "blocks"), [(10, 256, 0), (14, 128, 105), (8, 256, 271), (8, 256, 273)])
def test_refuses_rows_that_are_no_whole_blocks(number, columns, blocks):
    values, scales = QuantizedWeight.empty(1, columns, 8).parts
    with pytest.raises((ValueError, TypeError), match="blocks"):
        _kernels.round_stored(number, np.zeros(blocks, np.uint8), values, scales)


@pytest.mark.parametrize("number", [8, 14])
def test_takes_only_4_bits_apart(number):
    values, scales, slopes, offsets = QuantizedWeight.empty(1, 256, 4).parts
    stored = np.zeros({8: 272, 14: 210}[number], np.uint8)
    with pytest.raises(ValueError, match=f"GGUF format of number {number}"):
        _kernels.keep_int4(number, stored, values, slopes, offsets, scales)
