"""KVLayout: how keys and values lie in a pool's memory, as plain strides. Kernels take the strides; nobody computes an
address in any other way.
"""

from __future__ import annotations

from dataclasses import dataclass

PAGE_BYTES = 4096


@dataclass(frozen=True, slots=True)
class KVLayout:
    """Strides in elements. A key's element (place, frame, kv head, token, dim) lies at
    place * place_stride + frame * frame_stride + head * head_stride + token * key_token + dim * key_dim;
    a value's likewise with its own two strides, plus value_offset.

    chunk_bytes: bytes of each contiguous piece of a frame; every piece starts at a multiple of 4096 bytes.
    frame_bytes: bytes of one frame, all places.
    pool_elements: elements of the whole pool.
    """

    name: str
    place_stride: int
    frame_stride: int
    head_stride: int
    value_offset: int
    key_token: int
    key_dim: int
    value_token: int
    value_dim: int
    chunk_bytes: int
    frame_bytes: int
    pool_elements: int


def layer_major(*, places: int, frames: int, kv_heads: int, block_size: int, head_dim: int, itemsize: int) -> KVLayout:
    """For CPU: [place][frame][kv head][K|V][tile], so that one layer's neighbouring frames are one linear read.

    Keys are stored transposed, [dim][token]: a vector register then holds neighbouring tokens of one dimension, and
    scores need no sums across lanes. Values are [token][dim].
    """
    tile = block_size * head_dim
    chunk = _page_aligned(2 * kv_heads * tile, itemsize)
    return KVLayout(
        name="layer-major",
        place_stride=frames * chunk,
        frame_stride=chunk,
        head_stride=2 * tile,
        value_offset=tile,
        key_token=1,
        key_dim=block_size,
        value_token=head_dim,
        value_dim=1,
        chunk_bytes=chunk * itemsize,
        frame_bytes=places * chunk * itemsize,
        pool_elements=places * frames * chunk,
    )


def block_major(*, places: int, frames: int, kv_heads: int, block_size: int, head_dim: int, itemsize: int) -> KVLayout:
    """For CUDA: [frame][place][K|V][kv head][token][dim], so that a frame is one contiguous record."""
    tile = block_size * head_dim
    place = 2 * kv_heads * tile
    frame = _page_aligned(places * place, itemsize)
    return KVLayout(
        name="block-major",
        place_stride=place,
        frame_stride=frame,
        head_stride=tile,
        value_offset=kv_heads * tile,
        key_token=head_dim,
        key_dim=1,
        value_token=head_dim,
        value_dim=1,
        chunk_bytes=frame * itemsize,
        frame_bytes=frame * itemsize,
        pool_elements=frames * frame,
    )


def _page_aligned(elements: int, itemsize: int) -> int:
    """The fewest elements, at least `elements`, that fill whole pages."""
    return -(-elements * itemsize // PAGE_BYTES) * PAGE_BYTES // itemsize
