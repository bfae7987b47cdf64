"""Tests what Triton's kernels promise beside right results: bits that depend on a query's own row only, no waiting for
the device, and code that fits every GPU they are meant for."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from elsewhere import Elsewhere
from paged_case import PagedCase

from gpu_compiler import compiled_by
from interpreter import CAPABILITY, DEVICE, multiply_rows_alike
from pagemill.attention import triton_backend
from pagemill.attention.interface import GroupBatch
from pagemill.attention.triton_backend import TritonAttention, most_chunks, rows_at_once, shortest_chunk
from pagemill.kvcache.layout import block_major
from pagemill.triton_launch import Grid, Launcher

pytestmark = pytest.mark.gpu


@pytest.fixture
def equal_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    multiply_rows_alike(monkeypatch)


@pytest.fixture
def equal_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has a row cut as much among few rows as among many."""
    monkeypatch.setattr(triton_backend, "shortest_chunk", lambda rows: 256)


@pytest.fixture
def backend(triton_attention: TritonAttention) -> Elsewhere:
    return Elsewhere(triton_attention, DEVICE)


def attend(
    backend: Elsewhere, case: PagedCase, parts: list[tuple[int, int, int]], **options: object
) -> list[torch.Tensor]:
    """Outputs of parts (row, begin, end)."""
    query, batch = case.batch(parts)
    output, _ = backend.attend(query, case.cache, batch, 0, scale=0.125, **options)
    return list(output.split([end - begin for _, begin, end in parts]))


@pytest.mark.usefixtures("equal_rows", "equal_chunks")
@pytest.mark.parametrize(
    ("dtype", "query_dtype", "options"),
    [
        (torch.float32, torch.float32, {}),
        (torch.bfloat16, torch.bfloat16, {"window": 100}),
        ("int4_mixed", torch.bfloat16, {}),
    ],
)
def test_a_row_keeps_its_bits_in_any_batch(
    backend: Elsewhere, dtype: torch.dtype | str, query_dtype: torch.dtype, options: dict[str, object]
) -> None:
    rows = [(600, 1), (300, 3), (70, 40), (5, 5), (1, 1)]
    case = PagedCase(rows, heads=6, dtype=dtype, query_dtype=query_dtype, layout=block_major, seed=31)
    case.write_all(backend)
    everything = [(row, 0, length) for row, (_, length) in enumerate(rows)]
    together = attend(backend, case, everything, **options)
    for part, expected in zip(everything, together, strict=True):
        assert torch.equal(attend(backend, case, [part], **options)[0], expected)
    for part, again in zip(everything[::-1], attend(backend, case, everything[::-1], **options), strict=True):
        assert torch.equal(again, together[part[0]])


@pytest.mark.usefixtures("equal_rows")
def test_long_rows_keep_their_bits_in_any_chunks_of_prefill(backend: Elsewhere) -> None:
    case = PagedCase([(90, 90)], heads=6, layout=block_major, seed=32)
    case.write_all(backend)
    whole = attend(backend, case, [(0, 0, 90)])[0]
    for begin, end in ((0, 7), (7, 50), (50, 90)):
        assert torch.equal(attend(backend, case, [(0, begin, end)])[0], whole[begin:end])


def test_small_weights_of_small_int8_values_count(backend: Elsewhere) -> None:
    """A key far likelier than all others leaves these weights that fp16 has not, times their values' scales."""
    case = PagedCase([(600, 40), (600, 1)], dtype="int8", query_dtype=torch.float16, layout=block_major, seed=36)
    for queries, keys, values in zip(case.queries, case.keys, case.values, strict=True):
        queries.zero_()[..., 0] = 10
        keys.zero_()[0, :, 0] = 9.9 / (10 * 0.125)
        values.fill_(0.06)[0] = 0
    case.write_all(backend)
    prompt, decoded = attend(backend, case, [(0, 0, 40), (1, 0, 1)])
    others = torch.arange(560, 600) * torch.tensor(-9.9).exp()
    expected = 0.06 * others / (1 + others)
    torch.testing.assert_close(prompt.float(), expected[:, None, None].expand_as(prompt), rtol=0.03, atol=0)
    torch.testing.assert_close(decoded.float(), expected[-1:, None, None].expand_as(decoded), rtol=0.03, atol=0)


