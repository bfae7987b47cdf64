"""Every attention backend against the dense fp64 reference, on random scattered frames with poisoned slots."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable

import pytest
import torch
from paged_case import PagedCase

from pagemill.attention.cpu_backend import CpuAttention
from pagemill.attention.interface import AttentionBackend, merge_states
from pagemill.kvcache.layout import block_major, layer_major

MIXED = [(1, 1), (300, 1), (77, 33), (600, 600), (40, 0), (0, 0), (257, 2), (256, 256)]
"""Decode, chunk, prefill, verification, rows without queries, contexts on both sides of a partition's border."""
FEWER = [(1, 1), (300, 1), (77, 33), (600, 70), (40, 0), (0, 0), (257, 2), (256, 90)]
"""The same with shorter chunks: the reference's time is that of its queries."""


@pytest.fixture(params=[torch.float32, torch.int8], ids=["float32", "int8"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    """Of the cache."""
    dtype: torch.dtype = request.param
    return dtype


def check(
    backend: AttentionBackend,
    case: PagedCase,
    tolerance: float = 1e-5,
    expected: Callable[..., tuple[torch.Tensor, torch.Tensor]] = PagedCase.expected,
    **options: object,
) -> None:
    scale = case.head_dim**-0.5
    case.write_all(backend)
    query, batch = case.whole()
    output, lse = backend.attend(query, case.cache, batch, 0, scale=scale, return_lse=True, **options)
    expected_output, expected_lse = expected(case, scale=scale, in_bytes=case.is_in_bytes(backend), **options)
    assert output.dtype == query.dtype
    assert output.shape == query.shape
    assert lse is not None
    torch.testing.assert_close(output.double(), expected_output, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-5, atol=case.lse_tolerance(backend))


def test_mixed_rows(backend: AttentionBackend, dtype: torch.dtype) -> None:
    check(backend, PagedCase(MIXED, dtype=dtype, seed=1))


@pytest.mark.parametrize("options", [{}, {"window": 40, "soft_cap": 5.0}])
@pytest.mark.parametrize(
    ("dtype", "query_dtype"),
    [(torch.float32, torch.float32), (torch.int8, torch.float32), (torch.bfloat16, torch.bfloat16)],
)
def test_the_output_is_the_same_where_the_lse_is_not_asked_for(
    backend: AttentionBackend, dtype: torch.dtype, query_dtype: torch.dtype, options: dict[str, object]
) -> None:
    rows = [(1, 1), (300, 1), (77, 33), (257, 2), (600, 20), (40, 0)]
    case = PagedCase(rows, heads=6, dtype=dtype, query_dtype=query_dtype, seed=19)
    case.write_all(backend)
    query, batch = case.whole()
    output, lse = backend.attend(query, case.cache, batch, 0, scale=0.125, return_lse=True, **options)
    without, none = backend.attend(query, case.cache, batch, 0, scale=0.125, **options)
    assert lse is not None
    assert none is None
    assert torch.equal(without, output)


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256, 40, 20])
def test_head_sizes(backend: AttentionBackend, dtype: torch.dtype, head_dim: int) -> None:
    check(backend, PagedCase([(290, 1), (70, 20), (30, 30)], head_dim=head_dim, dtype=dtype, seed=head_dim))


@pytest.mark.parametrize(
    ("heads", "kv_heads"), [(1, 1), (3, 3), (9, 3), (7, 1), (12, 2), (16, 2), (20, 1), (64, 8), (64, 1)]
)
def test_heads_that_share_keys(backend: AttentionBackend, dtype: torch.dtype, heads: int, kv_heads: int) -> None:
    check(backend, PagedCase([(270, 1), (20, 20), (40, 3)], heads=heads, kv_heads=kv_heads, dtype=dtype, seed=heads))


@pytest.mark.parametrize("layout", [layer_major, block_major])
@pytest.mark.parametrize("block_size", [8, 16, 32, 64, 128, 256])
def test_block_sizes_and_layouts(
    backend: AttentionBackend, dtype: torch.dtype, block_size: int, layout: Callable[..., object]
) -> None:
    case = PagedCase(
        [(1, 1), (300, 1), (77, 33), (130, 130)], block_size=block_size, layout=layout, dtype=dtype, seed=block_size
    )
    check(backend, case)
    check(backend, case, window=50)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int8])
