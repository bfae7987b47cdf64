"""Keys and values in 8 and 4 bits: near what was written, the same bits from torch and every kernel, and attention over
what is stored as near the reference as over floats, with bits that depend on a query alone."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import pytest
import torch
from paged_case import PagedCase

from harness import frame_shape, poison
from pagemill import _kernels
from pagemill.attention.cpu_backend import CpuAttention
from pagemill.attention.interface import AttentionBackend, LayerCache
from pagemill.attention.quantize import LEAST, MOST, dequantize_int4, quantize_int4, rotate, rotated_together
from pagemill.attention.torch_backend import TorchAttention
from pagemill.kvcache.device_pool import DevicePool
from pagemill.kvcache.layout import block_major, layer_major

FORMATS = ["int8", "int8/int4", "int4", "int4_mixed", "fp8_e4m3", pytest.param("fp8_e5m2", marks=pytest.mark.slow)]
ROWS = [(1, 1), (300, 1), (77, 33), (270, 90), (40, 0), (0, 0), (257, 2), (519, 7)]
SHAPES = [
    (6, 2, 64, 16),
    (9, 3, 64, 32),
    (8, 1, 128, 16),
    (7, 1, 96, 8),
    (2, 2, 32, 256),
    (16, 2, 256, 64),
    (3, 1, 96, 128),
]
"""Heads, KV heads, head size, block size."""
OPTIONS = [{}, {"window": 60}, {"soft_cap": 5.0}]


@pytest.fixture
def kernel_backend() -> Callable[[str], CpuAttention]:
    def make(isa: str) -> CpuAttention:
        _kernels.use_isa(isa)
        _kernels.set_num_threads(2)
        return CpuAttention()

    before, threads = _kernels.isa(), _kernels.num_threads()
    yield make
    _kernels.use_isa(before)
    _kernels.set_num_threads(threads)


def vectors(head_dim: int) -> torch.Tensor:
    """[tokens, 2, head_dim]: of all magnitudes, and some that are special."""
    random = torch.Generator().manual_seed(head_dim)
    x = torch.randn(40, 2, head_dim, generator=random) * 10.0 ** torch.randint(-20, 20, (40, 2, 1), generator=random)
    x[3], x[4], x[5] = 0, -0.0, LEAST / 4
    x[6, 0] = torch.arange(head_dim) + 1000.0
    x[7] = torch.finfo(torch.float32).max
    x[8, 1, 5] = float("nan")
    x[9, 0, head_dim - 1] = float("-inf")
    x[10] = -3.0
    x[11, 0, :2], x[11, 0, 2:] = MOST, -1.0
    return x


def test_numbers_are_within_half_a_scale() -> None:
    x = vectors(64)
    stored, words = quantize_int4(x, 32)
    assert stored.shape == (40, 2, 32)
    assert words.shape == (40, 2, 2)
    wide = dequantize_int4(stored, words).double()
    groups = x.unflatten(-1, (2, 32)).double()
    finite = groups.isfinite().all(-1) & (groups.abs().amax(-1) <= MOST)
    assert torch.equal(wide.unflatten(-1, (2, 32)).isnan().all(-1), ~finite)
    # Half a step, and what rounding the scale and the low to bf16 adds.
    off = (groups.amax(-1) - groups.amin(-1)) / 30 + groups.abs().amax(-1) / 256 + LEAST
    error = (wide.unflatten(-1, (2, 32)) - groups).abs().amax(-1)
    assert bool((error <= off)[finite].all())


@pytest.mark.parametrize("head_dim", [32, 64, 96, 160])
def test_rotation_keeps_products_and_spreads_what_is_large(head_dim: int) -> None:
    a, b = torch.randn(2, 5, head_dim)
    together = rotated_together(head_dim)
    assert head_dim % together == 0
    torch.testing.assert_close((rotate(a) * rotate(b)).sum(-1) / together, (a * b).sum(-1))
    one = torch.zeros(head_dim)
    one[3] = 1.0
    assert rotate(one)[:together].abs().tolist() == [1.0] * together


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layout", [layer_major, block_major])
@pytest.mark.parametrize("format", ["int8/int4", "int4", "int4_mixed", "fp8_e4m3", "fp8_e5m2"])
@pytest.mark.parametrize(("head_dim", "block_size"), [(64, 16), (96, 8)])
def test_slots_have_the_same_bits_from_every_backend(
    backend: AttentionBackend,
    format: str,
    head_dim: int,
    block_size: int,
    layout: Callable[..., object],
    dtype: torch.dtype,
) -> None:
    key, value = vectors(head_dim).to(dtype), vectors(head_dim).flip(0).to(dtype)
    slots = torch.randperm(6 * block_size, generator=torch.Generator().manual_seed(1))[:40]
    slots[[2, 20]] = -1
    rest = None
    if format == "int4_mixed":
        rest = slots.flip(0).clone() + 6 * block_size
        rest[[2, 5, 19, 20, 37]] = -1

    def written(backend: AttentionBackend) -> torch.Tensor:
        pool = DevicePool(13, frame_shape([None, None], 2, head_dim, block_size, format), layout=layout)
        poison(pool)
        backend.write(key, value, pool.layer(1), slots, rest)
        return pool.frames.bytes

    assert torch.equal(written(backend), written(TorchAttention()))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("query_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("format", FORMATS)
def test_attention_over_what_is_stored(
    backend: AttentionBackend,
    expected: Callable[..., tuple[torch.Tensor, torch.Tensor]],
    format: str,
    query_dtype: torch.dtype,
    shape: tuple[int, int, int, int],
) -> None:
    tolerance = 1e-5 if query_dtype == torch.float32 else 1e-2
    at, (heads, kv_heads, head_dim, block_size) = SHAPES.index(shape), shape
    options = OPTIONS[at % len(OPTIONS)]
    case = PagedCase(
        ROWS, heads=heads, kv_heads=kv_heads, head_dim=head_dim, block_size=block_size, dtype=format,
        query_dtype=query_dtype, layout=block_major if at % 3 == 2 else layer_major, seed=at,
    )  # fmt: skip
    case.write_all(backend)
    query, batch = case.whole()
    output, lse = backend.attend(query, case.cache, batch, 0, scale=head_dim**-0.5, return_lse=True, **options)
    expected_output, expected_lse = expected(case, scale=head_dim**-0.5, in_bytes=case.is_in_bytes(backend), **options)
    torch.testing.assert_close(output.double(), expected_output, rtol=tolerance, atol=tolerance)
    assert lse is not None
    torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-5, atol=case.lse_tolerance(backend))


@pytest.mark.parametrize("share", [2, 64, 400, 3000])
@pytest.mark.parametrize("format", ["int8", "int8/int4", "int4", "int4_mixed"])
def test_many_small_weights_are_not_lost_beside_a_great_one(backend: AttentionBackend, format: str, share: int) -> None:
    """One key has `share` times the weight of each of the others, whose values have much in common."""
    case = PagedCase([(256, 1), (700, 2)], heads=2, dtype=format, query_dtype=torch.bfloat16, seed=8)
    for row, (keys, values) in enumerate(zip(case.keys, case.values, strict=True)):
        keys.mul_(0.01)
        values.mul_(0.1).add_(torch.linspace(-1.0, 1.0, 64))
        first = case.queries[row][0].float()
        keys[0] = first * (math.log(share) * 8.0 / first.square().sum(-1, keepdim=True))
        values[0] = torch.linspace(1.0, -1.0, 64)
        case.queries[row][1:] = case.queries[row][0]
    case.write_all(backend)
    query, batch = case.whole()
    output, _ = backend.attend(query, case.cache, batch, 0, scale=0.125)
    tolerance = 0.02 if format == "int8" else 0.04
    torch.testing.assert_close(output.double(), case.expected(scale=0.125)[0], rtol=0, atol=tolerance)


@pytest.mark.parametrize("query_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("isa", _kernels.available_isas())
def test_bits_depend_on_the_query_alone(
    kernel_backend: Callable[[str], CpuAttention], isa: str, format: str, query_dtype: torch.dtype
) -> None:
    """Alone, beside others, in chunks, on other threads, with and without a shared prefix."""
    backend = kernel_backend(isa)
    rows = [(700, 1), (700, 90), (1, 1), (520, 3), (300, 47)]
    case = PagedCase(rows, heads=6, dtype=format, query_dtype=query_dtype, seed=3)
    for shared in (case.tables, case.keys, case.values):
        count = 600 // 16 if shared is case.tables else 600 // 16 * 16
        shared[1][:count] = shared[0][:count]
    # A row's remainders may lie in other frames than those of the row with which it shares all else.
    case.write_all(backend)

    def attend(parts: list[tuple[int, int, int]], share: bool = True) -> list[torch.Tensor]:
        query, batch = case.batch(parts)
        backend.share_prefixes = share
        output, _ = backend.attend(query, case.cache, batch, 0, scale=0.125)
        return list(output.split([end - begin for _, begin, end in parts]))

    whole = attend([(row, 0, length) for row, (_, length) in enumerate(rows)])
    for row, (_, length) in enumerate(rows):
        assert torch.equal(attend([(row, 0, length)])[0], whole[row])
    for begin, end in itertools.pairwise((0, 1, 3, 7, 20, 90)):
        assert torch.equal(attend([(2, 0, 1), (1, begin, end), (0, 0, 1)])[1], whole[1][begin:end])
    apart = attend([(row, 0, length) for row, (_, length) in enumerate(rows)], share=False)
    _kernels.set_num_threads(1)
    alone = attend([(row, 0, length) for row, (_, length) in enumerate(rows)])
    for a, b, c in zip(whole, apart, alone, strict=True):
        assert torch.equal(a, b)
        assert torch.equal(a, c)


@pytest.mark.parametrize("query_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("which", ["keys", "values"])
@pytest.mark.parametrize("format", ["int8/int4", "int4", "int4_mixed", "fp8_e4m3"])
def test_what_is_not_finite_spoils_its_own_row_only(
    backend: AttentionBackend, format: str, which: str, query_dtype: torch.dtype
) -> None:
    case = PagedCase([(130, 30), (300, 40)], dtype=format, query_dtype=query_dtype, seed=16)
    case.write_all(backend)
    query, batch = case.whole()
    clean, _ = backend.attend(query, case.cache, batch, 0, scale=0.1)
    getattr(case, which)[0][50] = float("nan")
    case.write_all(backend)
    output, _ = backend.attend(query, case.cache, batch, 0, scale=0.1)
    assert output[:30].isnan().all()
    assert torch.equal(output[30:], clean[30:])


def test_caches_that_the_kernels_cannot_read() -> None:
    def refused(match: str, *parts: torch.Tensor | None) -> None:
        with pytest.raises(ValueError, match=match):
            CpuAttention().native(LayerCache(*parts))

    cache = DevicePool(2, frame_shape([None], 2, 64, 8, "int4")).layer(0)
    refused("cache of uint8 needs int32 scales", cache.key, cache.value, None, None)
    refused("cache of uint8 needs int32 scales", cache.key, cache.value, cache.value_scale, cache.value_scale)
    mixed = DevicePool(2, frame_shape([None], 2, 64, 8, "int8/int4")).layer(0)
    refused("must be equal in size and dtype", cache.key, mixed.key, cache.key_scale, mixed.key_scale)


@pytest.mark.parametrize("heads", [1, 2, 40])
@pytest.mark.parametrize("block_size", [16, 32])
@pytest.mark.parametrize("format", ["fp8_e4m3", "fp8_e5m2"])
def test_every_number_of_8_bits_is_itself(backend: AttentionBackend, format: str, block_size: int, heads: int) -> None:
    """Attends contexts of one token each: the output is its value, and the log-sum-exp the query's product with its
    key."""
    case = PagedCase(
        [(1, 1)] * 4, heads=heads, kv_heads=1, head_dim=64, block_size=block_size, dtype=format,
        query_dtype=torch.bfloat16,
    )  # fmt: skip
    cache, codes = case.cache, torch.arange(256, dtype=torch.uint8).view(4, 64)
    numbers = codes.view(cache.key.dtype).float()
    frames = case.tables[:, 0].long()
    cache.value.view(torch.uint8)[frames, 0, 0] = codes
    cache.key.view(torch.uint8)[frames, 0, 0] = torch.where(numbers.isfinite(), codes, 0)
    for first in range(0, 64, heads):
        asked = [min(first + head, 63) for head in range(heads)]
        query = torch.zeros(4, heads, 64, dtype=torch.bfloat16)
        query[:, torch.arange(heads), asked] = 1.0
        _, batch = case.whole()
        output, lse = backend.attend(query, cache, batch, 0, scale=1.0, return_lse=True)
        torch.testing.assert_close(output.float(), numbers[:, None].expand_as(output), rtol=0, atol=0, equal_nan=True)
        assert lse is not None
        torch.testing.assert_close(lse, numbers[:, asked].nan_to_num(0.0, 0.0, 0.0), rtol=1e-6, atol=0)