@pytest.mark.parametrize(
    ("capability", "dtype", "head_dim", "dims"),
    [
        ((8, 0), torch.bfloat16, 20, {"attend": 32, "attend_in_chunks": 32}),
        ((9, 0), torch.bfloat16, 20, {"attend": 64, "attend_in_chunks": 64}),
        ((10, 0), torch.bfloat16, 20, {"attend": 32, "attend_in_chunks": 32}),
        ((8, 0), "int4", 64, {"rotate_queries": 64, "attend": 64, "attend_in_chunks": 64}),
        ((9, 0), "int4", 64, {"rotate_queries": 64, "attend": 128, "attend_in_chunks": 64}),
    ],
)
def test_small_heads_are_padded_on_hopper(
    monkeypatch: pytest.MonkeyPatch,
    capability: tuple[int, int],
    dtype: torch.dtype | str,
    head_dim: int,
    dims: dict[str, int],
) -> None:
    started = {}

    def start(self: Launcher, *_: object) -> None:
        name = self.kernel.__name__ + "_in_chunks" * self.constants.get("IN_CHUNKS", False)
        started[name] = self.constants["DIMS"]

    monkeypatch.setattr(Launcher, "__call__", start)
    dtypes = {"dtype": dtype, "query_dtype": torch.bfloat16}
    case = PagedCase([(20, 1), (90, 60)], head_dim=head_dim, layout=block_major, **dtypes)
    query, batch = case.whole()
    TritonAttention(capability).attend(query, case.cache, batch, 0, scale=0.1)
    assert started == dims


def test_chunks_are_as_short_as_rows_are_few() -> None:
    assert [shortest_chunk(rows) for rows in (1, 2, 3, 4, 7, 8, 9, 300)] == [128, 256, 512, 512, 1024, 1024, 1024, 1024]


@pytest.mark.usefixtures("equal_rows")
def test_a_row_keeps_its_bits_among_as_many_rows_up_to_a_power_of_two(backend: Elsewhere) -> None:
    case = PagedCase([(600, 1), (300, 3), (900, 2), (5, 1)], layout=block_major, seed=35)
    case.write_all(backend)
    parts = [(0, 0, 1), (1, 0, 3), (2, 0, 2), (3, 0, 1)]
    together = attend(backend, case, parts)
    for one, expected in zip(attend(backend, case, parts[:3]), together[:3], strict=True):
        assert torch.equal(one, expected)


