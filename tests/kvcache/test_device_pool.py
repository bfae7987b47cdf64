"""Layouts as data: every element has its own place, frames are page-aligned, copies copy all of a frame, no more."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from harness import frame_shape
from pagemill.errors import KVMemoryError
from pagemill.kvcache.device_pool import DevicePool
from pagemill.kvcache.kv_format import kv_format
from pagemill.kvcache.layer_groups import LayerGroup, LayerGroups, add_full_layers, add_remainders, group_layers
from pagemill.kvcache.layout import LINE_BYTES, PAGE_BYTES, FrameShape, KVLayout, block_major, layer_major

LAYOUTS = [layer_major, block_major]
WINDOWS = [None, 64, None, 64, None, 64]


def group_of(layer: int) -> int:
    return group_layers(WINDOWS).place(layer)[0]


def make(layout: Callable[..., KVLayout], dtype: torch.dtype = torch.float32, block_size: int = 8) -> DevicePool:
    return DevicePool(5, frame_shape(WINDOWS, 3, 20, block_size, str(dtype)), layout=layout)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int8])
def test_no_two_elements_share_a_place(layout: Callable[..., KVLayout], dtype: torch.dtype) -> None:
    pool = make(layout, dtype)
    pool.storage.fill_(0)
    full = [layer for layer in range(6) if group_of(layer) == group_of(0)]
    for layer in full:
        key, value, *scales = pool.layer(layer)
        assert pool.layer(layer).block_shape == (3, 8, 20)
        for tensor in (key, value):
            assert tensor.shape[:2] == (5, 3)
            assert tensor[0, 0].numel() == 8 * 20
            tensor.add_(1)
        for scale in scales:
            assert (scale is None) == (dtype != torch.int8)
            if scale is not None:
                assert (scale.dtype, scale.shape) == (torch.float32, (5, 3, 8))
                scale.view(torch.int32).add_(0x01010101)  # four elements
    assert pool.storage.max() == 1
    per_token = 20 + (4 if dtype == torch.int8 else 0)
    assert int(pool.storage.sum(dtype=torch.float64)) == len(full) * 2 * 5 * 3 * 8 * per_token


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_packed_layers_of_another_shape_lie_side_by_side_in_a_place(
    layout: Callable[..., KVLayout], dtype: torch.dtype
) -> None:
    """Beside those of the pool's own shape in other places."""
    pool, own = make(layout, dtype), frame_shape([None], 1, 16, 8, str(dtype))
    per_place = pool.layout.place_bytes // layout(own, 1).place_bytes
    assert per_place == 3
    pool.storage.view(torch.int8).fill_(0)
    caches = [pool.packed_layer(own, 0, index) for index in range(per_place)] + [pool.layer(2)]
    assert [cache.block_shape for cache in caches] == [(1, 8, 16)] * 3 + [(3, 8, 20)]
    tensors = [tensor for cache in caches for tensor in cache if tensor is not None]
    assert len({tensor.shape[0] for tensor in tensors}) == 1
    for number, tensor in enumerate(tensors, start=1):
        tensor.fill_(number)
    assert all((tensor == number).all() for number, tensor in enumerate(tensors, start=1))


@pytest.mark.parametrize(
    ("windows", "count", "layers", "places"),
    [
        ([None] * 6, 2, [(0, 1, 2, 3, 4, 5, 6, 7)], 8),
        ([8] * 6, 2, [(0, 1, 2, 3, 4, 5), (6, 7)], 6),
        ([8, 8, 8, None, None, None], 3, [(0, 1, 2), (3, 4, 5), (6, 7, 8)], 3),
        ([8, 8, 8, None], 1, [(0, 1, 2), (3, 4)], 3),
    ],
    ids=["into their group", "alone", "cheaper alone", "into what is padding"],
)
def test_further_layers_go_where_a_token_has_the_fewest_places(windows, count, layers, places) -> None:
    groups = LayerGroups(
        tuple(
            LayerGroup(window, tuple(i for i, other in enumerate(windows) if other == window))
            for window in dict.fromkeys(windows)
        ),
        max(windows.count(window) for window in windows),
    )
    found = add_full_layers(groups, count)
    assert [group.layers for group in found.groups] == layers
    assert found.layers_per_frame == places
    assert found.num_layers == len(windows) + count
    rests = add_full_layers(add_remainders(groups, 4), count)
    assert rests.groups[: len(layers)] == found.groups
    assert [group.layers for group in rests.groups[len(layers) :]] == [group.layers for group in groups.groups]
    assert (rests.layers_per_frame, rests.num_layers) == (places, found.num_layers)


