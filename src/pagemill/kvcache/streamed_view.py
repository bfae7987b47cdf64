"""StreamedView: one numbering for a GPU pool's frames and the slots to which streamed frames' parts are brought.

Attention finds a block by its frame's number times a stride. In a layer's view here, the stride is the greatest by
which both frames and slots can be counted, and tables and slots of a step are renumbered once for all layers. Kernels
and what they compute stay as they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pagemill.attention.interface import AttentionBatch, GroupBatch, LayerCache


@dataclass(frozen=True, slots=True)
class Numbering:
    """States the numbers of a pool's frames in `StreamedView`.

    stride: elements from number to number. Frame f of the pool has number f * frame; streamed frame first + i has
    first * frame + i * slot.
    """

    first: int
    stride: int
    frame: int
    slot: int

    def of(self, frames: Tensor) -> Tensor:
        """Returns the numbers of frames, of the same dtype; -1 stays."""
        outside = self.first * self.frame + (frames - self.first) * self.slot
        return torch.where(frames < 0, -1, torch.where(frames < self.first, frames * self.frame, outside))


class StreamedView:
    """Gives a decoder the layers of a pool, streamed frames included, of which `LayersAhead` brings the parts."""

    def __init__(self, layers: Mapping[int, LayerCache], numbering: Numbering, block_size: int) -> None:
        self._layers = layers
        self._numbering = numbering
        self._block_size = block_size

    def layer(self, index: int) -> LayerCache:
        """Returns the keys and values of a model layer, as views."""
        return self._layers[index]

    def batch(self, batch: AttentionBatch) -> AttentionBatch:
        """Returns a batch whose tables and slots are those of this view."""
        return replace(batch, groups=tuple(self._renumbered(group) for group in batch.groups))

    def _renumbered(self, group: GroupBatch) -> GroupBatch:
        size, slots = self._block_size, group.slots
        frames = slots.div(size, rounding_mode="floor")
        return replace(
            group,
            tables=self._numbering.of(group.tables),
            slots=torch.where(slots < 0, -1, self._numbering.of(frames) * size + slots.remainder(size)),
            remainders=None if group.remainders is None else self._renumbered(group.remainders),
        )