def test_there_are_as_many_chunks_as_the_kernel_cuts(monkeypatch: pytest.MonkeyPatch) -> None:
    assert most_chunks(100_000, 1024, 512) == 1024 // 512 + 2
    assert most_chunks(512, None, 512) == 1
    for name, value in (("LONGEST_CHUNK", 16), ("CHUNKS", 3)):
        monkeypatch.setattr(triton_backend, name, value)
    for window in (None, *range(1, 100)):
        most = 0
        for context in range(1, 150):
            span = context if window is None else min(context, window)
            chunk = 4
            while chunk < 16 and chunk * 3 < span:
                chunk *= 2
            for queries in range(1, min(4, context) + 1):
                first = 0 if window is None else max(0, context - queries - window + 1)
                most = max(most, (context - 1) // chunk - first // chunk + 1)
            assert most <= most_chunks(context, window, 4) <= most + 2, (context, window)


def test_chunks_grow_with_the_context(backend: Elsewhere, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_backend, "CHUNKS", 2)
    monkeypatch.setattr(triton_backend, "LONGEST_CHUNK", 1024)
    case = PagedCase([(300, 1), (700, 2), (2100, 1)], layout=block_major, seed=33)
    case.write_all(backend)
    for options in ({}, {"window": 900}):
        outputs = attend(backend, case, [(0, 0, 1), (1, 0, 2), (2, 0, 1)], **options)
        expected, _ = case.expected(scale=0.125, **options)
        torch.testing.assert_close(torch.cat(outputs).double(), expected, rtol=1e-5, atol=1e-5)


def test_rows_share_a_small_scratch_in_turn_and_keep_their_bits(
    backend: Elsewhere, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [(300, 1), (520, 2), (20, 1), (257, 3), (270, 30), (600, 1), (5, 1), (400, 4), (290, 1), (310, 2)]
    case = PagedCase(rows, heads=6, layout=block_major, seed=34)
    case.write_all(backend)
    query, batch = case.whole()
    starts = torch.arange(len(rows), dtype=torch.int32)
    options = {"window": 500, "key_start": starts, "key_end": batch.context_lens - starts, "return_lse": True}
    expected = backend.attend(query, case.cache, batch, 0, scale=0.125, **options)
    grids, start = [], Launcher.__call__

    def watched(self: Launcher, grid: Grid, *arguments: object) -> None:
        if self.kernel is triton_backend.merge_chunks:
            grids.append(grid)
        start(self, grid, *arguments)

    monkeypatch.setattr(Launcher, "__call__", watched)
    monkeypatch.setattr(triton_backend, "SCRATCH_BYTES", 1)
    results = backend.attend(query, case.cache, batch, 0, scale=0.125, **options)
    assert grids == [(16, 6, 1), (16, 6, 1), (8, 6, 1)], "4, 4 and 2 rows of at most 4 queries"
    for result, one in zip(results, expected, strict=True):
        assert torch.equal(result, one)


def test_the_scratch_is_bounded() -> None:
    assert rows_at_once(300, 1 << 19) == 300
    assert rows_at_once(600, 1 << 19) == 512
    assert rows_at_once(600, 3_000_000) == 88
    assert rows_at_once(3, 1 << 40) == 3
    assert rows_at_once(6, 1 << 40) == 4


def test_names_tell_gpus_and_kernels_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    names = {TritonAttention(capability).name for capability in ((8, 0), (8, 9), (9, 0))}
    monkeypatch.setattr(triton_backend, "KERNEL_VERSION", triton_backend.KERNEL_VERSION + 1)
    assert len(names | {TritonAttention((9, 0)).name}) == 4


@pytest.mark.skipif(DEVICE == "cpu", reason="no GPU")
def test_nothing_waits_for_the_gpu() -> None:
    backend = TritonAttention(CAPABILITY)
    case = PagedCase([(600, 1), (77, 33)], layout=block_major, device=DEVICE)
    query, batch = case.whole()
    key, value = (torch.cat(rows).to(DEVICE) for rows in (case.keys, case.values))
    slots = torch.cat([case.slots(0, 0, 600), case.slots(1, 0, 77)]).to(DEVICE)
    torch.cuda.set_sync_debug_mode("error")
    try:
        backend.write(key, value, case.cache, slots)
        output, _ = backend.attend(query, case.cache, batch, 0, scale=0.125)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    expected, _ = case.expected(scale=0.125)
    torch.testing.assert_close(output.cpu().double(), expected, rtol=1e-5, atol=1e-5)


def test_what_cannot_be_attended_is_refused() -> None:
    case, backend = PagedCase([(20, 1)], dtype=torch.bfloat16), TritonAttention(CAPABILITY)
    query, batch = case.whole()
    with pytest.raises(ValueError, match="side by side"):
        backend.attend(query, case.cache, batch, 0, scale=0.1)
    case = PagedCase([(20, 1)], layout=block_major)
    query, batch = case.whole()
    with pytest.raises(ValueError, match="heads must be a multiple of 2"):
        backend.attend(query[:, :3], case.cache, batch, 0, scale=0.1)
    with pytest.raises(ValueError, match="scale is 0"):
        backend.attend(query, case.cache, batch, 0, scale=0.0)
    slots = batch.groups[0].slots
    apart = query.repeat_interleave(2, 2)[..., ::2]
    with pytest.raises(ValueError, match=r"head_dim must be 64 and contiguous"):
        backend.attend(apart, case.cache, batch, 0, scale=0.1)
    for key, value in ((apart, query), (query, apart)):
        with pytest.raises(ValueError, match="last dimension contiguous"):
            backend.write(key[:, :2], value[:, :2], case.cache, slots)
    with pytest.raises(ValueError, match=r"slots must be contiguous torch.int64 \(1,\), not torch.int32"):
        backend.write(query[:, :2], query[:, :2], case.cache, slots.int())
    tables = batch.groups[0].tables
    for wrong in (tables.repeat_interleave(2, 1)[:, ::2], tables.long()):
        with pytest.raises(ValueError, match="tables must be int32"):
            backend.attend(query, case.cache, replace(batch, groups=(GroupBatch(wrong, slots),)), 0, scale=0.1)


def test_kernels_compile_for_every_gpu_and_fit() -> None:
    compiled = compiled_by(Path(__file__).with_name("compile_for_gpus.py"))
    assert all(stack == "0" for _, kernel, _, stack, _ in compiled if kernel != "attend"), compiled
    kernels = ["write_tokens", "attend", "attend_in_chunks", "merge_chunks"]
    of_four_bits = ["write_tokens", "rotate_queries", *kernels[1:]]
    assert [line[:2] for line in compiled] == [
        *(["75", kernel] for kernel in [*kernels, "attend_in_chunks"]),  # the last for rows with keys in common
        *(["90", kernel] for kernel in of_four_bits),
        *(["90", kernel] for kernel in kernels),
        *(["100", kernel] for kernel in of_four_bits),
    ]
