"""How a block moves: resizing, streaming and compaction choose which, and where to. And what if it is lost."""

from __future__ import annotations

from collections.abc import Set
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pagemill.memory.manager import MemoryManager


def move(manager: MemoryManager, block: int, frame: int) -> int:
    """The content lies in another frame once the device has done the work of the next `drain`; which one it left.

    Which frames are free, and what tables on the device say, is the caller's to change.
    """
    source = manager._blocks.frame[block]
    manager._work.copy(source, frame)
    manager._blocks.frame[block] = frame
    return source


def forget_lost(manager: MemoryManager, frames: Set[int]) -> None:
    """These frames do not hold what they should: nobody finds that, or what hangs on it, any more, and what has been
    evicted from them is not saved. O(blocks)."""
    manager._residency.drop_saves(frames)
    index, blocks, lost = manager._index, manager._blocks, set[tuple[int, bytes]]()
    published = [block for block in blocks.in_use() if index.digest[block]]
    for block in sorted(published, key=index.depth.__getitem__):
        group, digest = blocks.group[block], index.digest[block]
        if blocks.frame[block] in frames or (group, index.parent[block]) in lost:
            lost.add((group, digest))
            manager._residency.forget(block)
