"""BlockTable: one sequence's map from positions to blocks, for each layer group.

Running sequences, forked children and, later, idle sessions and pins are all block tables. Only the memory manager
changes them; others may read.
"""

from __future__ import annotations

from array import array
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
        """Blocks held over all groups, shared ones included."""
        return sum(len(entries) - first for entries, first in zip(self.blocks, self.first_held, strict=True))

    def tail_first(self, start: int) -> list[int]:
        """All blocks held in entries `start` and on, the last entry first, groups side by side.

        Released in this order, a sequence's end is evicted before its beginning, which more sequences can use.
        """
        tails = [entries[: start - 1 if start else None : -1] for entries in self.blocks]
        return [block for entry in zip(*tails, strict=True) for block in entry if block >= 0]


def first_entry_in_window(length: int, window: int | None, block_size: int) -> int:
    """The first entry that a query at position `length`, or any after it, can see.

    A query at position p sees keys p - window + 1 .. p; with window None, all keys up to p.
    """
    return 0 if window is None else max(0, length - window + 1) // block_size
