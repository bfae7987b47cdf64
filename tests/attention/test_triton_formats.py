"""Tests what Triton's kernels read and write in narrow formats, byte by byte, and batches as CUDA graphs pad them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

import triton
import triton.language as tl
from elsewhere import Elsewhere
from paged_case import PagedCase

from interpreter import CAPABILITY, DEVICE
from pagemill.attention.interface import AttentionBatch, GroupBatch
from pagemill.attention.triton_backend import TritonAttention
from pagemill.attention.triton_tiles import widened
from pagemill.kvcache.layout import block_major

pytestmark = pytest.mark.gpu

EIGHT_BITS = [
    (torch.float8_e4m3fn, "e4m3", False),
    (torch.float8_e4m3fn, "e4m3", True),
    (torch.float8_e5m2, "e5m2", False),
    (torch.int8, "int8", False),
]


@triton.jit
def widen(elements, output, AS: tl.constexpr, PACKED: tl.constexpr, NATIVE: tl.constexpr):
    at = tl.arange(0, 256)
    wide = widened(tl.load(elements + at), AS, PACKED, NATIVE, output.dtype.element_ty)
    tl.store(output + at, wide)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("cached", "name", "native"), EIGHT_BITS)
def test_every_byte_is_widened_without_loss(cached: torch.dtype, name: str, native: bool, dtype: torch.dtype) -> None:
    if native and DEVICE == "cuda" and CAPABILITY < (8, 9):
        pytest.skip("this GPU does not convert e4m3")
    elements = torch.arange(256).to(torch.uint8)
    output = torch.empty(256, dtype=dtype, device=DEVICE)
    taken = elements.view(torch.int8) if name == "int8" else elements
    packed = DEVICE == "cuda" and CAPABILITY >= (8, 0)
    widen[(1,)](taken.to(DEVICE), output, AS=name, PACKED=packed, NATIVE=native, num_warps=1)
    expected = elements.view(cached).to(dtype)
    if native and DEVICE == "cpu":  # the interpreter takes e4m3's NaN for 480
        output, expected = output[elements % 128 != 127], expected[elements % 128 != 127]
    torch.testing.assert_close(output.cpu(), expected, rtol=0, atol=0, equal_nan=True)


@pytest.fixture
def backend(triton_attention: TritonAttention) -> Elsewhere:
    return Elsewhere(triton_attention, DEVICE)


def padded(batch: AttentionBatch, rows: int, max_context: int) -> AttentionBatch:
    """Returns the batch as a graph takes it: rows of no queries behind it, tables of -1, a greater maximum."""

    def behind(tensor: torch.Tensor, value: int) -> torch.Tensor:
        return torch.cat([tensor, tensor.new_full((rows, *tensor.shape[1:]), value)])

    def group(at: GroupBatch) -> GroupBatch:
        rest = None if at.remainders is None else group(at.remainders)
        return GroupBatch(behind(at.tables, -1), at.slots, rest, at.precise)

    return replace(
        batch,
        query_start=behind(batch.query_start, int(batch.query_start[-1])),
        context_lens=behind(batch.context_lens, 0),
        groups=tuple(group(each) for each in batch.groups),
        max_context_len=max_context,
    )


@pytest.mark.parametrize(("format", "options"), [(torch.float32, {}), ("int4_mixed", {"window": 300})])
def test_padded_rows_and_more_chunks_than_needed_change_no_bit(
    backend: Elsewhere, format: torch.dtype | str, options: dict[str, object]
) -> None:
    case = PagedCase([(300, 1), (20, 2), (600, 1)], dtype=format, layout=block_major, seed=41)  # as 4 rows
    case.write_all(backend)
    query, batch = case.whole()
    options = {"scale": 0.125, "return_lse": True, **options}
    expected = backend.attend(query, case.cache, batch, 0, **options)
    for result, one in zip(
        backend.attend(query, case.cache, padded(batch, 1, 2000), 0, **options), expected, strict=True
    ):
        assert torch.equal(result, one)


@pytest.mark.parametrize("context", [0, 1])
def test_padded_rows_with_a_query_harm_nobody(backend: Elsewhere, context: int) -> None:
    """A graph may give each padded row a query of no or one key, in a frame that all of them share."""
    case = PagedCase([(300, 1), (20, 1)], dtype="int4", layout=block_major, seed=42)
    case.write_all(backend)
    query, batch = case.whole()
    expected, _ = backend.attend(query, case.cache, padded(batch, 3, 2000), 0, scale=0.125)
    more = padded(batch, 3, 2000)
    tables = more.groups[0].tables
    if context:
        tables[2:, 0] = case.tables[1, 0]
    more = replace(
        more,
        query_start=torch.arange(6, dtype=torch.int32),
        context_lens=torch.tensor([300, 20, *[context] * 3], dtype=torch.int32),
        positions=torch.cat([batch.positions, torch.zeros(3, dtype=torch.int64)]),
        groups=(GroupBatch(tables, torch.cat([batch.groups[0].slots, torch.full((3,), -1)])),),
    )
    wide = torch.cat([query, torch.randn(3, *query.shape[1:])])
    output, lse = backend.attend(wide, case.cache, more, 0, scale=0.125, return_lse=True)
    assert torch.equal(output[:2], expected)
    assert not output.isnan().any()
    if not context:
        assert not output[2:].any()
        assert lse[2:].isneginf().all()
