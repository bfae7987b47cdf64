"""Compiles the sampling kernels as `TritonSamplingKernels` launches them (see `gpu_compiler.py`):

python tests/sampling/compile_for_gpus.py [CAPABILITY ...]
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

import gpu_compiler
from pagemill.sampling.kernels import DeviceChoices
from pagemill.sampling.triton_sampling import TritonSamplingKernels


class Case(NamedTuple):
    element: torch.dtype
    vocab: int

    def __str__(self) -> str:
        return f"{str(self.element).removeprefix('torch.')}, {self.vocab} tokens"


FEW = [(90, Case(torch.float32, 128256))]


def usual_cases(capability: int) -> Iterator[tuple[int, Case]]:
    for vocab in (49152, 128256, 151936, 262144):
        yield capability, Case(torch.float32, vocab)
    yield capability, Case(torch.float16, 128256)
    if capability >= 80:
        yield capability, Case(torch.bfloat16, 128256)


def launch(capability: int, case: Case) -> None:
    kernels, rows = TritonSamplingKernels(), 2
    logits = torch.empty(rows, case.vocab, dtype=case.element)
    numbers = torch.ones(rows)
    choices = DeviceChoices(numbers, numbers.long(), numbers, numbers, numbers.double())
    kernels.choose_on_device(logits, None)
    kernels.choose_on_device(logits, choices)
    kernels.choose_on_device(logits, choices, truncate=True)
    bits = np.zeros((rows, -(-case.vocab // 32)), np.uint32)
    kernels.mask(logits, np.arange(rows), bits, np.arange(rows))


if __name__ == "__main__":
    gpu_compiler.main(FEW, usual_cases, launch)
