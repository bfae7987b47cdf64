"""Every attention backend: the CPU's on every instruction set of this CPU, Triton's on a GPU, or else in Triton's
interpreter, which is slow: it takes the tests named in INTERPRETED."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator

import pytest
from elsewhere import Elsewhere
from paged_case import PagedCase
from torch import Tensor

from interpreter import CAPABILITY, DEVICE
from kernel_settings import kernels_of
from pagemill import _kernels
from pagemill.attention.cpu_backend import CpuAttention
from pagemill.attention.interface import AttentionBackend
from pagemill.attention.torch_backend import TorchAttention

INTERPRETED = {
    "test_mixed_rows": ["-float32"],
    "test_the_output_is_the_same_where_the_lse_is_not_asked_for": ["-dtype1-query_dtype1-options1"],
    "test_head_sizes": ["-float32-80", "-int8-96", "-float32-256"],
    "test_heads_that_share_keys": ["-float32-7-1", "-int8-9-3", "-float32-64-1"],
    "test_block_sizes_and_layouts": ["-float32-8-layer_major", "-int8-256-block_major"],
    "test_dtypes": [
        "-query_dtype0-dtype1",
        "-query_dtype1-dtype0",
        "-query_dtype1-dtype1",
        "-query_dtype1-dtype3",
        "-query_dtype2-dtype2",
    ],
    "test_bf16_queries_and_cache": ["-7-1-20-64-block_major-options2"],
    "test_halves_of_pairs_out_of_the_range": ["-2-96-16-query_dtype1"],
    "test_windows": ["-float32-7", "-int8-256"],
    "test_blocks_out_of_the_window_are_not_needed": ["-float32"],
    "test_key_ranges": ["-float32"],
    "test_parts_of_the_keys_merge_to_the_whole": ["-int8"],
    "test_a_long_context_split_over_threads": ["-float32"],
    "test_slot_minus_one_is_not_written": [""],
    "test_write_converts_and_takes_strided_views": [""],
    "test_queries_may_be_strided_views": ["-float32"],
    "test_a_nan_key_spoils_its_own_row_only": ["-1-dtype1-query_dtype1-50", "-30-dtype2-query_dtype2-99"],
    "test_bf16_scores_that_rise_by_hundreds": ["-255-30"],
    "test_slots_have_the_same_bits_from_every_backend": [
        "-64-16-int8/int4-layer_major-dtype0",
        "-96-8-int4_mixed-block_major-dtype1",
        "-96-8-int4-layer_major-dtype0",
        "-64-16-fp8_e4m3-block_major-dtype0",
        "-96-8-fp8_e5m2-block_major-dtype1",
    ],
    "test_attention_over_what_is_stored": [
        "-int8/int4-query_dtype1-shape1",
        "-int4_mixed-query_dtype1-shape3",
        "-fp8_e4m3-query_dtype1-shape2",
    ],
    "test_what_is_not_finite_spoils_its_own_row_only": ["-int4_mixed-keys-query_dtype1"],
    "test_every_backend_writes_the_same_bits": ["-64-16-layer_major-dtype0", "-80-8-block_major-dtype1"],
}
"""Ids of parameters by test, without the backend's."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if DEVICE != "cpu":
        return
    interpreted = {f"{name}[triton{at}]" for name, ids in INTERPRETED.items() for at in ids}
    left_out = {item for item in items if "[triton" in item.name and item.name not in interpreted}
    items[:] = [item for item in items if item not in left_out]
    config.hook.pytest_deselected(items=list(left_out))


@pytest.fixture(params=["torch", pytest.param("triton", marks=pytest.mark.gpu), *_kernels.available_isas()])
def backend(request: pytest.FixtureRequest) -> Iterator[AttentionBackend]:
    if request.param == "torch":
        yield TorchAttention()
    elif request.param == "triton":
        yield Elsewhere(request.getfixturevalue("triton_attention"), DEVICE)
    else:
        with kernels_of(request.param, 2):
            yield CpuAttention()


@pytest.fixture
def triton_attention(monkeypatch: pytest.MonkeyPatch) -> Iterator[AttentionBackend]:
    pytest.importorskip("triton")
    from pagemill.attention import triton_backend

    if DEVICE == "cpu":  # an operation's time hardly depends on how much it computes
        monkeypatch.setattr(triton_backend, "VECTORS", 512)
        monkeypatch.setattr(triton_backend, "short_tile", lambda *_: triton_backend.Tile(16, 128, 4, 1))
        monkeypatch.setattr(triton_backend, "long_tile", lambda *_: triton_backend.Tile(256, 128, 4, 1))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # NumPy's, of 1 / 0 and of NaN
        yield triton_backend.TritonAttention(CAPABILITY)


@pytest.fixture(scope="module")
def expected() -> Callable[..., tuple[Tensor, Tensor]]:
    """Gives `PagedCase.expected` of a case as it was drawn: it is computed once for all backends."""
    known: dict[str, tuple[Tensor, Tensor]] = {}

    def expected(case: PagedCase, **options: object) -> tuple[Tensor, Tensor]:
        key = repr((case, options))
        if key not in known:
            known[key] = case.expected(**options)
        return known[key]

    return expected
