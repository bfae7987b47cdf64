"""Brings blocks back from offload stores: a load is a table that holds what is here of a chain, and room for the rest.

What goes to the stores is what was evicted (`MemoryCore.saves`), and at the end what is cached (`cached_blocks`).
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from heapq import merge
from itertools import pairwise
from typing import NamedTuple

from pagemill.memory.block_table import BlockTable, first_entry_in_window
from pagemill.memory.core import MemoryCore
from pagemill.memory.work import BlockName, Save


class MissingBlock(NamedTuple):
    """A block that whoever goes on behind a chain reads, and that is not here: an entry of a table, and its group."""

    entry: int
    group: int


class OpenedLoad(NamedTuple):
    """A table that holds what is here of a chain; and what is missing, the oldest first, groups side by side."""

    table: BlockTable
    missing: list[MissingBlock]


class Placed(NamedTuple):
    """A published block of the pool: its name, its frame, its id, and the version of that."""

    name: BlockName
    frame: int
    block: int
    version: int


class ChainBlocks(NamedTuple):
    """The blocks that whoever goes on behind a chain reads.

    blocks: by group, block ids by entry, -1 where there is none here. first: by group, the first entry that is read.
    """

    blocks: list[array[int]]
    first: list[int]

    @property
    def here(self) -> list[int]:
        return [block for held in self.blocks for block in held if block >= 0]

    @property
    def missing(self) -> list[MissingBlock]:
        columns = enumerate(zip(self.blocks, self.first, strict=True))
        return sorted(
            MissingBlock(entry, group)
            for group, (held, first) in columns
            for entry in range(first, len(held))
            if held[entry] < 0
        )


def find_chain(core: MemoryCore, digests: Sequence[bytes]) -> ChainBlocks:
    """Returns the blocks that position len(digests) * block_size sees."""
    length = len(digests) * core.block_size
    first = [first_entry_in_window(length, window, core.block_size) for window in core.windows]
    blocks = [
        array("i", [-1] * begin + [published.get(digest, -1) for digest in digests[begin:]])
        for begin, published in zip(first, core.index.by_digest, strict=True)
    ]
    return ChainBlocks(blocks, first)


def open_load(core: MemoryCore, digests: Sequence[bytes], root: bytes, now: float, tenant: str) -> OpenedLoad:
    """Implements `MemoryManager.open_load`. The table has the chain's length from the start; nobody else sees it."""
    account, length = core.tenants[tenant], len(digests) * core.block_size
    chain = find_chain(core, digests)
    table = BlockTable(root, account, chain.blocks, chain.first, length)
    core.now = now
    core.hold(chain.here, account)
    core.tables.add(table)
    return OpenedLoad(table, chain.missing)


def reserve_load(core: MemoryCore, load: OpenedLoad, num_streamed: int) -> list[int] | None:
    """Implements `MemoryManager.reserve_load`."""
    table, missing = load
    streamed = set(sorted(each for each in missing if core.windows[each.group] is None)[:num_streamed])
    tenant, needed = table.tenant, len(missing) - len(streamed)
    if len(streamed) > core.streamed.available or needed > min(core.available(tenant), tenant.room):
        return None
    core.make_room(tenant, needed)
    tenant.charged += needed
    blocks = core.blocks
    for group, held in enumerate(table.blocks):
        for streams in (True, False):
            entries = [each.entry for each in missing if each.group == group and (each in streamed) == streams]
            for run in _runs(entries):
                take = core.take_streamed if streams else core.take
                new = blocks.new(group, take(len(run), held[run[0] - 1] if run[0] else -1))
                if streams:
                    blocks.set_streamed(new, True)
                held[run[0] : run[-1] + 1] = array("i", new)
    return [blocks.frame[table.blocks[group][entry]] for entry, group in missing]


def find_placed(core: MemoryCore, digest: bytes, group: int) -> Placed | None:
    """Implements `MemoryManager.find_placed`.

    What is published is not written. So a frame that held a block before a read and after it held it during the read,
    unless the block was gone between; then its id has another version. The order of look-ups counts, since the memory
    system may change between any two of them: who sees a version sees too whether the block is on its way to a frame.
    """
    index, blocks = core.index, core.blocks
    block = index.by_digest[group].get(digest)
    if block is None:
        return None
    version = blocks.versions[block]
    if index.by_digest[group].get(digest) != block or block in core.moving or blocks.streamed[block]:
        return None
    name = BlockName(digest, group, index.parent[block], index.depth[block])
    return Placed(name, blocks.frame[block], block, version)


def cached_blocks(core: MemoryCore) -> list[Save]:
    """Implements `MemoryManager.cached_blocks`."""
    orders = (order.latest() for order in (core.streamed.cached, *(tenant.policy for tenant in core.tenants)))
    return [core.save_of(block) for block, _ in merge(*orders, key=lambda since: since[1], reverse=True)]


def _runs(entries: Sequence[int]) -> list[list[int]]:
    """Cuts rising entries into runs of neighbours."""
    cuts = [0, *(at for at, (a, b) in enumerate(pairwise(entries), 1) if b > a + 1), len(entries)]
    return [list(entries[a:b]) for a, b in pairwise(cuts) if a < b]
