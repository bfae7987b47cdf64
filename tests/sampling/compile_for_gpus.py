"""Compiles the sampling kernels as `TritonSamplingKernels` launches them, as `attention/compile_for_gpus.py` does those
of attention:

    python tests/sampling/compile_for_gpus.py [CAPABILITY ...]
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from attention import compile_for_gpus as compiler
from pagemill.sampling.kernels import DeviceChoices
from pagemill.sampling.triton_sampling import TritonSamplingKernels


class Case(NamedTuple):
    element: torch.dtype
    vocab: int

    def __str__(self) -> str:
        return f"{str(self.element).removeprefix('torch.')}, {self.vocab} tokens"


FEW = [(75, Case(torch.float16, 49152)), (90, Case(torch.float32, 128256))]


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
    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch.dict(os.environ, TRITON_CACHE_DIR=folder),
        mock.patch.multiple(compiler, FEW=FEW, usual_cases=usual_cases, launch=launch),
    ):
        sys.exit(compiler.main([int(argument) for argument in sys.argv[1:]]))
