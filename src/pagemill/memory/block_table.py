"""BlockTable: one sequence's map from positions to blocks, for each layer group; and Footprint: how many these become.

Running sequences, forked children, loads and pins are all block tables. Only the memory manager changes them; others
may read.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from pagemill.memory.tenants import Tenant


@dataclass(slots=True, eq=False)
class BlockTable:
    """Entry i holds positions i * block_size .. (i + 1) * block_size - 1. All groups have equally many entries.

    blocks:    by group, block ids as int32; -1 where nothing is held because it fell out of the group's window.
    length:    tokens whose K/V are in the cache (committed). Entries may reach beyond: reserved, not yet committed.
    row:       row of the persistent batch, -1 for a table that the device does not know.
    root:      digest in which the chain of this table's namespace begins.
    tenant:    who owns that namespace, and is charged for the blocks.
    published: leading blocks that need no more publishing.
    first_held: by group, the first entry that is not -1.
    writable:  positions from `length` up to this one are known to be reserved, and nobody else's.
    """

    root: bytes
    tenant: Tenant
    blocks: list[array[int]]
    first_held: list[int]
    length: int
    row: int = -1
    published: int = 0
    writable: int = 0

    @property
    def num_entries(self) -> int:
        return len(self.blocks[0])

    @property
    def num_held(self) -> int:
        """Returns how many blocks it holds over all groups, shared ones included."""
        return sum(len(entries) - first for entries, first in zip(self.blocks, self.first_held, strict=True))

    @property
    def held(self) -> array[int]:
        """Returns the blocks that it holds, group after group. O(entries)."""
        held = array("i")
        for entries, first in zip(self.blocks, self.first_held, strict=True):
            held += entries[first:]
        return held

    def tail_first(self, start: int) -> list[int]:
        """Returns the blocks held in entries `start` and on, the last entry first, groups side by side.

        Released in this order, a sequence's end is evicted before its beginning, which more sequences can use.
        """
        tails = [entries[: start - 1 if start else None : -1] for entries in self.blocks]
        return [block for entry in zip(*tails, strict=True) for block in entry if block >= 0]


def first_entry_in_window(length: int, window: int | None, block_size: int) -> int:
    """Returns the first entry that a query at position `length`, or any after it, can see.

    A query at position p sees keys p - window + 1 .. p; with window None, all keys up to p.
    """
    return 0 if window is None else max(0, length - window + 1) // block_size


class Footprint:
    """Blocks of a sequence that grows in steps of 1 to `chunk` tokens, behind its first `found` tokens.

    windows: by layer group, in tokens, or None. streamed: frames from which attention can stream.
    """

    def __init__(self, block_size: int, windows: Sequence[int | None], streamed: int = 0) -> None:
        self._block_size = block_size
        self._windows = windows
        self._streamed = streamed

    def blocks(self, num_tokens: int, chunk: int, found: int = 0) -> int:
        """Returns the most blocks that it may hold at once, over all groups, until it has `num_tokens`.

        A step from s to e holds, by group, the entries from the first that position s sees to the one of e - 1. The
        maximum is reached by the largest step that just enters the last entry.
        """
        entries = -(-num_tokens // self._block_size)
        return sum(entries - first for first in self._first_held(num_tokens, chunk, found))

    def pinned(self, num_tokens: int, chunk: int, pinned: int, found: int = 0) -> int:
        """Returns how many of these blocks lie in its `pinned` leading entries."""
        return sum(max(0, pinned - first) for first in self._first_held(num_tokens, chunk, found))

    def frames(self, num_tokens: int, chunk: int, pinned: int = 0, found: int = 0) -> int:
        """Returns the fewest frames of the pool with which, alone in the pool, it always gets to `num_tokens`.

        Without streamed frames that is all it holds; with them, what a step writes and what does not fit into them.
        Its `pinned` leading entries stay in the pool.
        """
        held = self.blocks(num_tokens, chunk, found)
        if not self._streamed or not held:
            return held
        entries, written = -(-num_tokens // self._block_size), (chunk - 1) // self._block_size + 2
        return held - min(self._windows.count(None) * max(0, entries - written - pinned), self._streamed)

    def _first_held(self, num_tokens: int, chunk: int, found: int) -> list[int]:
        """Returns, by group, the first entry that it holds when it holds most."""
        start = max(0, found, (num_tokens - 1) // self._block_size * self._block_size + 1 - chunk)
        return [first_entry_in_window(start, window, self._block_size) for window in self._windows]
