"""The benchmark of products runs, on small shapes, its figures follow from times and bytes, and the sweep finds what is
fastest."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from interpreter import CAPABILITY, DEVICE

pytest.importorskip("triton")

from benchmarks.gpu_forms import SWEPT_ROWS, Sweep, best_forms, candidates
from benchmarks.gpu_products import CUBLAS, EARLY, TRITON, compare, draw_weights, read, table
from benchmarks.on_gpu import Ceilings, keep

from benchmarks import gpu_products
from pagemill.ops.triton_linear import Form

pytestmark = pytest.mark.gpu

SHAPES = {"o": (32, 256), "head": (48, 128)}


def weights_of(distinct: int = 40000) -> list:
    return list(draw_weights(SHAPES, 1e9, torch.bfloat16, DEVICE, distinct))


def test_figures_follow_from_times_and_bytes() -> None:
    times, products = iter(range(1, 100)), []

    def us_of(calls, cycles) -> float:
        products.append([call() for call in calls])
        return float(next(times))

    drawn = weights_of()
    assert [len(weights.copies) for weights in drawn] == [3, 4], "as many as give the distinct bytes"
    assert [len(weights.copies) for weights in weights_of(1)] == [2, 2]
    results = [at for weights in drawn for at in compare(weights, (1, 3), us_of, (8, 0))]
    assert [(at.layer, at.rows, at.by) for at in results] == [
        (layer, rows, by) for layer in SHAPES for rows in (1, 3) for by in (CUBLAS, TRITON)
    ]
    assert [at.us for at in results] == [*range(1, 9)]
    for at in results:
        outputs, columns = SHAPES[at.layer]
        assert at.share == pytest.approx(2 * (outputs * columns + at.rows * (outputs + columns)) / at.us / 1e3)
    for by_torch, by_triton in zip(products[::2], products[1::2], strict=True):
        torch.testing.assert_close(by_torch, by_triton, atol=0.02, rtol=0.02)
    assert not torch.equal(products[0][0], products[0][1]), "each copy is another one"
    assert len(table(results).splitlines()) == 2 + 4
    assert "| head | 3 | 7.0 | 191% | 8.0 | 167% |" in table(results)


def test_a_sweep_finds_the_fastest(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    slow, fast = Form(16, 16, 32, 1, 2, 1), Form(16, 32, 32, 1, 2, 4)
    alike = fast._replace(programs=5)
    seen: list[Form | None] = []
    real = gpu_products.multiply
    monkeypatch.setattr(
        gpu_products, "multiply", lambda x, weight, bias, form, early: seen.append(form) or real(x, weight, bias, form)
    )

    def us_of(calls, cycles) -> float:
        before = len(seen)
        calls[0]()
        return 3.0 if len(seen) == before else {slow: 5.0, fast: 2.0, alike: 2.5}[seen[-1]]

    sweep = Sweep(weights_of(), us_of, None, (8, 0), float("inf"))
    sweep.try_rows(4, [slow, fast, alike])
    assert seen[:4] == [slow, fast, slow, fast], "what cuts columns alike is timed once"
    lines = [line.split(", ", 2) for line in capsys.readouterr().out.splitlines() if line.startswith("*")]
    assert [line[2] for line in lines] == [f"Triton {fast}", "cuBLAS ", f"Triton {slow}"]
    assert lines[0][1] == f"4 rows: {(32 * 2 + 2) / 1e3:.3f} ms"
    assert {at.by for at in sweep.results} == {CUBLAS, TRITON}


def test_what_was_best_for_a_step_is_read_back(tmp_path: Path) -> None:
    one, few, other = Form(1, 4, 64, 4, 1, 1), Form(16, 16, 32, 1, 2, 1), Form(16, 32, 32, 1, 2, 4, tiles=True)

    def results_of(rows: int, by: str, form: Form | None, *us: float) -> list:
        return [weights.result(rows, by, each, form) for weights, each in zip(drawn, us, strict=False)]

    drawn = weights_of()
    results = [
        *results_of(4, TRITON, few, 1.0, 9.0), *results_of(4, TRITON, other, 3.0, 1.0),
        *results_of(4, TRITON, one, 0.1),
        *results_of(1, CUBLAS, None, 0.1, 0.1), *results_of(1, TRITON, few, 1.0, 1.0),
        *results_of(1, EARLY, one, 2.0, 2.0),
    ]  # fmt: skip
    file = tmp_path / "sweep.json"
    keep(file, Ceilings(1e9, 1e9), results)
    assert read(file) == results
    assert best_forms(read(file)) == (one, few), "layers count 32 times, and a form without all layers not at all"


def test_a_sweep_ends_in_time(capsys: pytest.CaptureFixture) -> None:
    Sweep(weights_of(), lambda calls, cycles: 1.0, None, CAPABILITY, 0.0).try_rows(1)
    assert capsys.readouterr().out == "1 rows: no time is left\n"


@pytest.mark.parametrize("rows", SWEPT_ROWS)
def test_candidates_differ_and_take_the_rows(rows: int) -> None:
    forms = candidates(rows)
    assert len(set(forms)) == len(forms) > 50
    assert all(rows <= form.rows for form in forms)


def test_candidates_compile_ahead(tmp_path: Path) -> None:
    """In processes of their own: where TRITON_INTERPRET was set as triton was imported, nothing compiles."""
    script = """
import torch
from benchmarks.compiled_ahead import Compilers
from benchmarks.gpu_forms import Code, candidates, launch_code
from pagemill.ops.triton_linear import Form
well, ill = Form(1, 4, 512, 4, 1, 1), Form(8, 3, 64, 4, 3, 1)
codes = [Code(form, True, torch.bfloat16, True) for form in (well, ill)]
print(Compilers().compile(launch_code, codes, (9, 0))[0] == codes[:1])
"""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=False)
    assert done.stdout == "True\n", done.stderr
    kernels = {file.name for file in tmp_path.rglob("*.cubin")}
    assert kernels == {"multiply_one.cubin", "add_parts.cubin"}
