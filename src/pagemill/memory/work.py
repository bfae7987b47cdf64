"""What the device must do before a step, as the memory manager describes it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pagemill.tenant_limits import DEFAULT_TENANT

Ints = NDArray[np.int32]


class BlockName(NamedTuple):
    """Names a block on any tier: digest, layer group, digest of the block before it, and how many stand before it.

    tenant: owner of the namespace in which it is found; "default" if that is not known.
    """

    digest: bytes
    group: int
    parent: bytes
    depth: int
    tenant: str = DEFAULT_TENANT


class Save(NamedTuple):
    """A block that is to go to an offload store, read from its frame before anything else is done to that."""

    frame: int
    name: BlockName


class Load(NamedTuple):
    """Blocks (digest, group) that are to come from an offload store, each into a frame that nothing else uses."""

    id: int
    blocks: list[tuple[bytes, int]]
    frames: list[int]


def _empty() -> Ints:
    return np.empty(0, dtype=np.int32)


@dataclass(frozen=True, slots=True)
class MemoryWork:
    """Plain arrays, int32, in order of application: copies, then table edits; all before the step writes anything.

    copies: `copy_source[i]` -> `copy_target[i]`, whole frames, every layer of the frame's group. One after the other: a
            frame may be a source of one copy and, since it was freed, the target of a later one.
    edits:  device table of `edit_row[i]`, group `edit_group[i]`, entry `edit_index[i]` becomes frame `edit_frame[i]`
            (-1: none). Each (row, group, entry) appears once.
    """

    copy_source: Ints
    copy_target: Ints
    edit_row: Ints
    edit_group: Ints
    edit_index: Ints
    edit_frame: Ints

    @classmethod
    def none(cls) -> MemoryWork:
        return cls(_empty(), _empty(), _empty(), _empty(), _empty(), _empty())
