"""DividedMemory: tells which parts of one piece of memory an operation touches, for a device that checks the order.

A pool's frames lie in one piece with the slots that streamed blocks are brought to, and kernels see views of all of it.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes


class DividedMemory:
    """Divides memory that a tensor lies in: bytes from `begin` on into parts of `nbytes` each, and all before into one,
    part 0."""

    def __init__(self, tensor: Tensor, begin: int, nbytes: int) -> None:
        with _disable_current_modes():
            size = tensor.untyped_storage().nbytes()
            self._part = ((torch.arange(size) - begin).div(nbytes, rounding_mode="floor") + 1).clamp_min(0)
            self.parts: list[int] = self._part.unique().tolist()

    def touched(self, name: str, tensor: Tensor, args) -> list[int]:
        """Returns the parts that an operation touches of a tensor there, by the contents of indices if it has some."""
        with _disable_current_modes():
            width = tensor.element_size()
            of_elements = self._part[::width].contiguous()
            parts = torch.as_strided(of_elements, tensor.size(), tensor.stride(), tensor.storage_offset())
            if name in ("index", "index_put_") and tensor is args[0]:
                parts = torch.ops.aten.index(parts, args[1])
            elif name in ("index_select", "index_copy_") and tensor is args[0]:
                parts = torch.index_select(parts, *args[1:3])
            return parts.unique().tolist()


def divides_slots(device, init):
    """Returns what makes `StreamingGpuFrames` whose slots the device checks one by one."""

    def divided(frames, count, frame_bytes, streams, streamed, parts, filled=None) -> None:
        init(frames, count, frame_bytes, streams, streamed, parts, filled)
        device.divide(frames.bytes, frames.bytes.numel(), parts.nbytes)

    return divided
