"""Reserves and releases a table's blocks: what a sequence is about to write, and what it no longer needs."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import NamedTuple

from pagemill.memory.block_table import BlockTable, first_entry_in_window
from pagemill.memory.core import MemoryCore
from pagemill.memory.prefix_cache import publish


class Shortage(NamedTuple):
    """Frames that a `reserve` needed, and those that its tenant could have had."""

    needed: int
    available: int

    @property
    def missing(self) -> int:
        return self.needed - self.available


def reserve(core: MemoryCore, table: BlockTable, up_to: int) -> Shortage | None:
    """Implements `MemoryManager.reserve`."""
    if up_to <= table.writable or up_to <= table.length:
        return None
    held = len(table.blocks[0])
    tail = table.length // core.block_size
    new = -(-up_to // core.block_size) - held
    unwritable = []
    if tail < held:
        references, digest = core.blocks.references, core.index.digest
        for group, entries in enumerate(table.blocks):
            block = entries[tail]
            if references[block] > 1 or digest[block]:
                unwritable.append(group)
    if new <= 0:
        if not unwritable:
            table.writable = held * core.block_size
            return None
        new = 0

    tenant, needed = table.tenant, new * len(core.windows) + len(unwritable)
    if needed > core.frames.num_free or needed > tenant.max_blocks - tenant.charged:
        available = min(core.available(tenant), tenant.room)
        if needed > available:
            # Where the table is the only holder, the published block itself can make room: instead of copying it
            # and evicting it, take it back from the index. So a sequence alone in the pool never fails here.
            own = [group for group in unwritable if _is_own(core, table.blocks[group][tail])]
            missing = needed - available
            if missing > len(own):
                return Shortage(needed, available)
            for group in own[:missing]:
                core.unpublish(table.blocks[group][tail])
                tenant.evictions += 1
                unwritable.remove(group)
            needed = available
        core.make_room(tenant, needed)
    tenant.charged += needed
    for group in unwritable:
        _copy(core, table, group, tail)
    if new:
        for group, entries in enumerate(table.blocks):
            frames = core.take(new, entries[-1] if entries else -1)
            entries.extend(core.blocks.new(group, frames))
            if table.row >= 0:
                core.edit(table, group, held, frames)
    table.writable = (held + new) * core.block_size
    return None


def commit(
    core: MemoryCore, table: BlockTable, length: int, token_ids: Sequence[int], digests: Sequence[bytes]
) -> None:
    """Implements `MemoryManager.commit`."""
    size = core.block_size
    if length < table.length or (length > table.writable and length > table.num_entries * size):
        raise ValueError(
            f"cannot commit up to {length}: {table.length} tokens are committed, "
            f"{table.num_entries * size} are reserved"
        )
    table.length = length
    if core.caches_prefixes and table.published < length // size:
        full = min(length // size, len(digests))
        if table.published < full:
            publish(core, table, full, token_ids, digests)
    for group, window in core.windowed:
        first, now_first = table.first_held[group], first_entry_in_window(length, window, size)
        if first < now_first:
            entries = table.blocks[group]
            released = entries[first:now_first].tolist()
            gone = [-1] * (now_first - first)
            entries[first:now_first] = array("i", gone)
            table.first_held[group] = now_first
            core.edit(table, group, first, gone)
            core.release(released, table.tenant)


def fork(core: MemoryCore, table: BlockTable, length: int) -> BlockTable:
    """Implements `MemoryManager.fork`."""
    if length > table.length:
        raise ValueError(f"cannot fork at {length}: only {table.length} tokens are committed")
    _require_window(core, table, length)
    entries = -(-length // core.block_size)
    blocks = [held[:entries] for held in table.blocks]
    child = BlockTable(table.root, table.tenant, blocks, table.first_held.copy(), length)
    child.published = min(table.published, length // core.block_size)
    table.writable = 0
    core.blocks.hold(child.tail_first(0))
    core.tables.add(child)
    return child


def truncate(core: MemoryCore, table: BlockTable, length: int) -> None:
    """Implements `MemoryManager.truncate`."""
    _require_window(core, table, length)
    entries = -(-length // core.block_size)
    released = table.tail_first(entries)
    for group, held in enumerate(table.blocks):
        core.edit(table, group, entries, [-1] * (len(held) - entries))
        del held[entries:]
    table.length = min(table.length, length)
    table.published = min(table.published, length // core.block_size)
    table.writable = 0
    core.release(released, table.tenant)


def adopt(core: MemoryCore, table: BlockTable, fork: BlockTable, now: float) -> None:
    """Implements `MemoryManager.adopt`."""
    tail = fork.length // core.block_size
    if fork.length != table.length or any(
        held[:tail] != other[:tail] for held, other in zip(table.blocks, fork.blocks, strict=True)
    ):
        raise ValueError(f"a table of {table.length} tokens cannot adopt what is no fork of it, of {fork.length}")
    released = table.tail_first(tail)
    for group, (held, other) in enumerate(zip(table.blocks, fork.blocks, strict=True)):
        further = other[tail:]
        core.edit(table, group, tail, core.frames_of(further) + [-1] * (len(held) - tail - len(further)))
        held[tail:] = further
        del other[tail:]
    table.writable = 0
    core.release(released, table.tenant)
    close(core, fork, now)


def close(core: MemoryCore, table: BlockTable, now: float, *, used: bool = True) -> None:
    """Implements `MemoryManager.close`."""
    if not used:
        for block in table.held:
            if core.blocks.references[block] == 1:
                table.tenant.policy.unuse(block)
    core.tables.remove(table)
    core.now = now
    released = table.tail_first(0)
    table.blocks = [array("i") for _ in core.windows]
    table.first_held = [0] * len(core.windows)
    table.length = table.published = table.writable = 0
    if table.row >= 0:
        core.pending.leave(table.row)
        table.row = -1
    core.release(released, table.tenant)


def _is_own(core: MemoryCore, block: int) -> bool:
    """Returns whether one table alone holds a block of the pool."""
    return core.blocks.references[block] == 1 and not core.blocks.streamed[block]


def _copy(core: MemoryCore, table: BlockTable, group: int, entry: int) -> None:
    """Puts a copy of its own in the place of a block that others hold or may find. The frame must be there."""
    entries = table.blocks[group]
    source = entries[entry]
    frames = core.take(1, entries[entry - 1] if entry else -1)
    core.pending.copy(core.blocks.frame[source], frames[0])
    core.num_copies += 1
    entries[entry] = core.blocks.new(group, frames)[0]
    core.edit(table, group, entry, frames)
    core.release([source], table.tenant)


def _require_window(core: MemoryCore, table: BlockTable, length: int) -> None:
    for first, window in zip(table.first_held, core.windows, strict=True):
        if first_entry_in_window(length, window, core.block_size) < first:
            raise ValueError(
                f"cannot go back to {length} tokens: a window of {window} needs blocks that were given back; "
                f"the table holds positions from {first * core.block_size} on"
            )
