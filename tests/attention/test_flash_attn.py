"""FlashAttention's adapters on modules that hold the libraries' rules, against the dense fp64 reference."""

from __future__ import annotations

import fake_flash_attn
import pytest
import torch
from paged_case import PagedCase
from test_paged_attention import MIXED, check

from pagemill.attention.flash_attn_backend import Fa2, Fa3, FlashAttention, flash_attn_libraries
from pagemill.attention.torch_backend import TorchAttention
from pagemill.attention.window_tables import window_tables
from pagemill.kvcache.layout import block_major

VERSIONS = {"fa2": (lambda: Fa2(fake_flash_attn.fa2()), 256), "fa3": (lambda: Fa3(fake_flash_attn.fa3()), 16)}
TOLERANCE = {torch.bfloat16: 1e-2, torch.float16: 1e-3}


class OnlyWrites(TorchAttention):
    """Fails where attention does not go to the library."""

    def attend(self, *arguments, **options):
        raise AssertionError("the library takes this")


@pytest.fixture(params=VERSIONS)
def version(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


def case_of(version: str, rows: list[tuple[int, int]], dtype: torch.dtype = torch.bfloat16, **shape: int) -> PagedCase:
    shape = {"block_size": VERSIONS[version][1], "heads": 6, **shape}
    return PagedCase(rows, dtype=dtype, query_dtype=dtype, layout=block_major, **shape)


@pytest.mark.parametrize("rows", [MIXED, [(300, 1), (1, 1), (256, 1)], [(300, 1), (40, 0)]])
@pytest.mark.parametrize(
    ("dtype", "options"),
    [(torch.float16, {}), *((torch.bfloat16, options) for options in ({}, {"window": 300}, {"soft_cap": 5.0}))],
)
def test_the_library_attends(
    version: str, rows: list[tuple[int, int]], dtype: torch.dtype, options: dict[str, float]
) -> None:
    backend = FlashAttention(VERSIONS[version][0](), OnlyWrites())
    check(backend, case_of(version, rows, dtype, seed=1), TOLERANCE[dtype], **options)


@pytest.mark.parametrize("options", [{"window": 8}, {"key_start": torch.tensor([0, 10], dtype=torch.int32)}])
def test_what_the_library_lacks_goes_to_the_rest(version: str, options: dict[str, object]) -> None:
    backend = FlashAttention(VERSIONS[version][0](), TorchAttention())
    check(backend, case_of(version, [(300, 1), (77, 33)], seed=2), 1e-2, **options)
    with pytest.raises(AssertionError, match="the library takes this"):
        check(FlashAttention(VERSIONS[version][0](), OnlyWrites()), case_of(version, [(300, 1), (77, 33)]), **options)


def test_blocks_before_a_window_may_be_gone(version: str) -> None:
    backend = FlashAttention(VERSIONS[version][0](), OnlyWrites())
    case = case_of(version, [(1200, 1), (900, 20)], seed=3)
    case.write_all(backend)
    query, batch = case.whole()
    expected, _ = backend.attend(query, case.cache, batch, 0, scale=0.1, window=300)
    for row, first in enumerate([1200 - 300, 900 - 20 + 1 - 300]):
        gone = case.tables[row, : first // case.block_size]
        assert len(gone)
        case.cache.value[gone.long()] = float("nan")
        case.tables[row, : len(gone)] = -1
    _, batch = case.whole()
    output, _ = backend.attend(query, case.cache, batch, 0, scale=0.1, window=300)
    assert torch.equal(output, expected)


def test_a_window_of_a_block_has_no_full_block() -> None:
    _, batch = case_of("fa3", [(40, 1)]).whole()
    with pytest.raises(ValueError, match="longer than a block of 16"):
        window_tables(batch, 0, 16, 16)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available() or not flash_attn_libraries(), reason="flash-attn needs a GPU")
def test_the_real_library() -> None:
    from pagemill.attention.support import Support

    for library in flash_attn_libraries():
        support: Support = library.support
        if torch.cuda.get_device_capability() > (support.most_capability or (99, 0)):
            continue
        backend = FlashAttention(library, OnlyWrites())
        case = PagedCase(
            MIXED, dtype=torch.bfloat16, query_dtype=torch.bfloat16, layout=block_major, device="cuda",
            block_size=support.block_sizes[-1], heads=8, seed=4,
        )  # fmt: skip
        case.write_all(backend)
        query, batch = case.whole()
        for options in ({}, {"window": 300}, {"soft_cap": 5.0}):
            output, lse = backend.attend(query, case.cache, batch, 0, scale=0.1, return_lse=True, **options)
            expected, expected_lse = case.expected(scale=0.1, **options)
            torch.testing.assert_close(output.cpu().double(), expected, rtol=1e-2, atol=1e-2)
            torch.testing.assert_close(lse.cpu().double(), expected_lse, rtol=1e-3, atol=1e-3)