def test_bf16_lies_in_pairs_as_products_take_them() -> None:
    pool = make(layer_major, torch.bfloat16)
    pool.storage.copy_(torch.arange(len(pool.storage)) % 256)
    key, value, *_ = pool.layer(0)
    block = pool.storage[pool.layout.frame_stride + pool.layout.key_head :]  # of frame 1, KV head 1
    dims_of_token_5 = [block[i * 16 + 10 + j] for i in range(10) for j in range(2)]
    assert key[1, 1, 5].flatten().tolist() == dims_of_token_5
    values = block[8 * 20 :]
    assert value[1, 1].flatten(0, 1)[5].tolist() == [values[2 * 40 + 2 * d + 1] for d in range(20)]


@pytest.mark.parametrize(("block_size", "head_dim"), [(8, 31), (7, 20)])
def test_what_has_no_pairs_lies_as_other_dtypes_do(block_size: int, head_dim: int) -> None:
    pools = [
        DevicePool(2, frame_shape([None], 2, head_dim, block_size, str(dtype)))
        for dtype in (torch.bfloat16, torch.float16)
    ]
    assert pools[0].layout == pools[1].layout
    assert pools[0].layer(0).beside == 1


@pytest.mark.parametrize("layout", LAYOUTS)
def test_frames_begin_at_lines_and_sizes_are_as_told(layout: Callable[..., KVLayout]) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.int8):
        pool = make(layout, dtype)
        assert pool.storage.data_ptr() % PAGE_BYTES == 0
        assert pool.nbytes == pool.layout.frame_bytes * 5 == pool.storage.nbytes
        assert pool.layout.piece_bytes % LINE_BYTES == 0
        assert pool.layout.frame_stride * dtype.itemsize % LINE_BYTES == 0
        assert pool.layer(0).key.data_ptr() == pool.storage.data_ptr()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("kv_heads", "head_dim", "dtype", "expected"),
    [(8, 128, torch.float16, 65536), (2, 31, torch.float16, 4096), (3, 64, torch.int8, 6528), (1, 20, torch.int8, 768)],
)
def test_frames_fill_pages_where_that_wastes_little(
    layout: Callable[..., KVLayout], kv_heads: int, head_dim: int, dtype: torch.dtype, expected: int
) -> None:
    pool = DevicePool(2, frame_shape([None], kv_heads, head_dim, 16, str(dtype)), layout=layout)
    assert pool.layout.frame_bytes == expected


def test_groups_share_frames() -> None:
    pool = make(layer_major)
    assert group_of(0) != group_of(1)
    assert pool.layer(0).key.data_ptr() == pool.layer(1).key.data_ptr()
    assert pool.layer(0).key.data_ptr() != pool.layer(2).key.data_ptr()
    with pytest.raises(KeyError):
        pool.layer(6)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int8])
def test_copy_frames(layout: Callable[..., KVLayout], dtype: torch.dtype) -> None:
    pool = make(layout, dtype)
    pool.storage.copy_(torch.randint(0, 100, pool.storage.shape))
    layers = [0, 2, 4]
    before = [[tensor.clone() for tensor in pool.layer(layer) if tensor is not None] for layer in layers]
    pool.frames.copy(torch.tensor([0, 3], dtype=torch.int32), torch.tensor([4, 1], dtype=torch.int32))
    for layer, old in zip(layers, before, strict=True):
        for tensor, was in zip(filter(torch.is_tensor, pool.layer(layer)), old, strict=True):
            assert torch.equal(tensor, was[[0, 3, 2, 3, 0]])
    pool.frames.copy(torch.tensor([], dtype=torch.int32), torch.tensor([], dtype=torch.int32))


@pytest.mark.parametrize("layout", [layer_major, block_major])
def test_copies_are_made_one_after_the_other(layout: Callable[..., KVLayout]) -> None:
    pool = make(layout)
    pool.storage.copy_(torch.randn(len(pool.storage)))
    before = [pool.layer(0).key[frame].clone() for frame in range(5)]
    pool.frames.copy(torch.tensor([0, 1, 4]), torch.tensor([4, 4, 2]))
    assert torch.equal(pool.layer(0).key[4], before[1])
    assert torch.equal(pool.layer(0).key[2], before[1])


def test_copies_are_made_in_order() -> None:
    pool = make(layer_major)
    pool.storage.copy_(torch.randn(len(pool.storage)))
    old = pool.layer(0).key.clone()
    pool.frames.copy(torch.tensor([0, 1, 2, 3]), torch.tensor([1, 2, 3, 4]))
    assert torch.equal(pool.layer(0).key, old[[0, 0, 0, 0, 0]])


def test_copying_refuses_frames_that_do_not_exist() -> None:
    with pytest.raises(IndexError):
        make(layer_major).frames.copy(torch.tensor([0]), torch.tensor([5]))


