"""Torch's own operators of attention: which are taken, and into which sizes rows are cut for them. On a GPU, cuDNN's
and FlashAttention's through the whole backend, against the dense fp64 reference."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from test_sdpa import case_of, shape_of

from gpu_compiler import compiled_by
from interpreter import CAPABILITY, DEVICE
from pagemill.attention import sdpa_operators
from pagemill.attention.sdpa_backend import SdpaAttention, cut
from pagemill.attention.sdpa_gather import Part
from pagemill.attention.sdpa_operators import HeadShape, Operator, cudnn, flash, flash_of_cpu, working_operator
from pagemill.attention.triton_backend import TritonAttention

pytestmark = pytest.mark.gpu
CPU = torch.device("cpu")
TOLERANCE = {torch.bfloat16: 1e-2, torch.float16: 2e-3}
on_a_gpu = pytest.mark.skipif(DEVICE == "cpu", reason="no GPU")


def test_few_sizes_come_up_and_cover_all_keys() -> None:
    sizes, queries_at_once = set(), set()
    for before in (*range(0, 5000, 37), *range(5000, 140_000, 997)):
        for queries in (512, 700, 2048, 2500, 8191, 8192, 32768):
            pieces, front, square, at_once = cut(queries, before)
            ends = [0, *(begin + count for begin, count in pieces)]
            assert [begin for begin, _ in pieces] == ends[:-1]
            assert ends[-1] + front == before
            assert front < 256
            assert queries <= at_once <= max(queries + 256, queries * 9 / 8)
            assert square >= front + queries
            sizes |= {count for _, count in pieces}
            queries_at_once.add(at_once)
    assert sizes == {256, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192}
    assert queries_at_once == {512, 768, 2048, 2560, 8192, 32768}


def test_an_operator_that_fails_or_is_wrong_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = HeadShape(torch.bfloat16, 4, 2, 64)
    assert working_operator(shape, CPU).name == "flash_for_cpu"

    def raises(*_: object) -> None:
        raise RuntimeError("no plan\nfor this")

    def wrong(*given):
        output, lse = flash_of_cpu(CPU).attend(*given)
        return output, lse * 1.4427

    def nan(*given):
        output, lse = flash_of_cpu(CPU).attend(*given)
        return output * torch.nan, lse

    for attend, reason in (
        (raises, "new fails here (no plan)"), (wrong, "new is wrong by 3"), (nan, "new is wrong by inf")
    ):  # fmt: skip
        monkeypatch.setattr(sdpa_operators, "flash_of_cpu", lambda _, attend=attend: Operator("new", attend))
        assert reason in working_operator(shape, CPU)


def test_kernels_compile_for_gpus_and_fit() -> None:
    compiled = compiled_by(Path(__file__).with_name("compile_gather_for_gpus.py"))
    kernels = ["gather_tokens", "merge_parts", "merge_parts"]
    assert [line[:2] for line in compiled] == [["90", kernel] for kernel in kernels] + [
        ["80", kernel] for kernel in kernels
    ]


OPERATORS = {"cudnn": cudnn, "flash": flash}
ROWS = [[(512, 512)], [(1111, 1111)], [(1543, 600)], [(9000, 515)], [(300, 1), (2100, 700), (40, 3), (513, 513)]]


@on_a_gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(8, 2, 128), (4, 4, 64), (8, 2, 96)])
@pytest.mark.parametrize("operator", OPERATORS)
def test_operators_on_the_gpu(
    operator: str, heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype, expected: Callable[..., Part]
) -> None:
    found = OPERATORS[operator](torch.device(DEVICE))
    if isinstance(found, str):
        pytest.skip(found)
    for rows in ROWS:
        case = case_of(rows, dtype, heads=heads, kv_heads=kv_heads, head_dim=head_dim, device=DEVICE, seed=9)
        backend = SdpaAttention(found, shape_of(case), TritonAttention(CAPABILITY), CAPABILITY)
        case.write_all(backend)
        query, batch = case.whole()
        backend.attend(query, case.cache, batch, 0, scale=head_dim**-0.5)  # cuDNN prepares itself
        _, batch = case.whole()
        torch.cuda.set_sync_debug_mode("error")
        try:
            output, lse = backend.attend(query, case.cache, batch, 0, scale=head_dim**-0.5, return_lse=True)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        expected_output, expected_lse = expected(case, scale=head_dim**-0.5)
        torch.testing.assert_close(output.cpu().double(), expected_output, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
        torch.testing.assert_close(lse.cpu().double(), expected_lse, rtol=1e-4, atol=1e-3)


@on_a_gpu
@pytest.mark.parametrize("dtype", ["int8", "fp8_e4m3", "fp8_e5m2"])
def test_narrow_caches_on_the_gpu(dtype: str) -> None:
    case = case_of([(1543, 600)], dtype, query_dtype=torch.bfloat16, heads=8, head_dim=128, device=DEVICE, seed=10)
    found = working_operator(shape_of(case), torch.device(DEVICE))
    assert not isinstance(found, str), found
    backend = SdpaAttention(found, shape_of(case), TritonAttention(CAPABILITY), CAPABILITY)
    case.write_all(backend)
    query, batch = case.whole()
    output, _ = backend.attend(query, case.cache, batch, 0, scale=0.1)
    torch.testing.assert_close(output.cpu().double(), case.expected(scale=0.1)[0], rtol=2e-2, atol=2e-2)


@on_a_gpu
@pytest.mark.parametrize("head_dim", [64, 96, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_some_operator_works_on_this_gpu(head_dim: int, dtype: torch.dtype) -> None:
    for heads, kv_heads in ((32, 8), (8, 8), (7, 1)):
        found = working_operator(HeadShape(dtype, heads, kv_heads, head_dim), torch.device(DEVICE))
        assert not isinstance(found, str), found
        assert torch.cuda.get_device_capability() < (9, 0) or found.name.startswith("cudnn"), found.name
