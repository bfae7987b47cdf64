"""Rows of many queries by torch's own attention over gathered keys and values, against the dense fp64 reference:
torch's operator for CPUs stands in for the GPU's."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from paged_case import PagedCase
from test_paged_attention import FEWER, MIXED, check

from interpreter import DEVICE
from pagemill.attention import sdpa_backend, sdpa_gather
from pagemill.attention.interface import AttentionBackend
from pagemill.attention.sdpa_backend import SdpaAttention
from pagemill.attention.sdpa_operators import HeadShape, flash_of_cpu
from pagemill.attention.torch_backend import TorchAttention
from pagemill.kvcache.layout import block_major

pytestmark = pytest.mark.skipif(DEVICE != "cpu", reason="Triton's kernels take a GPU's memory only, where there is one")
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}


@pytest.fixture(autouse=True)
def _small_cuts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets short rows count as long, and cuts them into many pieces."""
    for name, value in (("LONG_QUERIES", 20), ("GRANULE", 16), ("MOST_KEYS", 100)):
        monkeypatch.setattr(sdpa_backend, name, value)
    for name, value in (("TOKENS", 1024), ("PAIRS", 2048)):  # the interpreter takes as long over a small tile
        monkeypatch.setattr(sdpa_gather, name, value)


class NeverAttends(TorchAttention):
    def attend(self, *arguments, **options):
        raise AssertionError("torch's operator takes this")


class Watched(TorchAttention):
    """Notes the batches that it attends."""

    def __init__(self) -> None:
        super().__init__()
        self.batches = []

    def attend(self, query, cache, batch, *arguments, **options):
        self.batches.append(batch)
        return super().attend(query, cache, batch, *arguments, **options)


def shape_of(case: PagedCase) -> HeadShape:
    return HeadShape(case.query_dtype, case.heads, case.kv_heads, case.head_dim)


def backend_of(case: PagedCase, rest: AttentionBackend) -> SdpaAttention:
    return SdpaAttention(flash_of_cpu(torch.device("cpu")), shape_of(case), rest, (8, 0))


def case_of(rows: list[tuple[int, int]], dtype: torch.dtype | str = torch.float32, **options: object) -> PagedCase:
    query_dtype = options.pop("query_dtype", dtype if isinstance(dtype, torch.dtype) else torch.float32)
    return PagedCase(rows, dtype=dtype, query_dtype=query_dtype, layout=block_major, **options)


@pytest.mark.parametrize(
    ("rows", "heads", "head_dim", "block_size", "dtype"),
    [
        (MIXED, 4, 64, 16, torch.float32),
        (FEWER, 6, 96, 8, torch.float32),
        (FEWER, 2, 80, 32, torch.bfloat16),
        ([(150, 150)], 8, 128, 16, torch.float32),
        ([(333, 77)], 4, 64, 64, torch.float32),
        ([(300, 1), (301, 5)], 4, 64, 16, torch.float32),
    ],
)
def test_rows_of_any_lengths(
    rows: list[tuple[int, int]], heads: int, head_dim: int, block_size: int, dtype: torch.dtype
) -> None:
    case = case_of(rows, dtype, heads=heads, head_dim=head_dim, block_size=block_size, seed=1)
    check(backend_of(case, TorchAttention()), case, TOLERANCE[dtype])


def test_triton_attends_what_is_left(triton_attention: AttentionBackend) -> None:
    rows = [(300, 1), (77, 33), (40, 0), (57, 2), (60, 60)]
    case = case_of(rows, heads=6, seed=2)
    check(backend_of(case, triton_attention), case)


@pytest.mark.parametrize("before", [0, 1, 15, 16, 40, 230])
def test_chunks_that_begin_anywhere(before: int) -> None:
    case = case_of([(before + 45, 45)], heads=6, seed=before)
    check(backend_of(case, NeverAttends()), case)


@pytest.mark.parametrize("dtype", ["int8", "fp8_e4m3", "fp8_e5m2"])
def test_narrow_caches_are_widened(dtype: str) -> None:
    case = case_of([(130, 50), (33, 33)], dtype, seed=3)
    check(backend_of(case, NeverAttends()), case)


