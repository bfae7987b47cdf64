"""Adapters of FlashAttention and FlashInfer on modules that hold the libraries' rules, against the dense fp64
reference."""

from __future__ import annotations

from dataclasses import replace

import fake_flash_attn
import fake_flashinfer
import pytest
import torch
from paged_case import PagedCase
from test_paged_attention import MIXED, check

from pagemill.attention.flash_attn_backend import Fa2, Fa3, flash_attn_libraries
from pagemill.attention.flashinfer_backend import FlashInfer, flashinfer_libraries
from pagemill.attention.library_backend import LibraryAttention, Options
from pagemill.attention.torch_backend import TorchAttention
from pagemill.attention.window_tables import window_tables
from pagemill.kvcache.layout import block_major

LIBRARIES = {
    "fa2": (lambda: Fa2(fake_flash_attn.fa2()), 256),
    "fa3": (lambda: Fa3(fake_flash_attn.fa3()), 16),
    "flashinfer": (lambda: FlashInfer(fake_flashinfer.flashinfer()), 16),
}
SCALED = Options(scale=0.1, window=None, soft_cap=None)
TOLERANCE = {torch.bfloat16: 1e-2, torch.float16: 1e-3}


class OnlyWrites(TorchAttention):
    """Fails where attention does not go to the library."""

    def attend(self, *arguments, **options):
        raise AssertionError("the library takes this")


@pytest.fixture(params=LIBRARIES)
def library(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


def case_of(library: str, rows: list[tuple[int, int]], dtype: torch.dtype = torch.bfloat16, **shape: int) -> PagedCase:
    shape = {"block_size": LIBRARIES[library][1], "heads": 6, "head_dim": 64, **shape}
    return PagedCase(rows, dtype=dtype, query_dtype=dtype, layout=block_major, **shape)


def backend_of(library: str, rest: TorchAttention | None = None) -> LibraryAttention:
    return LibraryAttention(LIBRARIES[library][0](), rest or OnlyWrites())


@pytest.mark.parametrize("rows", [MIXED, [(300, 1), (1, 1), (256, 1)], [(300, 1), (40, 0)]])
@pytest.mark.parametrize(
    ("dtype", "options"),
    [(torch.float16, {}), *((torch.bfloat16, options) for options in ({}, {"window": 300}, {"soft_cap": 5.0}))],
)
def test_the_library_attends(
    library: str, rows: list[tuple[int, int]], dtype: torch.dtype, options: dict[str, float]
) -> None:
    check(backend_of(library), case_of(library, rows, dtype, seed=1), TOLERANCE[dtype], **options)


@pytest.mark.parametrize("options", [{"window": 8}, {"key_start": torch.tensor([0, 10], dtype=torch.int32)}])
def test_what_the_library_lacks_goes_to_the_rest(library: str, options: dict[str, object]) -> None:
    check(backend_of(library, TorchAttention()), case_of(library, [(300, 1), (77, 33)], seed=2), 1e-2, **options)
    with pytest.raises(AssertionError, match="the library takes this"):
        check(backend_of(library), case_of(library, [(300, 1), (77, 33)]), **options)


def test_blocks_before_a_window_may_be_gone(library: str) -> None:
    backend = backend_of(library)
    case = case_of(library, [(1200, 1), (900, 20)], seed=3)
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


def test_a_plan_of_the_host_lives_until_the_step_after_the_next_is_planned() -> None:
    library, case, options = FlashInfer(fake_flashinfer.flashinfer()), case_of("flashinfer", [(77, 33)], seed=4), SCALED
    case.write_all(OnlyWrites())
    query, batch = case.whole()
    plan = library.plan(query, case.cache, batch, 0, options)
    expected, _ = library.attend(query, case.cache, plan, options, return_lse=False)
    other = case.batch([(0, 5, 20)])
    library.plan(other[0], case.cache, other[1], 0, options)
    assert torch.equal(library.attend(query, case.cache, plan, options, return_lse=False)[0], expected)


def test_a_step_whose_lengths_the_host_does_not_know_goes_to_the_rest() -> None:
    case = case_of("flashinfer", [(300, 1), (77, 1)], seed=5)
    case.write_all(OnlyWrites())
    query, batch = case.whole()
    captured = replace(batch, host=None)
    with pytest.raises(AssertionError, match="the library takes this"):
        backend_of("flashinfer").attend(query, case.cache, captured, 0, scale=0.1)
    backend = backend_of("flashinfer", TorchAttention())
    expected, output = (backend.attend(query, case.cache, each, 0, scale=0.1)[0] for each in (batch, captured))
    torch.testing.assert_close(output, expected, rtol=1e-2, atol=1e-2)


@pytest.mark.gpu
@pytest.mark.skipif(
    not torch.cuda.is_available() or not (flash_attn_libraries() or flashinfer_libraries()),
    reason="needs a GPU, and flash-attn or flashinfer-python",
)
def test_the_real_library() -> None:
    for library in (*flash_attn_libraries(), *flashinfer_libraries()):
        support = library.support
        if torch.cuda.get_device_capability() > (support.most_capability or (99, 0)):
            continue
        backend = LibraryAttention(library, OnlyWrites())
        case = PagedCase(
            MIXED, dtype=torch.bfloat16, query_dtype=torch.bfloat16, layout=block_major, device="cuda",
            block_size=(support.block_sizes or (16,))[-1], heads=8, head_dim=64, seed=4,
        )  # fmt: skip
        case.write_all(backend)
        query, batch = case.whole()
        for options in ({}, {"window": 300}, {"soft_cap": 5.0}):
            output, lse = backend.attend(query, case.cache, batch, 0, scale=0.1, return_lse=True, **options)
            expected, expected_lse = case.expected(scale=0.1, **options)
            torch.testing.assert_close(output.cpu().double(), expected, rtol=1e-2, atol=1e-2)
            torch.testing.assert_close(lse.cpu().double(), expected_lse, rtol=1e-3, atol=1e-3)
