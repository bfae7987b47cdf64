"""The CPU kernel gives a query the same bits alone, in any batch, in any chunk, in any frames and on any threads."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from paged_case import PagedCase

from harness import poison
from kernel_settings import kernels_of
from pagemill import _kernels
from pagemill.attention.cpu_backend import CpuAttention
from pagemill.kvcache.layout import block_major, layer_major

OPTIONS = [{}, {"window": 300}, {"soft_cap": 20.0}, {"window": 5}]


@pytest.fixture(params=_kernels.available_isas())
def backend(request: pytest.FixtureRequest) -> Iterator[CpuAttention]:
    with kernels_of(request.param, 1):
        yield CpuAttention()


def run(
    backend: CpuAttention, case: PagedCase, parts: list[tuple[int, int, int]], **options: object
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Output and log-sum-exp of each part (row, begin, end)."""
    query, batch = case.batch(parts)
    output, lse = backend.attend(query, case.cache, batch, 0, scale=0.125, return_lse=True, **options)
    assert lse is not None
    lengths = [end - begin for _, begin, end in parts]
    return list(zip(output.split(lengths), lse.split(lengths), strict=True))


def same(a: tuple[torch.Tensor, torch.Tensor], b: tuple[torch.Tensor, torch.Tensor]) -> bool:
    return torch.equal(a[0], b[0]) and torch.equal(a[1], b[1])


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize(
    ("dtype", "query_dtype", "head_dim", "block_size"),
    [
        (torch.float32, torch.float32, 64, 16),
        (torch.bfloat16, torch.float32, 80, 8),
        (torch.bfloat16, torch.bfloat16, 64, 16),
        (torch.bfloat16, torch.bfloat16, 80, 8),
        (torch.bfloat16, torch.bfloat16, 20, 32),
        ("fp8_e4m3", torch.bfloat16, 64, 16),
        ("fp8_e5m2", torch.bfloat16, 48, 32),
        (torch.int8, torch.float32, 96, 32),
        (torch.int8, torch.float32, 40, 8),
    ],
)
def test_alone_in_batch_and_in_chunks(
    backend: CpuAttention,
    dtype: torch.dtype,
    query_dtype: torch.dtype,
    head_dim: int,
    block_size: int,
    options: dict[str, object],
) -> None:
    rows = [(700, 700), (1, 1), (520, 1), (300, 47), (600, 13)]
    case = PagedCase(
        rows, heads=6, head_dim=head_dim, block_size=block_size, dtype=dtype, query_dtype=query_dtype, seed=21
    )
    case.write_all(backend)
    everything = [(row, 0, length) for row, (_, length) in enumerate(rows)]
    whole = run(backend, case, everything, **options)
    for part, result in zip(everything, whole, strict=True):
        assert same(run(backend, case, [part], **options)[0], result)
    random = torch.Generator().manual_seed(5)
    for row, (_, length) in enumerate(rows):
        begin = 0
        while begin < length:  # chunks of any size, each beside other rows
            end = min(length, begin + int(torch.randint(1, 150, (), generator=random)))
            got = run(backend, case, [(1, 0, 1), (row, begin, end), (3, 5, 40)], **options)[1]
            assert same(got, (whole[row][0][begin:end], whole[row][1][begin:end]))
            begin = end
    for token in (0, 1, 255, 256, 257, 699):  # one query at a time, as decode does
        got = run(backend, case, [(0, token, token + 1)], **options)[0]
        assert same(got, (whole[0][0][token : token + 1], whole[0][1][token : token + 1]))


def check_few_and_many_rows(backend: CpuAttention, case: PagedCase, whole: tuple[torch.Tensor, torch.Tensor]) -> None:
    for begin, end in ((0, 1), (1, 3), (3, 6), (6, 12), (12, 31), (31, 60)):
        assert same(run(backend, case, [(0, begin, end)])[0], (whole[0][begin:end], whole[1][begin:end]))


@pytest.mark.parametrize("heads", [2, 6, 8, 14, 40])
def test_few_and_many_rows_in_tiny_numbers(backend: CpuAttention, heads: int) -> None:
    """Tiles take subnormal numbers for zero, in products and in sums: so must what stands in for them with few rows."""
    case = PagedCase([(400, 60)], heads=heads, dtype=torch.bfloat16, query_dtype=torch.bfloat16, seed=27)
    case.keys[0] *= 2.0 ** torch.randint(-130, -110, case.keys[0].shape)
    case.values[0] *= 2.0 ** torch.randint(-136, -116, case.values[0].shape)
    case.write_all(backend)
    whole = run(backend, case, [(0, 0, 60)])[0]
    assert whole[0].any()
    check_few_and_many_rows(backend, case, whole)


