"""Compiles the kernels of narrow weights as `NarrowLinear` launches them (see `gpu_compiler.py`):

python tests/ops/compile_quantized_for_gpus.py [CAPABILITY ...]
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

import gpu_compiler
from pagemill.ops.packed_weight import PackedWeight, pack_affine, pack_float8, pack_quantized
from pagemill.ops.quantized import AffineWeight, Float8Weight, quantize_int8
from pagemill.ops.triton_quantized import NarrowLinear

ROWS = (1, 8, 32, 128)
"""A number of rows for each form."""
OUTPUTS, COLUMNS = 192, 1024
KINDS = ("Q4_0", "Q4_K", "Q5_K", "Q6_K", "Q8_0", "GPTQ-64", "GPTQ-128", "int8", "float8")


class Case(NamedTuple):
    element: torch.dtype
    kind: str
    rows: int

    def __str__(self) -> str:
        return f"{str(self.element).removeprefix('torch.')} {self.kind}, {self.rows} rows"


FEW = [
    (75, Case(torch.float16, "Q4_K", 8)),
    (90, Case(torch.bfloat16, "Q4_K", 1)),
    (90, Case(torch.bfloat16, "Q8_0", 128)),
    (100, Case(torch.float16, "float8", 8)),
]


def usual_cases(capability: int) -> Iterator[tuple[int, Case]]:
    for element in (torch.float32, torch.float16, torch.bfloat16):
        if element == torch.bfloat16 and capability < 80:
            continue
        for kind in KINDS if element != torch.float32 else ("Q4_K", "float8"):
            for rows in ROWS:
                yield capability, Case(element, kind, rows)


def coarse(count: int, most: int) -> torch.Tensor:
    """Scales of two levels, `count` to 256 columns."""
    fine = torch.randint(1, most, (OUTPUTS, COLUMNS // 256, count)).float()
    return (fine * torch.rand(OUTPUTS, COLUMNS // 256, 1).half().float()).view(OUTPUTS, -1)


def packed(kind: str) -> PackedWeight:
    if kind == "int8":
        return pack_quantized(quantize_int8(torch.randn(OUTPUTS, COLUMNS)))
    if kind == "float8":
        values = torch.randn(OUTPUTS, COLUMNS).to(torch.float8_e4m3fn)
        return pack_float8(Float8Weight(values, torch.rand(OUTPUTS, COLUMNS // 128), 128))
    bits = 8 if kind[0] == "Q" and kind[1] != "4" else 4
    values = torch.randint(0, {"5": 32, "6": 64, "8": 256}.get(kind[1], 16), (OUTPUTS, COLUMNS), dtype=torch.uint8)
    if kind == "Q6_K":
        scale = coarse(16, 127)
        return pack_affine(AffineWeight(values, scale, -32 * scale, bits))
    if kind.endswith("_K"):
        return pack_affine(AffineWeight(values, coarse(8, 64), -coarse(8, 64), bits))
    size = int(kind.removeprefix("GPTQ-")) if kind.startswith("GPTQ") else 32
    scale = torch.rand(OUTPUTS, COLUMNS // size).half().float()
    zero = torch.randint(0, 16, scale.shape) if size > 32 else 1 << bits - 1
    scale, low = (part.repeat_interleave(size // 32, dim=1) for part in (scale, -scale * zero))
    return pack_affine(AffineWeight(values, scale.contiguous(), low.contiguous(), bits))


def launch(capability: int, case: Case) -> None:
    linear = NarrowLinear(packed(case.kind), torch.zeros(OUTPUTS), torch.float32, divmod(capability, 10))
    linear(torch.zeros(case.rows, COLUMNS, dtype=case.element))


def check(ptx: str) -> None:
    assert ".ftz" not in ptx, "numbers of fp8 are tiny on the way, and must not be flushed to zero"


if __name__ == "__main__":
    gpu_compiler.main(FEW, usual_cases, launch, check=check)
