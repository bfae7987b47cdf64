"""Rows that begin with the same frames: Triton attends them together, and not a bit differs."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

import triton
import triton.language as tl
from elsewhere import Elsewhere
from paged_case import PagedCase

from interpreter import DEVICE, multiply_rows_alike
from pagemill import _kernels
from pagemill.attention import triton_backend
from pagemill.attention.interface import AttentionBatch
from pagemill.attention.triton_backend import TritonAttention, chunk_lengths, shortest_chunk
from pagemill.attention.triton_walks import chunk_of
from pagemill.kvcache.layout import block_major

pytestmark = pytest.mark.gpu

Result = tuple[torch.Tensor, torch.Tensor]
DECODING = [(300, 1), (270, 1), (140, 1), (383, 1), (260, 1)]
MIXED = [(300, 1), (270, 1), (290, 1), (60, 20), (260, 1)]
"""Rows as (context, queries)."""


@pytest.fixture(autouse=True)
def _short_chunks_and_equal_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_backend, "shortest_chunk", lambda rows: 128)
    multiply_rows_alike(monkeypatch)


@pytest.fixture
def backend(triton_attention: TritonAttention) -> Elsewhere:
    return Elsewhere(triton_attention, DEVICE)


def share(case: PagedCase, row: int, other: int, tokens: int) -> None:
    """Has a row begin with the frames of another one, up to its first query at most."""
    size = case.block_size
    tokens = min(tokens, *(case.rows[each][0] - case.rows[each][1] for each in (row, other))) // size * size
    case.tables[row, : tokens // size] = case.tables[other, : tokens // size]
    case.keys[row][:tokens] = case.keys[other][:tokens]
    case.values[row][:tokens] = case.values[other][:tokens]


def shared_case(backend: Elsewhere, seed: int, rows: list[tuple[int, int]] = DECODING, **settings: object) -> PagedCase:
    """Makes rows of which most begin as an earlier one does, some of these with less than a chunk."""
    case = PagedCase(rows, **{"heads": 3, "kv_heads": 1} | settings, layout=block_major, seed=seed)
    draw = random.Random(seed)
    for row in range(1, len(rows)):
        if draw.random() < 0.9:
            share(case, row, draw.randrange(row), draw.choice((50, 256, 300, 400)))
    case.write_all(backend)
    return case


def joined(backend: Elsewhere, case: PagedCase) -> tuple[torch.Tensor, AttentionBatch, list[int]]:
    """Returns queries and batch of all rows, in the order in which they have the most in common, and that order."""
    rows = np.arange(len(case.rows), dtype=np.int32)
    lengths, contexts = (np.array([case.rows[row][at] for row in rows], np.int32) for at in (1, 0))
    limits = np.where(lengths == 1, np.maximum(contexts - 1 - max(0, case.precise - 1), 0), 0).astype(np.int32)
    way = backend.joined_rows(case.heads, case.kv_heads)
    order, common = np.empty(len(rows), np.int32), np.empty(len(rows), np.int32)
    tables = case.tables.numpy()[None]
    chunks = way.chunks(contexts, len(rows))
    _kernels.order_rows(tables, [0], rows, limits, chunks, case.block_size, way.most, True, order, common)
    parts = order.tolist()
    query, batch = case.batch([(row, 0, case.rows[row][1]) for row in parts])
    return query, replace(batch, common=torch.from_numpy(common)), parts


def attend(
    backend: Elsewhere, case: PagedCase, query: torch.Tensor, batch: AttentionBatch, **options: object
) -> Result:
    output, lse = backend.attend(query, case.cache, batch, 0, scale=0.125, return_lse=True, **options)
    return output, lse


def check_same(one: Result, other: Result) -> None:
    for a, b in zip(one, other, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(
    ("dtype", "query_dtype", "settings", "options"),
    [
        (torch.float32, torch.float32, {"rows": MIXED}, {}),
        (torch.bfloat16, torch.bfloat16, {"heads": 14, "kv_heads": 2, "block_size": 8}, {"soft_cap": 20.0}),
        (torch.int8, torch.float16, {"heads": 1, "block_size": 256}, {}),
        ("int4_mixed", torch.bfloat16, {"heads": 2}, {}),
    ],
)
def test_rows_attended_together_have_the_bits_of_rows_attended_alone(
    backend: Elsewhere,
    dtype: torch.dtype | str,
    query_dtype: torch.dtype,
    settings: dict[str, object],
    options: dict[str, float],
) -> None:
    case = shared_case(backend, 73, dtype=dtype, query_dtype=query_dtype, **settings)
    query, batch, _ = joined(backend, case)
    assert batch.common.any()
    together = attend(backend, case, query, batch, **options)
    check_same(together, attend(backend, case, query, replace(batch, common=None), **options))


@pytest.mark.parametrize("seed", [71, 74])
def test_rows_attended_together_agree_with_dense_attention(backend: Elsewhere, seed: int) -> None:
    case = shared_case(backend, seed)
    query, batch, parts = joined(backend, case)
    output, lse = attend(backend, case, query, batch)
    check_same((output, lse), attend(backend, case, query, replace(batch, common=None)))
    every, every_lse = case.expected(scale=0.125)
    lengths = [length for _, length in case.rows]
    expected = torch.cat([every.split(lengths)[row] for row in parts])
    expected_lse = torch.cat([every_lse.split(lengths)[row] for row in parts])
    torch.testing.assert_close(output.double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rows", [DECODING, MIXED], ids=["decoding", "beside a prompt"])
def test_keys_in_common_are_read_once_by_the_first_row_s_table(backend: Elsewhere, rows: list[tuple[int, int]]) -> None:
    """The tables of other rows name a frame of NaN there."""
    case = shared_case(backend, 73, rows=rows)
    query, batch, _ = joined(backend, case)
    expected = attend(backend, case, query, batch)
    tables, group = batch.groups[0].tables.clone(), batch.groups[0]
    nowhere = next(frame for frame in range(len(case.cache.key)) if not (case.tables == frame).any())
    assert case.cache.key[nowhere].isnan().all()
    common = batch.common.tolist()
    for row, keys in enumerate(common):
        tables[row, : keys // case.block_size] = nowhere
    blind = replace(batch, groups=(replace(group, tables=tables),))
    check_same(attend(backend, case, query, blind), expected)
    by_itself, _ = attend(backend, case, query, replace(blind, common=None))
    starts = batch.query_start.tolist()
    spoilt = [bool(by_itself[starts[row]].isnan().all()) for row in range(len(common))]
    assert spoilt == [keys > 0 for keys in common]
    assert sum(spoilt) >= 2


@pytest.mark.parametrize(
    "options", [{"window": 300}, {"key_start": torch.zeros(5, dtype=torch.int32)}], ids=["window", "key_start"]
)
def test_windows_and_ranges_of_keys_are_attended_row_by_row(backend: Elsewhere, options: dict[str, object]) -> None:
    case = shared_case(backend, 73)
    query, batch, _ = joined(backend, case)
    expected = attend(backend, case, query, replace(batch, common=None), **options)
    check_same(attend(backend, case, query, batch, **options), expected)


def test_rows_beside_one_of_two_queries_are_attended_one_by_one(backend: Elsewhere) -> None:
    case = shared_case(backend, 73, rows=[*DECODING[:4], (260, 2)])
    query, batch, _ = joined(backend, case)
    assert batch.common.any()
    check_same(attend(backend, case, query, batch), attend(backend, case, query, replace(batch, common=None)))


def test_rows_that_share_a_scratch_in_turn_are_attended_together_within_it(
    backend: Elsewhere, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = shared_case(backend, 73)
    query, batch, _ = joined(backend, case)
    common = batch.common.tolist()
    assert common[4] > 0, "its first row is in another turn"
    expected = attend(backend, case, query, batch)
    monkeypatch.setattr(triton_backend, "SCRATCH_BYTES", 1)
    check_same(attend(backend, case, query, batch), expected)


def test_rows_that_pad_and_a_longer_context_change_no_bit(backend: Elsewhere) -> None:
    case = shared_case(backend, 73)
    query, batch, _ = joined(backend, case)
    expected = attend(backend, case, query, batch)
    group = batch.groups[0]
    padded = replace(
        batch,
        query_start=torch.cat([batch.query_start, batch.query_start[-1:].repeat(3)]),
        context_lens=torch.nn.functional.pad(batch.context_lens, (0, 3)),
        groups=(replace(group, tables=torch.nn.functional.pad(group.tables, (0, 0, 0, 3), value=-1)),),
        max_context_len=2000,
        common=torch.nn.functional.pad(batch.common, (0, 3)),
    )
    check_same(attend(backend, case, query, padded), expected)


def test_as_many_rows_are_attended_together_as_fit_into_a_tile() -> None:
    attention = TritonAttention((9, 0))
    most = {heads: attention.joined_rows(heads, 1) for heads in (1, 3, 4, 7, 8, 9, 16, 71)}
    assert {heads: each and each.most for heads, each in most.items()} == {
        1: 16, 3: 5, 4: 4, 7: 2, 8: 2, 9: None, 16: None, 71: None,
    }  # fmt: skip


@triton.jit
def tell_chunks(contexts, chunks, shortest, LONGEST: tl.constexpr, CHUNKS: tl.constexpr):
    at = tl.program_id(0)
    tl.store(chunks + at, chunk_of(tl.load(contexts + at), shortest, LONGEST, CHUNKS))


@pytest.mark.parametrize("rows", [1, 2, 5, 300])
def test_the_host_knows_how_long_chunks_are(rows: int) -> None:
    """At each border, and beside it."""
    borders = [length * triton_backend.CHUNKS for length in (128, 256, 512, 1024, 2048, 4096)]
    contexts = np.array([1, *(border + off for border in borders for off in (-1, 0, 1))], np.int32)
    chunks = torch.empty(len(contexts), dtype=torch.int32, device=DEVICE)
    cut = triton_backend.LONGEST_CHUNK, triton_backend.CHUNKS
    shortest = shortest_chunk(rows)
    tell_chunks[(len(contexts),)](torch.from_numpy(contexts).to(DEVICE), chunks, shortest, *cut)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton_backend, "shortest_chunk", shortest_chunk)
        assert chunks.tolist() == chunk_lengths(contexts, rows).tolist()
