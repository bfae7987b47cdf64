"""KVLayout: where keys and values lie in a pool's memory, as plain strides. Kernels take the strides; nobody computes
an address in any other way.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pagemill.kvcache.kv_format import SCALE_BYTES, KVFormat
from pagemill.kvcache.layer_groups import LayerGroups
from pagemill.kvcache.pages import PAGE_BYTES

LINE_BYTES = 64


@dataclass(frozen=True, slots=True)
class FrameShape:
    """Describes what a frame holds: K and V of `block_size` tokens for every place (layer) of one layer group.

    values_in_keys: a value is the first `value_dim` numbers of its key, and takes no bytes of its own.
    """

    groups: LayerGroups
    kv_heads: int
    block_size: int
    key_dim: int
    value_dim: int
    format: KVFormat
    values_in_keys: bool = False

    @property
    def stored_value_dim(self) -> int:
        """Returns how many numbers of a value are stored beside its key."""
        return 0 if self.values_in_keys else self.value_dim

    @property
    def places(self) -> int:
        return self.groups.layers_per_frame


@dataclass(frozen=True, slots=True)
class KVLayout:
    """Gives strides in elements. A key's element (place, frame, kv head, token, dim) lies at
    place * place_stride + frame * frame_stride + head * key_head + token * key_token + dim * key_dim;
    a value's likewise with its own three strides, plus value_offset. Keys and values may differ in width.

    Where `beside` is more than 1, so many neighbouring dimensions of a key lie side by side, and as many neighbouring
    tokens of a value: key_dim is then the stride of so many dimensions, value_token that of so many tokens. Of numbers
    that are packed (4 bits), the element's index takes the dimension's place.

    Where vectors are scaled, those of a head's tokens have their words side by side, one group of dimensions after the
    other: keys' begin key_scales + head * key_scale_head bytes after the frame's place, values' likewise. Where they
    are not, nothing lies there.

    place_bytes: bytes of one place of a frame.
    piece_bytes: bytes of each contiguous piece of a frame; every piece starts at a page, or at a cache line
        where filling pages up would add more than a sixteenth.
    frame_bytes: bytes of one frame, all places; also those of its record.
    """

    name: str
    place_stride: int
    frame_stride: int
    value_offset: int
    key_head: int
    key_token: int
    key_dim: int
    value_head: int
    value_token: int
    value_dim: int
    beside: int
    key_scales: int
    value_scales: int
    key_scale_head: int
    value_scale_head: int
    place_bytes: int
    piece_bytes: int
    frame_bytes: int


LayoutMaker = Callable[[FrameShape, int], KVLayout]
"""Lays out so many frames of a shape."""


def layer_major(shape: FrameShape, frames: int) -> KVLayout:
    """Returns the layout for CPU: [place][frame][kv head][K|V|scales], so that one layer's neighbouring frames are one
    linear read.

    Keys are stored transposed, [dim][token]: a vector register then holds neighbouring tokens of one dimension, and
    scores need no sums across lanes. Values are [token][dim]. As products take them, some lie side by side: in pairs
    (bf16) keys are [dim / 2][token][2], values [token / 2][dim][2]; in fours (integers) the same with 4. Other
    dimensions and block sizes than whole pairs or fours have none, nor have keys that values lie in: these would have
    to be in pairs of dimensions and of tokens.
    """
    block_size, format = shape.block_size, shape.format
    key_dim, value_dim = format.key.elements(shape.key_dim), format.value.elements(shape.stored_value_dim)
    fits = block_size % format.beside == 0 and key_dim % format.beside == 0 and not shape.values_in_keys
    beside = format.beside if fits else 1
    head_bytes = block_size * format.slot_bytes(1, shape.key_dim, shape.stored_value_dim)
    scales = head_bytes - block_size * format.scale_bytes(shape.key_dim, shape.stored_value_dim)
    head = head_bytes // format.itemsize
    piece = _aligned(shape.kv_heads * head, format.itemsize)
    in_keys = shape.values_in_keys
    return KVLayout(
        name={1: "layer-major", 2: "layer-major-pairs", 4: "layer-major-fours"}[beside],
        place_stride=frames * piece,
        frame_stride=piece,
        value_offset=0 if in_keys else block_size * key_dim,
        key_head=head,
        key_token=beside,
        key_dim=beside * block_size,
        value_head=head,
        value_token=1 if in_keys else beside * value_dim,
        value_dim=block_size if in_keys else beside,
        beside=beside,
        key_scales=scales,
        value_scales=scales + block_size * SCALE_BYTES * format.key.scales(shape.key_dim),
        key_scale_head=head_bytes,
        value_scale_head=head_bytes,
        place_bytes=piece * format.itemsize,
        piece_bytes=piece * format.itemsize,
        frame_bytes=shape.places * piece * format.itemsize,
    )


def block_major(shape: FrameShape, frames: int) -> KVLayout:
    """Returns the layout for CUDA: [frame][place][K|V][kv head][token][dim], so that a frame is one contiguous record.

    A place's scales, [K|V][kv head][group][token], lie behind its values. Nothing lies side by side.
    """
    block_size, kv_heads, format = shape.block_size, shape.kv_heads, shape.format
    key_dim, value_dim = format.key.elements(shape.key_dim), format.value.elements(shape.stored_value_dim)
    in_keys = shape.values_in_keys
    key_tile, value_tile = block_size * key_dim, block_size * value_dim
    key_scales = block_size * SCALE_BYTES * format.key.scales(shape.key_dim)
    scales = kv_heads * (key_tile + value_tile) * format.itemsize
    place = block_size * format.slot_bytes(kv_heads, shape.key_dim, shape.stored_value_dim) // format.itemsize
    frame = _aligned(shape.places * place, format.itemsize)
    return KVLayout(
        name="block-major",
        place_stride=place,
        frame_stride=frame,
        value_offset=0 if in_keys else kv_heads * key_tile,
        key_head=key_tile,
        key_token=key_dim,
        key_dim=1,
        value_head=key_tile if in_keys else value_tile,
        value_token=key_dim if in_keys else value_dim,
        value_dim=1,
        beside=1,
        key_scales=scales,
        value_scales=scales + kv_heads * key_scales,
        key_scale_head=key_scales,
        value_scale_head=block_size * SCALE_BYTES * format.value.scales(shape.value_dim),
        place_bytes=place * format.itemsize,
        piece_bytes=frame * format.itemsize,
        frame_bytes=frame * format.itemsize,
    )


def _aligned(elements: int, itemsize: int) -> int:
    """Returns the fewest elements, at least `elements`, that fill whole pages, or whole lines where pages waste too
    much."""
    pages = -(-elements * itemsize // PAGE_BYTES) * PAGE_BYTES // itemsize
    if 16 * pages <= 17 * elements:
        return pages
    return -(-elements * itemsize // LINE_BYTES) * LINE_BYTES // itemsize
