"""Seeded keys and values reach the pool in whatever layout it has, and what is attended over them is right."""

from argparse import Namespace

import pytest
import torch
from benchmarks.long_context import FP32_ERROR, make, run
from benchmarks.seeded_context import Recorder


@pytest.mark.parametrize(("dtype", "kv_memory"), [("bfloat16", "48MiB"), ("float32", "96MiB")])
def test_attention_over_streamed_seeds_matches_fp64(tmp_path, dtype, kv_memory):
    core = make(Namespace(tokens=4096, dtype=dtype), str(tmp_path), kv_memory)
    recorder = Recorder(core)
    try:
        done = run(core, 4096, cold=False)
    finally:
        core.close()
    assert done.streamed > 4096 // 16 * core.executor.pool.layout.frame_bytes // 4
    assert max(recorder.errors(4096)) <= torch.finfo(getattr(torch, dtype)).eps + FP32_ERROR
