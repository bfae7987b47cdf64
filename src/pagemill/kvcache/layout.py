"""KVLayout: how keys and values lie in a pool's memory, as plain strides. Kernels take the strides; nobody computes an
address in any other way.
"""

from __future__ import annotations

from dataclasses import dataclass

PAGE_BYTES = 4096
HUGE_PAGE = 2 << 20
LINE_BYTES = 64
SCALE_BYTES = 4


@dataclass(frozen=True, slots=True)
class KVLayout:
    """Strides in elements. A key's element (place, frame, kv head, token, dim) lies at
    place * place_stride + frame * frame_stride + head * key_head + token * key_token + dim * key_dim;
    a value's likewise with its own three strides, plus value_offset. Keys and values may differ in width.

    In pairs, dimensions 2i and 2i + 1 of a key lie side by side, and so do tokens 2i and 2i + 1 of a value: key_dim is
    then the stride of a pair of dimensions, value_token that of a pair of tokens.

    Where elements are scaled (int8), each token of each KV head has a scale for its key and one for its value, fp32:
    those of a head's tokens are neighbours, and begin key_scales or value_scales bytes after the frame's place, plus
    head * scale_head bytes. All three are 0 where elements are not scaled.

    chunk_bytes: bytes of each contiguous piece of a frame; every piece starts at a page, or at a cache line
        where filling pages up would add more than a sixteenth.
    frame_bytes: bytes of one frame, all places.
    pool_elements: elements of the whole pool.
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
    pairs: bool
    key_scales: int
    value_scales: int
    scale_head: int
    chunk_bytes: int
    frame_bytes: int
    pool_elements: int


def layer_major(
    *,
    places: int,
    frames: int,
    kv_heads: int,
    block_size: int,
    key_dim: int,
    value_dim: int,
    itemsize: int,
    scaled: bool = False,
    pairs: bool = False,
) -> KVLayout:
    """For CPU: [place][frame][kv head][K|V|scales], so that one layer's neighbouring frames are one linear read.

    Keys are stored transposed, [dim][token]: a vector register then holds neighbouring tokens of one dimension, and
    scores need no sums across lanes. Values are [token][dim]. In pairs, as products of bf16 take them: keys
    [dim / 2][token][2], values [token / 2][dim][2]; an odd key_dim or block_size has none.
    """
    pairs = pairs and block_size % 2 == 0 and key_dim % 2 == 0
    key_tile, tiles = block_size * key_dim, block_size * (key_dim + value_dim)
    scales = block_size * SCALE_BYTES if scaled else 0
    head = tiles + 2 * scales // itemsize
    chunk = _aligned(kv_heads * head, itemsize)
    return KVLayout(
        name="layer-major-pairs" if pairs else "layer-major",
        place_stride=frames * chunk,
        frame_stride=chunk,
        value_offset=key_tile,
        key_head=head,
        key_token=2 if pairs else 1,
        key_dim=2 * block_size if pairs else block_size,
        value_head=head,
        value_token=2 * value_dim if pairs else value_dim,
        value_dim=2 if pairs else 1,
        pairs=pairs,
        key_scales=tiles * itemsize if scaled else 0,
        value_scales=tiles * itemsize + scales if scaled else 0,
        scale_head=head * itemsize if scaled else 0,
        chunk_bytes=chunk * itemsize,
        frame_bytes=places * chunk * itemsize,
        pool_elements=places * frames * chunk,
    )


def block_major(
    *,
    places: int,
    frames: int,
    kv_heads: int,
    block_size: int,
    key_dim: int,
    value_dim: int,
    itemsize: int,
    scaled: bool = False,
    pairs: bool = False,
) -> KVLayout:
    """For CUDA: [frame][place][K|V][kv head][token][dim], so that a frame is one contiguous record. A place's scales,
    [K|V][kv head][token], lie behind its values. Nothing lies in pairs."""
    key_tile, value_tile = block_size * key_dim, block_size * value_dim
    scales = block_size * SCALE_BYTES if scaled else 0
    elements = kv_heads * (key_tile + value_tile)
    place = elements + 2 * kv_heads * scales // itemsize
    frame = _aligned(places * place, itemsize)
    return KVLayout(
        name="block-major",
        place_stride=place,
        frame_stride=frame,
        value_offset=kv_heads * key_tile,
        key_head=key_tile,
        key_token=key_dim,
        key_dim=1,
        value_head=value_tile,
        value_token=value_dim,
        value_dim=1,
        pairs=False,
        key_scales=elements * itemsize if scaled else 0,
        value_scales=elements * itemsize + kv_heads * scales if scaled else 0,
        scale_head=scales,
        chunk_bytes=frame * itemsize,
        frame_bytes=frame * itemsize,
        pool_elements=frames * frame,
    )


def _aligned(elements: int, itemsize: int) -> int:
    """The fewest elements, at least `elements`, that fill whole pages, or whole lines where pages waste too much."""
    pages = -(-elements * itemsize // PAGE_BYTES) * PAGE_BYTES // itemsize
    if 16 * pages <= 17 * elements:
        return pages
    return -(-elements * itemsize // LINE_BYTES) * LINE_BYTES // itemsize