@pytest.mark.parametrize(
    "options",
    [
        {"window": 40},
        {"soft_cap": 5.0},
        {"key_start": torch.tensor([0, 10], dtype=torch.int32)},
        {"key_end": torch.tensor([200, 50], dtype=torch.int32)},
    ],
    ids=str,
)
def test_what_is_limited_goes_to_the_rest(options: dict[str, object]) -> None:
    case = case_of([(300, 30), (77, 33)], seed=4)
    check(backend_of(case, TorchAttention()), case, **options)
    with pytest.raises(AssertionError, match="torch's operator takes this"):
        check(backend_of(case, NeverAttends()), case, **options)


def test_what_has_other_heads_or_is_not_floats_goes_to_the_rest() -> None:
    known = case_of([(77, 33)], torch.bfloat16)
    for case in (
        case_of([(77, 33)], torch.bfloat16, heads=8),
        case_of([(77, 33)], torch.float16),
        case_of([(77, 33)], torch.float16, query_dtype=torch.bfloat16),
        case_of([(77, 33)], "int4_mixed", query_dtype=torch.bfloat16),
        case_of([(77, 33)], "int8/int4", query_dtype=torch.bfloat16),
    ):
        check(backend_of(known, TorchAttention()), case, 2e-2)
        with pytest.raises(AssertionError, match="torch's operator takes this"):
            check(backend_of(known, NeverAttends()), case)


def test_the_rest_gets_the_short_rows_once_for_all_layers() -> None:
    case, rest = case_of([(300, 1), (77, 33), (40, 0), (50, 3), (60, 60)], seed=5), Watched()
    backend = backend_of(case, rest)
    case.write_all(backend)
    query, batch = case.whole()
    for _ in range(2):
        output, lse = backend.attend(query, case.cache, batch, 0, scale=0.1)
    assert lse is None
    torch.testing.assert_close(output.double(), case.expected(scale=0.1)[0], rtol=1e-5, atol=1e-5)
    short, again = rest.batches
    assert short is again
    assert short.host is not None
    assert (short.host.query.tolist(), short.host.context.tolist()) == ([1, 3], [300, 50])
    assert (short.max_query_len, short.max_context_len) == (3, 300)
    assert short.query_start.tolist() == [0, 1, 4]
    assert short.positions.tolist() == [299, 47, 48, 49]
    assert short.groups[0].slots.tolist() == [*case.slots(0, 299, 300), *case.slots(3, 47, 50)]


def test_steps_without_long_rows_and_captured_steps_stay_whole() -> None:
    case, rest = case_of([(300, 1), (77, 33)], seed=6), Watched()
    backend = backend_of(case, rest)
    case.write_all(backend)
    query, batch = case.whole()
    captured = replace(batch, host=None)
    backend.attend(query, case.cache, captured, 0, scale=0.1)
    query, short = case.batch([(0, 0, 1), (1, 0, 19)])
    backend.attend(query, case.cache, short, 0, scale=0.1)
    assert rest.batches == [captured, short]


def test_a_row_keeps_its_bits_in_any_batch() -> None:
    rows = [(200, 90), (70, 40), (31, 31), (300, 1)]
    case = case_of(rows, torch.bfloat16, heads=6, seed=7)
    backend = backend_of(case, TorchAttention())
    case.write_all(backend)

    def attended(parts: list[tuple[int, int, int]]) -> list[torch.Tensor]:
        query, batch = case.batch(parts)
        output, _ = backend.attend(query, case.cache, batch, 0, scale=0.1)
        return list(output.split([end - begin for _, begin, end in parts]))

    everything = [(row, 0, length) for row, (_, length) in enumerate(rows)]
    together = attended(everything)
    for part, expected in zip(everything[:3], together, strict=False):
        assert torch.equal(attended([part])[0], expected)
    assert all(torch.equal(a, b) for a, b in zip(attended(everything[::-1])[:0:-1], together, strict=False))


def test_a_nan_key_spoils_its_own_row_only() -> None:
    case = case_of([(130, 30), (300, 40)], seed=8)
    backend = backend_of(case, NeverAttends())
    case.write_all(backend)
    query, batch = case.whole()
    clean, _ = backend.attend(query, case.cache, batch, 0, scale=0.1)
    case.keys[0][50] = float("nan")
    case.write_all(backend)
    output, _ = backend.attend(query, case.cache, batch, 0, scale=0.1)
    assert output[:30].isnan().all()
    assert torch.equal(output[30:], clean[30:])
