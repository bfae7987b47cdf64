"""Compiles the operators' kernels as `TritonOps` and `apply_experts` launch them (see `gpu_compiler.py`):

python tests/ops/compile_for_gpus.py [CAPABILITY ...]
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

import gpu_compiler
from pagemill.ops.low_rank import LowRankPart
from pagemill.ops.triton_experts import apply_experts, most_likely
from pagemill.ops.triton_ops import WIDEST, TritonOps


class Case(NamedTuple):
    """Sizes of a model. experts: how many tokens a mixture gets; None for a model without one. adapter: of what dtype
    low-rank additions are."""

    name: str
    element: torch.dtype
    hidden: int = 4096
    head_dim: int = 128
    half: int = 64
    normed: bool = False
    experts: int | None = None
    adapter: torch.dtype | None = None

    def __str__(self) -> str:
        return f"{self.name}, {str(self.element).removeprefix('torch.')}"


FEW = [
    (75, Case("Llama 3 8B", torch.float16)),
    (90, Case("mixture, 1 token", torch.bfloat16, experts=1)),
    (90, Case("adapter", torch.bfloat16, adapter=torch.bfloat16)),
    (100, Case("Gemma 3", torch.bfloat16, hidden=5376, head_dim=256, half=128, normed=True)),
]


def usual_cases(capability: int) -> Iterator[tuple[int, Case]]:
    for element in (torch.float32, torch.float16, torch.bfloat16):
        if element == torch.bfloat16 and capability < 80:
            continue
        yield capability, Case("Llama 3 8B", element)
        yield capability, Case("Qwen 3", element, normed=True)
        yield capability, Case("Gemma 3", element, hidden=5376, head_dim=256, half=128, normed=True)
        yield capability, Case("Phi 4 mini", element, hidden=3072, half=48)
        yield capability, Case("the widest", element, hidden=WIDEST, normed=True)
        for adapter in {element, torch.float32}:
            yield capability, Case("adapter", element, adapter=adapter)
        for tokens in (1, 100, 1000):
            yield capability, Case(f"mixture, {tokens} tokens", element, experts=tokens)


def launch(capability: int, case: Case) -> None:
    ops = TritonOps((capability // 10, capability % 10))
    if case.experts is not None:
        x, logits = torch.zeros(case.experts, 2048, dtype=case.element), torch.zeros(case.experts, 8)
        gate_up = torch.empty(8, 1536, 2048, dtype=case.element)
        down = torch.empty(8, 2048, 768, dtype=case.element)
        units = ops.has_matrix_units(case.element)
        apply_experts(x, most_likely(logits, 2, normalize=True), gate_up, down, activation="silu", matrix_units=units)
        return
    x, weight = torch.zeros(2, case.hidden, dtype=case.element), torch.zeros(case.hidden)
    if case.adapter is not None:
        part = LowRankPart(torch.zeros(64, case.hidden).to(case.adapter), torch.zeros(99, 64).to(case.adapter), 0, 1.0)
        ops.add_low_rank(x, x.clone(), [(ops.pack_low_rank([part], case.hidden, case.hidden), torch.arange(2))])
        return
    heads = torch.zeros(2, 48, case.head_dim, dtype=case.element)
    angles, of_heads = torch.zeros(2, case.half), torch.zeros(case.head_dim)
    ops.rms_norm(x, weight, 1e-6)
    ops.add_rms_norm(x, x.clone(), weight, 1e-6, weight if case.normed else None)
    if case.normed:
        ops.rms_norm(heads[:, :32], of_heads, 1e-6)
        ops.norm_and_rotate(heads[:, :40], 32, of_heads, of_heads, 1e-6, angles, angles)
    else:
        ops.rotate(heads[:, :40], angles, angles)
    ops.gated(x, "gelu_tanh" if case.normed else "silu")


if __name__ == "__main__":
    gpu_compiler.main(FEW, usual_cases, launch)
