"""The benchmark of narrow weights runs, on small shapes, and its figures follow from times and bytes."""

from __future__ import annotations

import pytest

from interpreter import CAPABILITY, DEVICE

pytest.importorskip("triton")

from benchmarks.gpu_weights import KINDS, run, table

pytestmark = pytest.mark.gpu

BITS = {"Q4_0": 4.5, "Q4_K": 4.625, "Q6_K": 6.5625, "Q8_0": 8.5, "GPTQ-128": 4.1875, "int8": 8.125, "fp8": 8.125}


def test_figures_follow_from_times_and_bytes() -> None:
    times = iter(range(1, 100))

    def ms_of(call) -> float:
        assert call().isfinite().all()
        return float(next(times))

    results = run({"o": (32, 256)}, (1, 3), 1e6, ms_of, CAPABILITY, DEVICE)
    assert [(at.kind, at.rows) for at in results] == [(kind, rows) for kind in KINDS for rows in (1, 3)]
    assert [at.ms for at in results] == [*range(3, 3 + 2 * len(KINDS))]
    for at in results:
        assert at.dense_ms == (1 if at.rows == 1 else 2)
        if at.kind != "int8":  # its last group is a short one
            assert at.bits == BITS[at.kind]
        moved = at.bits * 32 * 256 / 8 + (32 + 256) * at.rows * 2
        assert at.share == pytest.approx(moved / at.ms * 1e3 / 1e6)
    assert len(table(results).splitlines()) == 2 + len(results)
