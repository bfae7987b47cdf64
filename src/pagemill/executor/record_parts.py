"""RecordParts: cuts records of blocks with all KV heads into those of ranks, and joins them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pagemill.kvcache.kv_format import SCALE_BYTES
from pagemill.kvcache.layout import FrameShape, KVLayout, LayoutMaker

Bytes = NDArray[np.uint8]


class Span(NamedTuple):
    """Says where bytes of some heads lie: from `of_part` on in a piece of the part, and `of_whole` in the whole's."""

    of_part: int
    of_whole: int
    nbytes: int


class RecordParts:
    """Cuts and joins records of frames that are laid out like this. heads: by rank, which heads it has; several may
    have the same."""

    def __init__(self, whole: FrameShape, part: FrameShape, heads: Sequence[slice], layout: LayoutMaker) -> None:
        of_whole, of_part = layout(whole, 1), layout(part, 1)
        self._whole, self._part = of_whole.piece_bytes, of_part.piece_bytes
        self._pieces = of_whole.frame_bytes // self._whole
        self._spans = [_spans(whole, of_part, of_whole, each, whole.places // self._pieces) for each in heads]

    def empty(self, count: int) -> Bytes:
        """Returns so many whole records, [n, pieces, piece bytes], of zeros."""
        return np.zeros((count, self._pieces, self._whole), dtype=np.uint8)

    def join(self, parts: Sequence[Bytes]) -> Bytes:
        """Returns whole records [n, pieces, piece bytes] for all ranks' [n, record bytes]."""
        records = self.empty(len(parts[0]))
        for part, spans in zip(parts, self._spans, strict=True):
            pieces = part.reshape(len(records), self._pieces, self._part)
            for begin, of, nbytes in spans:
                records[:, :, of : of + nbytes] = pieces[:, :, begin : begin + nbytes]
        return records

    def cut(self, records: Bytes) -> list[Bytes]:
        """Returns each rank's records [n, pieces, piece bytes] for whole ones."""
        parts = [np.zeros((len(records), self._pieces, self._part), dtype=np.uint8) for _ in self._spans]
        for part, spans in zip(parts, self._spans, strict=True):
            for begin, of, nbytes in spans:
                part[:, :, begin : begin + nbytes] = records[:, :, of : of + nbytes]
        return parts


def _spans(shape: FrameShape, of_part: KVLayout, of_whole: KVLayout, heads: slice, places: int) -> list[Span]:
    """Returns where the bytes of these heads lie in pieces of so many places, what lies side by side as one."""
    here = _regions(shape, of_part, range(heads.stop - heads.start), places)
    there = _regions(shape, of_whole, range(heads.start, heads.stop), places)
    spans: list[Span] = []
    for (begin, nbytes), (of, _) in sorted(zip(here, there, strict=True)):
        last = spans[-1] if spans else Span(0, 0, 0)
        if begin == last.of_part + last.nbytes and of == last.of_whole + last.nbytes and spans:
            spans[-1] = last._replace(nbytes=last.nbytes + nbytes)
        else:
            spans.append(Span(begin, of, nbytes))
    return spans


def _regions(shape: FrameShape, layout: KVLayout, heads: range, places: int) -> Iterator[tuple[int, int]]:
    """Yields begin and length, in bytes, of each head's keys, values and scales in each place."""
    format, size = shape.format, shape.block_size
    item, scales = format.itemsize, SCALE_BYTES * size
    kinds = [
        (0, layout.key_head * item, size * item * format.key.elements(shape.key_dim)),
        (layout.value_offset * item, layout.value_head * item, size * item * format.value.elements(shape.value_dim)),
        (layout.key_scales, layout.key_scale_head, scales * format.key.scales(shape.key_dim)),
        (layout.value_scales, layout.value_scale_head, scales * format.value.scales(shape.value_dim)),
    ]
    for place in range(places):
        for head in heads:
            for begin, stride, nbytes in kinds:
                if nbytes:
                    yield place * layout.place_bytes + begin + head * stride, nbytes
