"""Kernels that begin early wait before they read what others write, on GPUs that can begin them early."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpu_compiler import compiled_by

pytest.importorskip("triton")

from pagemill.ops.triton_early import launch_options

KERNELS = {
    "normalize", "turn_heads", "gate", "multiply_one", "multiply_few", "add_parts", "write_tokens", "attend_in_chunks",
    "merge_chunks",
}  # fmt: skip
"""Kernels of a decode step."""


def test_every_kernel_of_a_step_waits_before_it_reads_or_writes() -> None:
    compiled = compiled_by(Path(__file__).with_name("compile_early_for_gpus.py"))
    for capability in ("80", "90"):
        assert {kernel for each, kernel, *_ in compiled if each == capability} == KERNELS


def test_kernels_that_begin_as_usual_are_launched_as_usual() -> None:
    assert launch_options(False) == {"EARLY": False}
    assert launch_options(True) == {"EARLY": True, "launch_pdl": True}
