"""int8 keys and values: within half a scale of what was written, and the same bits from torch and from every kernel."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.overrides import TorchFunctionMode

from harness import frame_shape, poison
from pagemill.attention.cpu_backend import CpuAttention
from pagemill.attention.interface import AttentionBackend, LayerCache
from pagemill.attention.quantize import LEAST, quantize, quantize_int4
from pagemill.kvcache.device_pool import DevicePool
from pagemill.kvcache.layout import block_major, layer_major


def vectors(head_dim: int) -> torch.Tensor:
    """[tokens, 2, head_dim]: of all magnitudes, and some that are special."""
    random = torch.Generator().manual_seed(head_dim)
    x = torch.randn(40, 2, head_dim, generator=random) * 10.0 ** torch.randint(-20, 20, (40, 2, 1), generator=random)
    x[3] = 0
    x[4] = -0.0
    x[5] = LEAST / 2
    x[6, 0, 1:], x[6, 0, 0] = 0, -LEAST
    x[7] = torch.finfo(torch.float32).max
    x[8, 1, 5] = float("nan")
    x[9, 0, head_dim - 1] = float("-inf")
    x[10] = torch.arange(head_dim) - 63.5  # halves, to be rounded to even
    x[10, :, 0] = 127
    return x


def test_elements_are_within_half_a_scale() -> None:
    x = vectors(64)
    elements, scale = quantize(x)
    finite = x.isfinite().all(-1)
    error = (elements.double() * scale.double().unsqueeze(-1) - x.double())[finite].abs().amax(-1)
    assert bool((error <= torch.maximum(scale[finite].double() * 0.50001, torch.tensor(LEAST))).all())
    assert int(elements.max()) == 127
    assert int(elements.min()) == -127
    assert torch.equal(scale[3], torch.zeros(2))
    assert not elements[3:6].any()
    assert torch.equal(scale.isnan(), ~finite)
    assert elements[10, 0, 1:5].tolist() == [-62, -62, -60, -60]


class ByReciprocals(TorchFunctionMode):
    """Divides by a number as torch does on CUDA."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is torch.Tensor.div and isinstance(args[1], float):
            return args[0] * (1.0 / torch.tensor(args[1]))
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("quantizes", [quantize, quantize_int4])
def test_bits_do_not_depend_on_how_a_device_divides_by_a_number(quantizes) -> None:
    x = torch.zeros(2, 32)
    x[:, 3] = torch.tensor([5.610351085662842, 3.495835065841675])  # whose scales would be others, in 4 and in 8 bits
    expected = quantizes(x)
    with ByReciprocals():
        assert all(map(torch.equal, quantizes(x), expected))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("layout", [layer_major, block_major])
@pytest.mark.parametrize(("head_dim", "block_size"), [(64, 16), (80, 8), (20, 32)])
def test_every_backend_writes_the_same_bits(
    backend: AttentionBackend, head_dim: int, block_size: int, layout: Callable[..., object], dtype: torch.dtype
) -> None:
    pool = DevicePool(6, frame_shape([None, None], 2, head_dim, block_size, "int8"), layout=layout)
    poison(pool)
    key, value = vectors(head_dim).to(dtype), vectors(head_dim).flip(0).to(dtype)
    slots = torch.randperm(6 * block_size, generator=torch.Generator().manual_seed(1))[:40]
    slots[[2, 20]] = -1
    cache = pool.layer(1)
    backend.write(key, value, cache, slots)
    written = slots >= 0
    frames, offsets = slots[written] // block_size, slots[written] % block_size
    keys, values = cache.key.flatten(3), cache.value.flatten(2, -2)
    for source, elements, scale in ((key, keys, cache.key_scale), (value, values, cache.value_scale)):
        expected, expected_scale = quantize(source[written])
        assert scale is not None
        assert torch.equal(elements[frames, :, offsets], expected)
        assert torch.equal(scale[frames, :, offsets].nan_to_num(-1), expected_scale.nan_to_num(-1))
    untouched = pool.storage.clone()
    backend.write(key, value, cache, torch.full((40,), -1))
    assert torch.equal(pool.storage, untouched)


def test_an_int8_cache_needs_scales() -> None:
    cache = DevicePool(2, frame_shape([None], 2, 16, 8, "int8")).layer(0)
    x = torch.zeros(1, 2, 16)
    with pytest.raises(ValueError, match="cache of int8 needs float32 scales"):
        CpuAttention().write(x, x, LayerCache(cache.key, cache.value), torch.tensor([0]))
