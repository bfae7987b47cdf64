"""Compiles the kernels that stand beside torch's own attention, as `SdpaAttention` launches them (see
`gpu_compiler.py`):

python tests/attention/compile_gather_for_gpus.py [CAPABILITY ...]
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

import gpu_compiler
from pagemill.attention.sdpa_gather import Part, Span, gather, merge
from pagemill.kvcache.device_pool import DevicePool
from pagemill.kvcache.kv_format import kv_format
from pagemill.kvcache.layer_groups import group_layers
from pagemill.kvcache.layout import FrameShape, block_major

HEADS, KV_HEADS, KEYS, BLOCK_SIZE = 8, 2, 256, 16


class Case(NamedTuple):
    element: torch.dtype
    format: str
    head_dim: int

    def __str__(self) -> str:
        return f"{str(self.element).removeprefix('torch.')} {self.format} {self.head_dim}"


FEW = [(90, Case(torch.bfloat16, "bfloat16", 128)), (80, Case(torch.float16, "fp8_e4m3", 96))]


def usual_cases(capability: int) -> Iterator[tuple[int, Case]]:
    for element in (torch.float16, torch.bfloat16) if capability >= 80 else ():
        for format in (str(element).removeprefix("torch."), "int8", "fp8_e4m3", "fp8_e5m2"):
            for head_dim in (64, 96, 128, 256):
                yield capability, Case(element, format, head_dim)


def launch(capability: int, case: Case) -> None:
    """Gathers keys and values through tables that begin anywhere; merges results of the queries' dtype and of fp32."""
    shape = FrameShape(group_layers([None]), KV_HEADS, BLOCK_SIZE, case.head_dim, case.head_dim, kv_format(case.format))
    cache = DevicePool(16, shape, layout=block_major).layer(0)
    tables = torch.zeros(KEYS // BLOCK_SIZE + 1, dtype=torch.int32)
    for begin in (0, 1):
        gather(cache, tables[begin:], Span(0, KEYS, KEYS - 10), case.element, capability >= 89)
    parts = [Part(torch.zeros(101, HEADS, case.head_dim, dtype=case.element), torch.zeros(HEADS, 101).T)] * 3
    merge(merge(parts[0], parts[1], torch.float32), parts[2].of(1, 100), case.element)


if __name__ == "__main__":
    gpu_compiler.main(FEW, usual_cases, launch)