@pytest.mark.parametrize("heads", [2, 6, 14])
def test_few_and_many_rows_with_scores_far_apart(backend: CpuAttention, heads: int) -> None:
    """Weights from 1 down through subnormal numbers to 0."""
    case = PagedCase([(400, 60)], heads=heads, dtype=torch.bfloat16, query_dtype=torch.bfloat16, seed=28)
    case.keys[0] *= 2.0 ** torch.randint(-4, 7, (400, 1, 1))
    case.write_all(backend)
    whole = run(backend, case, [(0, 0, 60)])[0]
    expected, expected_lse = case.expected(scale=0.125)
    torch.testing.assert_close(whole[0].double(), expected, rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(whole[1].double(), expected_lse, rtol=1e-5, atol=case.lse_tolerance(backend))
    check_few_and_many_rows(backend, case, whole)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("options", OPTIONS)
def test_threads(backend: CpuAttention, options: dict[str, object], dtype: torch.dtype) -> None:
    rows = [(5000, 1), (2600, 3), (500, 500), (40, 1)]
    query_dtype = torch.float32 if dtype == torch.int8 else dtype
    case = PagedCase(rows, heads=6, dtype=dtype, query_dtype=query_dtype, seed=22)
    case.write_all(backend)
    everything = [(row, 0, length) for row, (_, length) in enumerate(rows)]
    one = run(backend, case, everything, **options)
    for threads in (2, 3, 5):
        _kernels.set_num_threads(threads)
        for a, b in zip(run(backend, case, everything, **options), one, strict=True):
            assert same(a, b)
        assert same(run(backend, case, everything[:1], **options)[0], one[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_frames(backend: CpuAttention, dtype: torch.dtype) -> None:
    """The same keys in other frames."""
    results = []
    for seed in (1, 2):
        query_dtype = torch.float32 if dtype == torch.int8 else dtype
        case = PagedCase([(700, 30), (90, 90)], heads=6, dtype=dtype, query_dtype=query_dtype, seed=23)
        held = case.tables >= 0
        frames = case.tables[held]
        case.tables[held] = frames[torch.randperm(len(frames), generator=torch.Generator().manual_seed(seed))]
        case.write_all(backend)
        results.append(run(backend, case, [(0, 0, 30), (1, 0, 90)]))
    for a, b in zip(*results, strict=True):
        assert same(a, b)


@pytest.mark.parametrize("block_size", [16, 32])
@pytest.mark.parametrize("heads", [2, 6, 14])
def test_bf16_in_pairs_gives_the_bits_of_copied_keys_and_values(
    backend: CpuAttention, heads: int, block_size: int
) -> None:
    """What is read where it lies, and what is copied first because it lies otherwise."""
    results = []
    for layout in (layer_major, block_major):
        case = PagedCase(
            [(700, 1), (90, 90), (333, 3)], heads=heads, dtype=torch.bfloat16, query_dtype=torch.bfloat16, seed=29,
            block_size=block_size, layout=layout,
        )  # fmt: skip
        case.write_all(backend)
        results.append(run(backend, case, [(0, 0, 1), (1, 0, 90), (2, 0, 3)], window=500))
    for a, b in zip(*results, strict=True):
        assert same(a, b)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.int8])
def test_writing_in_parts_gives_the_same_cache(backend: CpuAttention, dtype: torch.dtype) -> None:
    case = PagedCase([(300, 1)], dtype=dtype, seed=24)
    case.write_all(backend)
    whole = case.pool.storage.clone()
    poison(case.pool)
    _kernels.set_num_threads(2)
    for begin, end in ((0, 1), (1, 18), (18, 21), (21, 300)):
        backend.write(case.keys[0][begin:end], case.values[0][begin:end], case.cache, case.slots(0, begin, end))
    assert torch.equal(case.pool.storage.view(torch.uint8), whole.view(torch.uint8))


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("options", [{}, {"window": 900}, {"soft_cap": 20.0}])
@pytest.mark.parametrize(
    ("dtype", "block_size", "shared"),
    [(torch.float32, 16, 1024), (torch.float32, 256, 600), (torch.bfloat16, 8, 800), (torch.int8, 16, 1024)],
)
def test_shared_prefixes(
    backend: CpuAttention, dtype: torch.dtype, block_size: int, shared: int, options: dict[str, object], threads: int
) -> None:
    """Rows that begin with the same frames, in groups of which one shares less, beside rows that share nothing."""
    rows = [(1100, 1), (1250, 2), (256, 1), (1031, 1), (1024, 1), (700, 30), (1090, 1), (1280, 1), (300, 1), (1600, 3)]
    rows += [(1400, 200), (1030, 6)]
    families = [(0, 1, 3, 6, 9, 10, 11), (4, 7), (5, 8)]
    query_dtype = torch.float32 if dtype == torch.int8 else dtype
    case = PagedCase(rows, heads=6, block_size=block_size, dtype=dtype, query_dtype=query_dtype, seed=25)
    for first, *others in families:
        for row in others:
            limit = 300 if row == 6 else shared
            tokens = min(limit, *(rows[i][0] - rows[i][1] for i in (first, row))) // block_size * block_size
            case.tables[row, : tokens // block_size] = case.tables[first, : tokens // block_size]
            case.keys[row][:tokens] = case.keys[first][:tokens]
            case.values[row][:tokens] = case.values[first][:tokens]
    case.write_all(backend)
    _kernels.set_num_threads(threads)
    everything = [(row, 0, length) for row, (_, length) in enumerate(rows)]
    together = run(backend, case, everything, **options)
    alone = CpuAttention(share_prefixes=False)
    for part, result, by_itself in zip(everything, together, run(alone, case, everything, **options), strict=True):
        assert same(result, by_itself)
        assert same(run(backend, case, [part], **options)[0], result)
    for part, result in zip(everything[::-1], run(backend, case, everything[::-1], **options), strict=True):
        assert same(result, together[part[0]])


def test_without_tables(backend: CpuAttention) -> None:
    """Frames that follow each other need no tables."""
    case = PagedCase([(300, 1)], seed=26)
    case.tables[0, :19] = torch.arange(19)
    case.write_all(backend)
    query, batch = case.whole()
    expected, _ = backend.attend(query, case.cache, batch, 0, scale=0.125)
    output = torch.empty_like(query)
    backend.native(case.cache).attend(
        query.data_ptr(), 0, query.stride(0), query.stride(1), case.heads, output.data_ptr(), 0, 0, 19,
        batch.query_start.data_ptr(), batch.context_lens.data_ptr(), batch.positions.data_ptr(), 0, 0, 1, 0.125, 0, 0.0,
        0, 0, 0, True,
    )  # fmt: skip
    assert torch.equal(output, expected)
