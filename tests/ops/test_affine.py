"""float32 weights held as the integers they were stored as: every weight comes back, and no output changes a bit."""

from __future__ import annotations

import pytest
import torch

from pagemill.ops.quantized import AffineWeight
from pagemill.ops.torch_ops import TorchOps

ROWS = (1, 2, 5, 6, 7, 14, 15, 28, 29, 64, 130, 260)


KINDS = ((4, 32), (8, 32), (8, 16))
"""Bits, and columns for which there is a scale."""


def draw(rows: int, columns: int, bits: int, block: int) -> AffineWeight:
    """Scales of both signs and far apart, as fp16 has them."""
    values = torch.randint(0, 1 << bits, (rows, columns), dtype=torch.uint8)
    apart = 2.0 ** torch.randint(-9, 3, (rows, 1))
    scale, low = ((torch.randn(rows, columns // block) * apart).half().float() for _ in range(2))
    return AffineWeight(values, scale, low if bits == 4 else -128 * scale, bits)


@pytest.mark.parametrize(("bits", "block"), KINDS)
@pytest.mark.parametrize(("n", "k"), [(1, 32), (33, 96), (70, 576), (96, 1568), (200, 224)])
def test_outputs_and_rows_are_those_of_the_weight_as_it_is(ops, bits, block, n, k):
    weight = draw(n, k, bits, block)
    dense, bias = weight.dense(), torch.randn(n) if n % 2 else None
    kept, plain = ops.pack_affine(weight, bias), ops.pack_linear(dense, bias)
    if n > 64:
        assert kept.nbytes < plain.nbytes * 0.6
    ids = torch.arange(n)
    assert torch.equal(kept.rows(ids), dense)
    assert torch.equal(TorchOps().pack_affine(weight, bias).rows(ids), dense)
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.randn(max(ROWS), k + 3).to(dtype)[:, 1 : k + 1]
        whole = plain(x)
        assert whole.isfinite().all()
        for rows in ROWS:
            assert torch.equal(kept(x[:rows]), whole[:rows])
            assert (kept.argmax(x[:rows]) == plain.argmax(x[:rows])).all()


@pytest.mark.parametrize(("bits", "block"), KINDS)
@pytest.mark.parametrize("tokens", [1, 20, 100])
def test_a_gated_mlp_is_that_of_the_weights_as_they_are(ops, bits, block, tokens):
    gate_up, down = draw(2 * 192, 64, bits, block), draw(64, 192, bits, block)
    x = torch.randn(tokens, 64)
    kept, plain = ((pack(gate_up), pack(down)) for pack in (ops.pack_affine, lambda w: ops.pack_linear(w.dense())))
    found, expected = (second(ops.gated(first(x), "silu")) for first, second in (kept, plain))
    assert torch.equal(found, expected)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"bits": 5}, "of 4 or 8 bits"),
        ({"values": torch.zeros(3, 40, dtype=torch.uint8)}, "40 columns"),
        ({"low": torch.zeros(3, 1)}, r"low must be contiguous torch.float32 \(3, 2\)"),
        ({"scale": torch.zeros(3, 2).half()}, "scale must be"),
    ],
)
def test_other_shapes_are_refused(change, match):
    values, each = torch.zeros(3, 64, dtype=torch.uint8), torch.zeros(3, 2)
    good = {"values": values, "scale": each, "low": each, "bits": 4}
    with pytest.raises(ValueError, match=match):
        AffineWeight(**(good | change))
