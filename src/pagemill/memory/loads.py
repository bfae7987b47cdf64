"""Loads: tables of contents that come from below the pool, apart from those of its blocks that are here already."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

from pagemill.memory.block_table import BlockTable, first_entry_in_window
from pagemill.memory.publishing import publish
from pagemill.memory.streaming import take_lower

if TYPE_CHECKING:
    from pagemill.memory.manager import MemoryManager


class Lacking(NamedTuple):
    """A block that whoever goes on behind a chain needs, and that is not here: an entry of a table, and its group."""

    entry: int
    group: int


class OpenedLoad(NamedTuple):
    """A table that holds what is here of a chain; and what is not, the oldest first, groups side by side."""

    table: BlockTable
    lacking: list[Lacking]


class Needed(NamedTuple):
    """By group, what whoever goes on behind a chain needs of it: its blocks by entry, -1 for those that are not here;
    and the first entry.
    """

    blocks: list[array[int]]
    first: list[int]

    @property
    def here(self) -> list[int]:
        return [block for held in self.blocks for block in held if block >= 0]

    @property
    def lacking(self) -> list[Lacking]:
        columns = enumerate(zip(self.blocks, self.first, strict=True))
        return sorted(
            Lacking(entry, group)
            for group, (held, first) in columns
            for entry in range(first, len(held))
            if held[entry] < 0
        )


def needed(manager: MemoryManager, digests: Sequence[bytes]) -> Needed:
    length = len(digests) * manager.block_size
    first = [first_entry_in_window(length, window, manager.block_size) for window in manager.windows]
    blocks = [
        array("i", [-1] * begin + [published.get(digest, -1) for digest in digests[begin:]])
        for begin, published in zip(first, manager._index.by_digest, strict=True)
    ]
    return Needed(blocks, first)


def open_load(manager: MemoryManager, digests: Sequence[bytes], root: bytes, now: float, tenant: str) -> OpenedLoad:
    """The table's length is that of the chain from the start; nobody else sees it."""
    account, length = manager.tenants[tenant], len(digests) * manager.block_size
    chain = needed(manager, digests)
    table = BlockTable(root, account, chain.blocks, chain.first, length)
    manager._residency.now = now
    manager._residency.hold(chain.here, account)
    manager._tables.add(table)
    return OpenedLoad(table, chain.lacking)


def reserve_load(manager: MemoryManager, load: OpenedLoad, streamed: int) -> list[int] | None:
    """Frames for what is lacking, in that order; None, and no change, if there are too few. Those of the `streamed`
    oldest blocks of layers with full attention are lower ones."""
    table, missing = load
    below = {each for each in missing if manager.windows[each.group] is None}
    below = set(sorted(below)[:streamed])
    tenant, needed = table.tenant, len(missing) - len(below)
    if len(below) > manager.lower.available or needed > min(manager.available(tenant), tenant.room):
        return None
    manager._residency.make_room(tenant, needed)
    tenant.charged += needed
    for group, held in enumerate(table.blocks):
        for lower in (True, False):
            entries = [each.entry for each in missing if each.group == group and (each in below) == lower]
            for run in _runs(entries):
                after = held[run[0] - 1] if run[0] else -1
                take = take_lower(manager, len(run), after) if lower else manager._residency.take(len(run), after)
                held[run[0] : run[-1] + 1] = array("i", manager._blocks.new(group, take))
    frame = manager._blocks.frame
    return [frame[table.blocks[group][entry]] for entry, group in missing]


def end_load(
    manager: MemoryManager,
    table: BlockTable,
    whole: int,
    token_ids: Sequence[int],
    digests: Sequence[bytes],
    now: float,
) -> None:
    """The contents of the first `whole` entries can be found from now on; what else was to be loaded ends."""
    publish(manager, table, whole, token_ids, digests)
    manager.close(table, now)


def _runs(entries: Sequence[int]) -> list[list[int]]:
    """Of rising entries, those that are neighbours."""
    cuts = [0, *(at for at, (a, b) in enumerate(pairwise(entries), 1) if b > a + 1), len(entries)]
    return [list(entries[a:b]) for a, b in pairwise(cuts) if a < b]
