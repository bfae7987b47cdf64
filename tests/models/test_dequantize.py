"""GGUF's formats: their table, and the kernels' fp32 weights, bit for bit those of the gguf package."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
from gguf.quants import dequantize

from pagemill import _kernels
from pagemill.models.loading.gguf_file import FORMATS


def test_formats_are_the_packages_own():
    theirs = {kind.value: (kind.value, kind.name, *gguf.GGML_QUANT_SIZES[kind]) for kind in gguf.GGMLQuantizationType}
    assert {form.number: tuple(form) for form in FORMATS.values()} == theirs


@pytest.mark.parametrize("name", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K"])
@pytest.mark.parametrize("blocks", [1, 8191])
def test_widens_every_bit_pattern_as_the_package_does(name, blocks):
    """Scales that are infinite, subnormal or no numbers at all are among them; nothing is written behind the end."""
    kind = gguf.GGMLQuantizationType[name]
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
