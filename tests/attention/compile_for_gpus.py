"""Compiles the kernels of attention as `TritonAttention` launches them (see `gpu_compiler.py`):

python tests/attention/compile_for_gpus.py [CAPABILITY ...]
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

import gpu_compiler
from pagemill.attention.interface import AttentionBatch, GroupBatch, HostLengths
from pagemill.attention.triton_backend import TritonAttention
from pagemill.kvcache.device_pool import DevicePool
from pagemill.kvcache.kv_format import kv_format
from pagemill.kvcache.layer_groups import group_layers
from pagemill.kvcache.layout import FrameShape, block_major

RESTS = {96: 8, 128: 8, 256: 416}
"""Bytes that heads of so many dimensions with remainders spill without matrix units: no tile is small enough."""
WIDE_ON_BLACKWELL = 56
"""Bytes that heads of 256 dimensions with remainders spill there."""
NARROW = ("int8", "fp8_e4m3", "fp8_e5m2", "int8/int4", "int4", "int4_mixed")
ROWS, TOKENS, CONTEXT, BLOCK_SIZE = 2, 101, 4096, 16


class Case(NamedTuple):
    element: torch.dtype
    format: str
    head_dim: int
    limited: bool = False
    """By a window and a soft cap."""
    group: int = 4
    """Query heads per KV head."""

    def __str__(self) -> str:
        element = str(self.element).removeprefix("torch.")
        group = f", {self.group} heads per KV head" * (self.group != 4)
        return f"{element} {self.format} {self.head_dim}" + ", limited" * self.limited + group


FEW = [
    (75, Case(torch.float16, "float16", 64)),
    (90, Case(torch.bfloat16, "int4", 64, group=16)),
    (90, Case(torch.bfloat16, "bfloat16", 128, group=48)),
    (100, Case(torch.bfloat16, "int4", 64, limited=True)),
]


def usual_cases(capability: int) -> Iterator[tuple[int, Case]]:
    for element in (torch.float32, torch.float16, torch.bfloat16):
        if element == torch.bfloat16 and capability < 80:
            continue
        name = str(element).removeprefix("torch.")
        for format in (name, *NARROW):
            for head_dim in (64, 96, 128, 256):
                yield capability, Case(element, format, head_dim)
            yield capability, Case(element, format, 128, limited=True)
        if capability >= 80 and element != torch.float32:  # without matrix units no tile of so many queries is small
            yield capability, Case(element, name, 128, group=48)


def launch(capability: int, case: Case) -> None:
    """Writes and attends rows of 1 and 100 queries, on 2 KV heads, through `TritonAttention`; and again for a
    layer group whose arrays begin at no multiple of 16 bytes, which must take no other code: steps would wait for the
    compiler whenever the group's place changes. Rows may have keys in common, or not, which is other code."""
    kv, head_dim = kv_format(case.format), case.head_dim
    shape = FrameShape(group_layers([None]), 2, BLOCK_SIZE, head_dim, head_dim, kv)
    cache = DevicePool(16, shape, layout=block_major).layer(0)
    attention, entries = TritonAttention(divmod(capability, 10)), CONTEXT // BLOCK_SIZE
    heads = 2 * case.group
    query, new_key, new_value = torch.zeros(TOKENS, heads + 4, head_dim, dtype=case.element).split((heads, 2, 2), 1)
    options = {"window": 1000, "soft_cap": 30.0} if case.limited else {}
    for begin in (0, 1):
        slots = torch.arange(TOKENS + 1)[begin : begin + TOKENS]
        tables = torch.zeros(ROWS * entries + 1, dtype=torch.int32)[begin : begin + ROWS * entries]
        group = GroupBatch(tables.view(ROWS, entries), slots)
        if kv.precise:
            group = replace(group, remainders=group, precise=kv.precise)
        batch = AttentionBatch(
            query_start=torch.tensor([0, 1, TOKENS], dtype=torch.int32),
            context_lens=torch.tensor([CONTEXT, CONTEXT], dtype=torch.int32),
            positions=torch.arange(TOKENS),
            groups=(group,),
            max_query_len=TOKENS - 1,
            max_context_len=CONTEXT,
            host=HostLengths(*(torch.tensor(each, dtype=torch.int32) for each in ([1, TOKENS - 1], [CONTEXT] * ROWS))),
        )
        attention.write(new_key, new_value, cache, slots, slots if kv.precise else None)
        attention.attend(query, cache, batch, 0, scale=0.1, **options)
        joined = replace(batch, common=torch.zeros(ROWS, dtype=torch.int32))
        attention.attend(query, cache, joined, 0, scale=0.1, **options)


def spills(capability: int, case: Case) -> int:
    without_units = capability == 75 or case.element == torch.float32
    if case.format != "int4_mixed":
        return 0
    if without_units:
        return RESTS.get(case.head_dim, 0)
    return WIDE_ON_BLACKWELL if capability == 100 and case.head_dim == 256 else 0


if __name__ == "__main__":
    gpu_compiler.main(FEW, usual_cases, launch, spills=spills)
