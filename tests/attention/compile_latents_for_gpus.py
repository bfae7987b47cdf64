"""Compiles the kernel of attention to latents, of DeepSeek's sizes and narrower ones, as `TritonAttention` launches it
(see `gpu_compiler.py`):

python tests/attention/compile_latents_for_gpus.py [CAPABILITY ...]
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

import gpu_compiler
from pagemill.attention.interface import AttentionBatch, GroupBatch
from pagemill.attention.triton_backend import TritonAttention
from pagemill.kvcache.device_pool import DevicePool
from pagemill.kvcache.kv_format import kv_format
from pagemill.kvcache.layer_groups import group_layers
from pagemill.kvcache.layout import FrameShape, block_major

ROWS, TOKENS, CONTEXT, BLOCK_SIZE = 2, 101, 4096, 16


class Case(NamedTuple):
    element: torch.dtype
    format: str
    heads: int
    rank: int = 512
    rope: int = 64

    def __str__(self) -> str:
        element = str(self.element).removeprefix("torch.")
        return f"{element} {self.format}, {self.heads} heads of {self.rank}/{self.rope}"


FEW = [(90, Case(torch.bfloat16, "bfloat16", *sizes)) for sizes in ((128,), (40, 256, 32), (70, 32, 16))]


def usual_cases(capability: int) -> Iterator[tuple[int, Case]]:
    for element in (torch.float32, torch.float16, torch.bfloat16):
        if element == torch.bfloat16 and capability < 80:
            continue
        for format in (str(element).removeprefix("torch."), "fp8_e4m3"):
            for heads in (16, 128):
                yield capability, Case(element, format, heads)


def launch(capability: int, case: Case) -> None:
    """Writes and attends rows of 1 and 100 queries through `TritonAttention`; and again for a layer group whose arrays
    begin at no multiple of 16 bytes, which must take no other code."""
    width = case.rank + case.rope
    shape = FrameShape(group_layers([None]), 1, BLOCK_SIZE, width, case.rank, kv_format(case.format), True)
    cache = DevicePool(16, shape, layout=block_major).layer(0)
    attention, entries = TritonAttention(divmod(capability, 10)), CONTEXT // BLOCK_SIZE
    query, key = torch.zeros(TOKENS, case.heads + 1, width, dtype=case.element).split((case.heads, 1), 1)
    for begin in (0, 1):
        slots = torch.arange(TOKENS + 1)[begin : begin + TOKENS]
        tables = torch.zeros(ROWS * entries + 1, dtype=torch.int32)[begin : begin + ROWS * entries]
        batch = AttentionBatch(
            query_start=torch.tensor([0, 1, TOKENS], dtype=torch.int32),
            context_lens=torch.tensor([CONTEXT, CONTEXT], dtype=torch.int32),
            positions=torch.arange(TOKENS),
            groups=(GroupBatch(tables.view(ROWS, entries), slots),),
            max_query_len=TOKENS - 1,
            max_context_len=CONTEXT,
        )
        attention.write(key, None, cache, slots)
        attention.attend(query, cache, batch, 0, scale=0.1)


if __name__ == "__main__":
    gpu_compiler.main(FEW, usual_cases, launch)
