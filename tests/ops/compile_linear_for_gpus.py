"""Compiles the kernels of few rows with dense weights as `multiply` launches them (see `gpu_compiler.py`):

python tests/ops/compile_linear_for_gpus.py [CAPABILITY ...]
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

import gpu_compiler
from pagemill.ops.triton_early import EARLY_CAPABILITY
from pagemill.ops.triton_linear import Form, forms_of, multiply

OUTPUTS, COLUMNS = 4096, 4096


class Case(NamedTuple):
    element: torch.dtype
    form: Form
    early: bool

    def __str__(self) -> str:
        early = ", early" if self.early else ""
        return f"{str(self.element).removeprefix('torch.')}, up to {self.form.rows} rows{early}"


def usual_cases(capability: int) -> Iterator[tuple[int, Case]]:
    of_gpu = divmod(capability, 10)
    for element in (torch.float16, torch.bfloat16):
        for form in forms_of(of_gpu):
            for early in {False, of_gpu >= EARLY_CAPABILITY}:
                yield capability, Case(element, form, early)


FEW = [
    *((80, Case(torch.float16, form, False)) for form in forms_of((8, 0))),
    *((90, Case(torch.bfloat16, form, True)) for form in forms_of((9, 0))),
]


def launch(capability: int, case: Case) -> None:
    x, weight = (torch.zeros(rows, COLUMNS, dtype=case.element) for rows in (case.form.rows, OUTPUTS))
    multiply(x, weight, torch.zeros(OUTPUTS, dtype=case.element), case.form, case.early)


if __name__ == "__main__":
    gpu_compiler.main(FEW, usual_cases, launch)