@pytest.mark.parametrize("query_dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dtypes(backend: AttentionBackend, dtype: torch.dtype, query_dtype: torch.dtype) -> None:
    case = PagedCase([(300, 1), (77, 33), (100, 100)], dtype=dtype, query_dtype=query_dtype, heads=6, seed=3)
    # Bytes of weights that lie in the middle of two may fall either way.
    in_16_bits = 1e-2 if query_dtype == torch.bfloat16 or case.is_in_bytes(backend) else 1e-3
    check(backend, case, 1e-5 if query_dtype == torch.float32 else in_16_bits)


@pytest.mark.parametrize("options", [{}, {"window": 40}, {"soft_cap": 5.0}])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "block_size", "layout"),
    [
        (9, 3, 64, 16, layer_major),
        (4, 1, 80, 8, layer_major),
        (32, 8, 128, 32, layer_major),
        (3, 3, 96, 256, layer_major),
        (8, 1, 256, 16, block_major),
        (7, 1, 20, 64, block_major),
        (64, 1, 40, 16, layer_major),
    ],
)
def test_bf16_queries_and_cache(
    backend: AttentionBackend,
    expected: Callable[..., tuple[torch.Tensor, torch.Tensor]],
    heads: int,
    kv_heads: int,
    head_dim: int,
    block_size: int,
    layout: Callable[..., object],
    options: dict[str, object],
) -> None:
    case = PagedCase(
        MIXED if heads == 9 else FEWER, heads=heads, kv_heads=kv_heads, head_dim=head_dim, block_size=block_size,
        dtype=torch.bfloat16, query_dtype=torch.bfloat16, layout=layout, seed=17,
    )  # fmt: skip
    check(backend, case, 1e-2, expected, **options)


@pytest.mark.parametrize("query_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("heads", "head_dim", "block_size"),
    [(2, 64, 16), (6, 64, 32), (24, 80, 8), (24, 128, 64), (2, 96, 16), (3, 31, 16)],
)
def test_halves_of_pairs_out_of_the_range(
    backend: AttentionBackend, heads: int, head_dim: int, block_size: int, query_dtype: torch.dtype
) -> None:
    """Neighbouring tokens of a bf16 cache lie side by side: one that no query sees is poisoned and the other is not."""
    rows = [(300, 1), (77, 33), (90, 20), (541, 3), (64, 64)]
    ranges = [(0, 299), (11, 60), (33, 65), (255, 514), (7, 8)]
    case = PagedCase(
        rows, heads=heads, kv_heads=1 if heads == 3 else 2, head_dim=head_dim, block_size=block_size,
        dtype=torch.bfloat16, query_dtype=query_dtype, seed=head_dim,
    )  # fmt: skip
    for row, (begin, end) in enumerate(ranges):
        for tensor in (case.keys[row], case.values[row]):
            tensor[:begin] = tensor[end:] = float("nan")
    case.write_all(backend)
    query, batch = case.whole()
    start, end = (torch.tensor(limits, dtype=torch.int32) for limits in zip(*ranges, strict=True))
    output, lse = backend.attend(query, case.cache, batch, 0, scale=0.1, key_start=start, key_end=end, return_lse=True)
    for row, (begin, last) in enumerate(ranges):
        for tensor in (case.keys[row], case.values[row]):
            tensor[:begin] = tensor[last:] = 0
    expected, expected_lse = case.expected(scale=0.1, key_start=start, key_end=end)
    tolerance = 1e-5 if query_dtype == torch.float32 else 1e-2
    torch.testing.assert_close(output.double(), expected, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-5, atol=case.lse_tolerance(backend))


@pytest.mark.parametrize("window", [1, 7, 64, 255, 256, 1000])
def test_windows(backend: AttentionBackend, dtype: torch.dtype, window: int) -> None:
    check(backend, PagedCase(MIXED, dtype=dtype, seed=window), window=window)


