"""The benchmark of a step's variants runs on tiny sizes, and tells the truth of bits and of time in which nothing
runs."""

from __future__ import annotations

import pytest
import torch

from interpreter import CAPABILITY, DEVICE

pytest.importorskip("triton")

from benchmarks.gpu_decode import Sizes
from benchmarks.on_gpu import Ceilings

from benchmarks import gpu_variants
from pagemill.attention.triton_backend import TritonAttention
from pagemill.executor.backend import torch_backend
from pagemill.models.gpu_decoder import GpuDecoder
from pagemill.ops import triton_linear
from pagemill.ops.triton_ops import TritonOps

pytestmark = pytest.mark.gpu


class Larger(gpu_variants.FewRows):
    def pack_linear(self, weight, bias=None, dtype=None):
        return super().pack_linear(weight * 1.03 if len(weight) == 97 else weight, bias, dtype)


def test_variants_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    real, products = triton_linear.multiply, []
    monkeypatch.setattr(triton_linear, "multiply", lambda x, *more: products.append(len(x)) or real(x, *more))
    sizes = Sizes(97, 64, 4, 2, 16, 48, layers=2)
    plain = torch_backend(torch.device(DEVICE))._replace(
        ops=TritonOps(CAPABILITY), attention=TritonAttention(CAPABILITY), decoder=GpuDecoder
    )
    forms = triton_linear.FORMS[8]
    few, larger = (plain._replace(ops=ops(CAPABILITY, forms)) for ops in (gpu_variants.FewRows, Larger))
    seen = []

    def ms_of(replay) -> float:
        replay()
        return 2.0

    results = list(
        gpu_variants.run(
            sizes, [(1, 20), (3, 33)], Ceilings(1e9, 1e12), ms_of, {"torch": plain, "few": few, "larger": larger},
            torch.float16, gpu_variants.uncaptured, lambda result, replay: seen.append((result, replay())),
        )
    )  # fmt: skip
    assert [(at.variant, at.rows) for at in results] == [
        (name, rows) for name in ("torch", "few", "larger") for rows in (1, 3)
    ]
    assert all(at.error < 0.01 for at in results[:4])
    assert all(0.02 < at.error < 0.04 and not at.same for at in results[4:])
    assert all(at.same for at in results[:2])
    assert products == [*[1] * 27, *[3] * 27] * 2, "nine products of a step, of which three run"
    assert [result for result, _ in seen] == results
    assert [logits.shape for _, logits in seen[:2]] == [(1, 97), (3, 97)]
    assert results[0].share == pytest.approx(sizes.roofline_s(1, 20, Ceilings(1e9, 1e12)) / 2e-3)
    assert len(gpu_variants.table(results).splitlines()) == 2 + 6


def test_what_runs_at_once_counts_once() -> None:
    assert gpu_variants.idle_us([(0, 10), (4, 6), (9, 12), (15, 20), (20, 21)]) == 3
    table = gpu_variants.kernels_of([("norm", 3.0), ("product", 9.0)] * 3, 30.0).splitlines()
    assert table[2:] == ["| product | 1 | 9.00 | 9 |", "| norm | 1 | 3.00 | 3 |", "| nothing | | | 10 |"]


def test_early_variants_come_behind_those_whose_bits_they_must_have() -> None:
    variants = gpu_variants.variants_of(torch_backend(torch.device(DEVICE)), (9, 0), triton_linear.FORMS[9])
    assert ["early" in name for name in variants] == [False, True, False, True]