def test_memory_that_can_not_be_had_is_a_typed_error() -> None:
    with pytest.raises(KVMemoryError, match="kv_memory"):
        DevicePool(1 << 40, frame_shape([None], 8, 128, 16, "float32"))


def resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


def test_untouched_frames_cost_nothing() -> None:
    before = resident()
    pool = DevicePool(4000, frame_shape([None] * 4, 8, 64, 16, "float32"))
    assert pool.nbytes > 900e6
    pool.layer(0).key[:3].fill_(1)
    assert resident() - before < 50e6


@pytest.mark.parametrize("layout", LAYOUTS)
def test_frames_that_go_give_their_memory_back_and_the_others_stay(layout: Callable[..., KVLayout]) -> None:
    groups = group_layers([None] * 4)
    pool = DevicePool(400, FrameShape(groups, 8, 16, 64, 64, kv_format("float32")), layout=layout, room=200 << 20)
    assert pool.capacity == (200 << 20) // pool.layout.frame_bytes > 400
    before = resident()
    pool.storage[: 400 * pool.layout.frame_stride] = 0  # in the order of memory; the rest with each layer
    for layer in range(4):
        for tensor in (pool.layer(layer).key, pool.layer(layer).value):
            tensor[:400] = torch.arange(400.0)[:, None, None, None]
    full = resident() - before
    assert full > 0.9 * pool.nbytes == 0.9 * 400 * pool.layout.frame_bytes
    pool.resize(100)
    assert pool.nbytes == 100 * pool.layout.frame_bytes
    assert resident() - before < 0.35 * full
    for layer in range(4):
        for tensor in (pool.layer(layer).key, pool.layer(layer).value):
            assert torch.equal(tensor[:100, 0, 0, 0], torch.arange(100.0))
            assert tensor[101:400].count_nonzero() == 0
    pool.resize(pool.capacity)
    pool.layer(3).value[-1] = 1
    with pytest.raises(KVMemoryError, match="grow to"):
        pool.resize(pool.capacity + 1)


def test_without_room_a_pool_does_not_grow() -> None:
    pool = make(layer_major)
    assert pool.capacity == pool.num_frames == 5


@pytest.mark.parametrize("layout", [layer_major, block_major])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_keys_and_values_may_differ_in_width(layout: Callable[..., KVLayout], dtype: torch.dtype) -> None:
    format = kv_format(str(dtype))
    pool = DevicePool(3, FrameShape(group_layers([None, None]), 2, 8, 24, 16, format), layout=layout)
    pool.storage.zero_()
    places = [part for layer in range(2) for part in pool.layer(layer) if part is not None]
    for number, part in enumerate(places, start=1):
        part.fill_(number)
    assert all(bool((part == number).all()) for number, part in enumerate(places, start=1))
    assert (places[0].numel(), places[1].numel()) == (3 * 2 * 8 * 24, 3 * 2 * 8 * 16)


def test_remainders_lie_in_groups_of_their_own_at_the_places_of_their_layers() -> None:
    groups = add_remainders(group_layers([None, 64, None, 4096]), 128)
    own, rest = groups.groups[: -groups.remainders], groups.groups[-groups.remainders :]
    assert [group.layers for group in own] == [group.layers for group in rest]
    assert {(group.window, more.window) for group, more in zip(own, rest, strict=True)} == {
        (None, 128), (64, 64), (4096, 128)
    }  # fmt: skip
    assert groups.num_layers == 4
    assert all(groups.place(layer)[0] < len(own) for layer in range(4))


def test_stored_blocks_keep_their_names() -> None:
    """Whoever changes one of these makes all blocks on disk unfindable: they must hold other bits then."""
    names = {element: kv_format(element).digest_name(16, "layer-major") for element in ("float32", "float16", "int8")}
    assert names == {
        "float32": "float32,16,layer-major",
        "float16": "float16,16,layer-major",
        "int8": "int8-1,16,layer-major",
    }
    narrow = {
        name: kv_format(name).digest_name(16, "layer-major-fours") for name in ("int8/int4", "int4", "int4_mixed")
    }
    assert narrow == {
        "int8/int4": "int8-1/int4-1,16,layer-major-fours",
        "int4": "int4-rotated-32-1/int4-1,16,layer-major-fours",
        "int4_mixed": "int4-rotated-32-1/int4-1+128,16,layer-major-fours",
    }
    assert kv_format("fp8") == kv_format("fp8_e4m3")
    assert kv_format("fp8").digest_name(16, "layer-major") == "float8_e4m3fn,16,layer-major"
    assert kv_format("torch.bfloat16").digest_name(32, "layer-major-pairs") == "bfloat16,32,layer-major-pairs"
