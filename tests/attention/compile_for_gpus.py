"""Compiles Triton's kernels as `TritonAttention` launches them, for GPUs that need not be there, and prints what each
takes: registers per thread, bytes of stack (registers that were spilled), bytes of shared memory.

    python tests/attention/compile_for_gpus.py [CAPABILITY ...]

Without arguments: a few configurations; for a capability (75 is 7.5) the usual ones. Ends with status 1 if a kernel
comes out empty, takes more shared memory than the smallest GPU that runs its code has, or spills for lack of registers.
To be run in a process of its own: where TRITON_INTERPRET was set as triton was imported, nothing compiles.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from pagemill.attention.interface import AttentionBatch, GroupBatch
from pagemill.attention.triton_backend import TritonAttention
from pagemill.kvcache.device_pool import DevicePool
from pagemill.kvcache.kv_format import kv_format
from pagemill.kvcache.layer_groups import group_layers
from pagemill.kvcache.layout import FrameShape, block_major

CUOBJDUMP = Path(triton.__file__).with_name("backends") / "nvidia/bin/cuobjdump"
SHARED = {75: 64, 80: 99, 90: 227, 100: 227, 120: 99}
"""KiB of shared memory of a program by capability. 8.6 and 8.9 have less than 8.0, and take the same code."""
MOST_REGISTERS, STACK, WIDE_RESTS = 255, 32, 320
"""The compiler spills a few bytes where fewer registers let another program run beside; where it has no more registers,
it must not spill. One case has no tile that is small enough: heads of 256 with remainders, without matrix units."""
NARROW = ("int8", "fp8_e4m3", "fp8_e5m2", "int8/int4", "int4", "int4_mixed")
ROWS, TOKENS, CONTEXT, BLOCK_SIZE = 2, 101, 4096, 16


class Case(NamedTuple):
    element: torch.dtype
    format: str
    head_dim: int
    limited: bool = False
    """By a window and a soft cap."""

    def __str__(self) -> str:
        element = str(self.element).removeprefix("torch.")
        return f"{element} {self.format} {self.head_dim}" + ", limited" * self.limited


FEW = [
    (75, Case(torch.float16, "float16", 64)),
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


def launch(capability: int, case: Case) -> None:
    """Writes and attends rows of 1 and 100 queries, 8 heads on 2 KV heads, through `TritonAttention`."""
    kv, head_dim = kv_format(case.format), case.head_dim
    shape = FrameShape(group_layers([None]), 2, BLOCK_SIZE, head_dim, head_dim, kv)
    cache = DevicePool(16, shape, layout=block_major).layer(0)
    slots = torch.arange(TOKENS)
    group = GroupBatch(torch.zeros(ROWS, CONTEXT // BLOCK_SIZE, dtype=torch.int32), slots)
    if kv.precise:
        group = replace(group, remainders=group, precise=kv.precise)
    batch = AttentionBatch(
        query_start=torch.tensor([0, 1, TOKENS], dtype=torch.int32),
        context_lens=torch.tensor([CONTEXT, CONTEXT], dtype=torch.int32),
        positions=slots,
        groups=(group,),
        max_query_len=TOKENS - 1,
        max_context_len=CONTEXT,
    )
    query, new_key, new_value = torch.zeros(TOKENS, 12, case.head_dim, dtype=case.element).split((8, 2, 2), 1)
    attention = TritonAttention(divmod(capability, 10))
    attention.write(new_key, new_value, cache, slots, slots if kv.precise else None)
    options = {"window": 1000, "soft_cap": 30.0} if case.limited else {}
    attention.attend(query, cache, batch, 0, scale=0.1, **options)


def compiled(capability: int, case: Case) -> list[tuple[str, triton.compiler.CompiledKernel]]:
    """Returns the kernels that `launch` would start, compiled and not started."""
    kernels = []
    target = GPUTarget("cuda", capability, 32)
    device = SimpleNamespace(
        get_current_device=lambda: capability, get_current_stream=lambda _: 0, get_current_target=lambda: target
    )
    run = JITFunction.run

    def compile_only(self, *arguments, grid, warmup, **settings):
        name = self.__name__ + ("_in_chunks" if settings.get("IN_CHUNKS") else "")
        kernels.append((name, run(self, *arguments, grid=grid, warmup=True, **settings)))

    triton.runtime.driver.set_active(device)
    with mock.patch.object(JITFunction, "run", compile_only):
        launch(capability, case)
    return kernels


def resources(kernel: triton.compiler.CompiledKernel) -> tuple[int, int, int]:
    """Returns registers per thread, bytes of stack and bytes of shared memory."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        command = [CUOBJDUMP, "--dump-resource-usage", file.name]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    registers, stack = (int(re.search(rf"{name}:(\d+)", said)[1]) for name in ("REG", "STACK"))
    return registers, stack, kernel.metadata.shared


def main(capabilities: list[int]) -> int:
    fits = True
    cases = [case for capability in capabilities for case in usual_cases(capability)] or FEW
    print("capability  kernel            registers  stack  shared  case")
    for capability, case in cases:
        for name, kernel in compiled(capability, case):
            registers, stack, shared = resources(kernel)
            nothing = "\ttrap;" in kernel.asm["ptx"]  # the compiler has found it without meaning
            limit = STACK if registers < MOST_REGISTERS else 0
            if (
                case.format == "int4_mixed"
                and case.head_dim == 256
                and (capability == 75 or case.element == torch.float32)
            ):
                limit = WIDE_RESTS
            over = nothing or stack > limit or shared > SHARED[capability] * 1024
            fits &= not over
            said = f"{capability:10}  {name:16}  {registers:9}  {stack:5}  {shared:6}  {case}"
            print(said + ("  <- too much" if over else ""), flush=True)
    return not fits


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder, mock.patch.dict(os.environ, TRITON_CACHE_DIR=folder):
        sys.exit(main([int(argument) for argument in sys.argv[1:]]))
