"""Compiles the kernels of a decode step that begin while the one before ends (see `gpu_compiler.py`), and checks that
each waits for it before it reads or writes: a product may read weights, and nothing else.

python tests/ops/compile_early_for_gpus.py [CAPABILITY ...]
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

import gpu_compiler
from pagemill.attention.interface import AttentionBatch, GroupBatch
from pagemill.attention.triton_backend import TritonAttention
from pagemill.kvcache.device_pool import DevicePool
from pagemill.kvcache.kv_format import kv_format
from pagemill.kvcache.layer_groups import group_layers
from pagemill.kvcache.layout import FrameShape, block_major
from pagemill.ops.triton_early import EARLY_CAPABILITY
from pagemill.ops.triton_linear import Form, forms_of, multiply
from pagemill.ops.triton_ops import TritonOps

HIDDEN, CONTEXT, BLOCK_SIZE = 4096, 4096, 16
TILE_LOADS = 4
"""Loads per thread of a tile of 4 outputs times 1024 columns, 16 bytes each, by 128 threads."""
IN_PARTS = Form(16, 64, 128, 4, 4, 512)
"""A form beside those in use, whose parts are added."""


def usual_cases(capability: int) -> Iterator[tuple[int, bool]]:
    if capability >= 80:  # a step's weights are in bfloat16
        yield capability, True


def launch(capability: int, early: bool) -> None:
    of_gpu = divmod(capability, 10)
    ops, attention = TritonOps(of_gpu, early), TritonAttention(of_gpu, early)
    x, weight = torch.zeros(2, HIDDEN, dtype=torch.bfloat16), torch.zeros(HIDDEN)
    heads, angles, of_heads = x.new_zeros(2, 48, 128), torch.zeros(2, 64), torch.zeros(128)
    ops.rms_norm(x, weight, 1e-6)
    ops.add_rms_norm(x, x.clone(), weight, 1e-6, weight)
    ops.norm_and_rotate(heads[:, :40], 32, of_heads, of_heads, 1e-6, angles, angles)
    ops.gated(x, "silu")
    for form in (*forms_of(of_gpu), IN_PARTS):
        multiply(x[: form.rows], x.new_empty(HIDDEN, HIDDEN), None, form, early and of_gpu >= EARLY_CAPABILITY)
    shape = FrameShape(group_layers([None]), 8, BLOCK_SIZE, 128, 128, kv_format("bfloat16"))
    cache = DevicePool(16, shape, layout=block_major).layer(0)
    slots = torch.arange(2)
    batch = AttentionBatch(
        query_start=torch.arange(3, dtype=torch.int32),
        context_lens=torch.full((2,), CONTEXT, dtype=torch.int32),
        positions=torch.arange(2),
        groups=(GroupBatch(torch.zeros(2, CONTEXT // BLOCK_SIZE, dtype=torch.int32), slots),),
        max_query_len=1,
        max_context_len=CONTEXT,
    )
    query, key, value = heads.split((32, 8, 8), 1)
    attention.write(key, value, cache, slots)
    attention.attend(query, cache, batch, 0, scale=0.1)


def check(ptx: str) -> None:
    name, body = re.search(r"\.entry (\w+)", ptx)[1], ptx[ptx.index("{\n") :]
    if ".target sm_8" in ptx:
        assert "griddepcontrol" not in ptx, f"{name}: compute capability 8.0 has no such instruction"
        return
    before, *behind = body.split("griddepcontrol.wait")
    assert len(behind) == 1, f"{name} must wait once"
    assert "griddepcontrol.launch_dependents" in before, f"{name} lets the next one begin late"
    assert "ret;" not in before, f"{name} may end without waiting"
    touched = re.findall(r"\b(?:ld\.global|cp\.async\.bulk\.tensor|cp\.async\.c[ag]|st\.global|prefetch)", before)
    if name == "multiply_one":  # its first tile of weights: as much as each turn of its loop loads
        assert touched == ["ld.global"] * TILE_LOADS, f"{name}: {touched}"
    else:
        assert not touched, f"{name}: {touched}"


if __name__ == "__main__":
    gpu_compiler.main([(90, True), (80, True)], usual_cases, launch, check=check)