def test_blocks_out_of_the_window_are_not_needed(backend: AttentionBackend, dtype: torch.dtype) -> None:
    case = PagedCase([(600, 1), (500, 20)], dtype=dtype, seed=4)
    case.write_all(backend)
    query, batch = case.whole()
    expected, _ = backend.attend(query, case.cache, batch, 0, scale=0.1, window=100)
    case.tables[0, : (600 - 100) // 16] = -1
    case.tables[1, : (500 - 20 + 1 - 100) // 16] = -1
    _, batch = case.whole()
    output, _ = backend.attend(query, case.cache, batch, 0, scale=0.1, window=100)
    assert torch.equal(output, expected)


@pytest.mark.parametrize("soft_cap", [0.5, 30.0])
def test_soft_caps(backend: AttentionBackend, dtype: torch.dtype, soft_cap: float) -> None:
    check(backend, PagedCase(MIXED, dtype=dtype, seed=5), soft_cap=soft_cap)
    check(backend, PagedCase(MIXED, dtype=dtype, seed=6), soft_cap=soft_cap, window=40)


def test_key_ranges(backend: AttentionBackend, dtype: torch.dtype) -> None:
    start = torch.tensor([0, 256, 50, 300, 0, 0, 257, 10], dtype=torch.int32)
    end = torch.tensor([1, 299, 60, 512, 40, 0, 500, 10], dtype=torch.int32)
    check(backend, PagedCase(MIXED, dtype=dtype, seed=7), key_start=start)
    check(backend, PagedCase(MIXED, dtype=dtype, seed=8), key_end=end)
    check(backend, PagedCase(MIXED, dtype=dtype, seed=9), key_start=start, key_end=end, window=300)


def test_parts_of_the_keys_merge_to_the_whole(backend: AttentionBackend, dtype: torch.dtype) -> None:
    case = PagedCase([(500, 20), (100, 1)], dtype=dtype, seed=10)
    case.write_all(backend)
    query, batch = case.whole()
    border = torch.tensor([256, 120], dtype=torch.int32)
    options = {"scale": 0.125, "return_lse": True}
    whole, lse = backend.attend(query, case.cache, batch, 0, **options)
    before = backend.attend(query, case.cache, batch, 0, key_end=border, **options)
    after = backend.attend(query, case.cache, batch, 0, key_start=border, **options)
    merged, merged_lse = merge_states(*before, *after)
    torch.testing.assert_close(merged, whole, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(merged_lse, lse, rtol=1e-5, atol=1e-5)


def test_a_long_context_split_over_threads(backend: AttentionBackend, dtype: torch.dtype) -> None:
    check(backend, PagedCase([(5000, 1), (3, 1), (2100, 4)], heads=6, dtype=dtype, seed=11))
    check(backend, PagedCase([(3000, 2)], heads=2, kv_heads=1, dtype=dtype, seed=12), window=2000)


def test_slot_minus_one_is_not_written(backend: AttentionBackend) -> None:
    case = PagedCase([(20, 1)], seed=13)
    slots = case.slots(0, 0, 20)
    slots[3:7] = -1
    backend.write(case.keys[0], case.values[0], case.cache, slots)
    expected = 16 * case.kv_heads * case.head_dim * 2
    assert int((~case.pool.storage.isnan()).sum()) == expected


def test_write_converts_and_takes_strided_views(backend: AttentionBackend) -> None:
    case = PagedCase([(40, 1)], dtype=torch.bfloat16, seed=14)
    fused = torch.randn(40, 10, case.head_dim)
    key, value = fused[:, 4:6], fused[:, 6:8]
    slots = case.slots(0, 0, 40)
    backend.write(key, value, case.cache, slots)
    frames, offsets = slots // 16, slots % 16
    assert torch.equal(case.cache.key[frames, :, offsets].flatten(2), key.bfloat16())
    assert torch.equal(case.cache.value[frames, :, offsets // 2, offsets % 2], value.bfloat16())


def test_queries_may_be_strided_views(backend: AttentionBackend, dtype: torch.dtype) -> None:
    case = PagedCase([(70, 50), (20, 1)], dtype=dtype, seed=15)
    case.write_all(backend)
    query, batch = case.whole()
    fused = torch.randn(query.shape[0], 9, case.head_dim)
    fused[:, 2:6] = query
    expected, _ = backend.attend(query, case.cache, batch, 0, scale=0.1)
    output, _ = backend.attend(fused[:, 2:6], case.cache, batch, 0, scale=0.1)
    assert torch.equal(output, expected)


@pytest.mark.parametrize("key", [0, 50, 99])
@pytest.mark.parametrize(
    ("dtype", "query_dtype"),
    [(torch.float32, torch.float32), (torch.int8, torch.float32), (torch.bfloat16, torch.bfloat16)],
)
@pytest.mark.parametrize("queries", [1, 30])
def test_a_nan_key_spoils_its_own_row_only(
    backend: AttentionBackend, dtype: torch.dtype, query_dtype: torch.dtype, queries: int, key: int
) -> None:
    case = PagedCase([(130, queries), (300, 40)], dtype=dtype, query_dtype=query_dtype, seed=16)
    case.write_all(backend)
    query, batch = case.whole()
    clean, _ = backend.attend(query, case.cache, batch, 0, scale=0.1)
    case.keys[0][key] = float("nan")
    case.write_all(backend)
    output, _ = backend.attend(query, case.cache, batch, 0, scale=0.1)
    assert output[:queries].isnan().all()
    assert torch.equal(output[queries:], clean[queries:])


@pytest.mark.parametrize("queries", [1, 30])
@pytest.mark.parametrize("at", [0, 40, 255, 256, 299])
def test_bf16_scores_that_rise_by_hundreds(backend: AttentionBackend, queries: int, at: int) -> None:
    """Weights relative to a partition's first key would be infinite."""
    case = PagedCase([(330, queries)], dtype=torch.bfloat16, query_dtype=torch.bfloat16, heads=6, seed=18)
    case.keys[0][at:] *= 40
    check(backend, case, 1e-2)


def test_a_pool_that_nobody_uses_goes():
    backend, case = CpuAttention(), PagedCase([(20, 20)])
    case.write_all(backend)
    native = backend.native(case.cache)
    assert native is backend.native(case.cache)
    storage = weakref.ref(case.pool.storage)
    del case
    gc.collect()
    assert sys.getrefcount(native) == 2, "held here only"
    assert storage() is None
