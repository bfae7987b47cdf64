"""Recounts a memory's books from nothing, for tests and for `check_invariants` in production."""

from __future__ import annotations

from collections import Counter

from pagemill.errors import MemoryInvariantError
from pagemill.memory.block_table import first_entry_in_window
from pagemill.memory.core import MemoryCore
from pagemill.memory.digest import TOKEN_BYTES
from pagemill.memory.tenants import Tenant


def check(core: MemoryCore) -> None:
    """Raises MemoryInvariantError at the first disagreement. O(pool + tables)."""
    _frames(core)
    _references(core)
    _tables(core)
    _published(core)
    _states(core)
    _charges(core)


def _require(holds: bool, invariant: str, detail: str) -> None:
    if not holds:
        raise MemoryInvariantError(f"{invariant}: {detail}")


def _frames(core: MemoryCore) -> None:
    rule = "every frame is free or occupied by one block"
    frame_of, is_streamed = core.blocks.frame, core.blocks.streamed
    for frames, streamed in ((core.frames, 0), (core.streamed, 1)):
        here = Counter(frame_of[block] for block in core.blocks.in_use() if is_streamed[block] == streamed)
        for frame, blocks in here.items():
            is_free = frame not in frames.numbers or frames.is_free(frame)
            _require(blocks == 1 and not is_free, rule, f"frame {frame}: {blocks} blocks, {is_free=}")
        free = frames.count_free()
        _require(free == frames.num_free, rule, f"{free} frames are marked free, {frames.num_free} counted")
        _require(free + len(here) == len(frames.numbers), rule, f"{free} free + {len(here)} of {len(frames.numbers)}")


def _references(core: MemoryCore) -> None:
    rule = "a block's references are the table entries that name it and the steps in flight that hold it"
    named = Counter(b for table in core.tables for entries in table.blocks for b in entries if b >= 0)
    named.update(block for _, _, blocks in core.held for block in blocks)
    for block, count in enumerate(core.blocks.references):
        _require(count == named[block], rule, f"block {block} has {count}, named by {named[block]}")
    shared = sum(count > 1 for count in named.values())
    counted = core.blocks.num_shared
    _require(counted == shared, "shared blocks are counted", f"{shared} are shared, and {counted} counted")


def _tables(core: MemoryCore) -> None:
    blocks, size = core.blocks, core.block_size
    rows = Counter(table.row for table in core.tables if table.row >= 0)
    for row, tables in rows.items():
        _require(tables == 1, "a row belongs to one table", f"row {row} belongs to {tables}")
    for table in core.tables:
        entries = table.num_entries
        _require(table.length <= entries * size, "committed tokens have blocks", f"{table.length=}, {entries=}")
        _require(table.writable <= entries * size, "what is writable has blocks", f"{table.writable=}, {entries=}")
        for group, held in enumerate(table.blocks):
            first = table.first_held[group]
            seen = first_entry_in_window(table.length, core.windows[group], size)
            _require(len(held) == entries, "groups have equally many entries", f"{len(held)}, {entries}")
            _require(first <= seen, "what a window sees is held", f"group {group} from {first}, sees from {seen}")
            for entry, block in enumerate(held):
                _require((block < 0) == (entry < first), "only entries out of the window are empty", f"entry {entry}")
                if block >= 0:
                    detail = f"entry {entry}, block {block}"
                    _require(blocks.frame[block] >= 0, "no table names an ended block", detail)
                    _require(blocks.group[block] == group, "a block belongs to one group", detail)
                if entry * size >= table.length or table.length < min(table.writable, (entry + 1) * size):
                    alone = blocks.references[block] == 1 and not core.index.digest[block]
                    _require(alone, "what will be written is held by one table and not published", f"block {block}")
                    near = table.row < 0 or not blocks.streamed[block]
                    _require(near, "what will be written lies in the pool", f"block {block}")


def _published(core: MemoryCore) -> None:
    rule = "a block is published if and only if its digest finds it"
    index, blocks = core.index, core.blocks
    published = [block for block, digest in enumerate(index.digest) if digest]
    _require(len(published) == sum(map(len, index.by_digest)), rule, "the maps hold others")
    children = 0
    for block in published:
        digest, tokens, group = index.digest[block], index.tokens[block], blocks.group[block]
        _require(index.by_digest[group].get(digest) == block and blocks.frame[block] >= 0, rule, f"block {block}")
        whole = len(tokens) == core.block_size * TOKEN_BYTES
        _require(whole and index.parent[block] != b"", rule, f"block {block} has no parent or tokens")
        children += group == index.leading
        reached = index.depth[block] == 0 or index.parent[block] in index.by_digest[group]
        alone = core.windows[group] is not None or core.streamed.count > 0
        _require(reached or alone, "what a block hangs on can be found", f"block {block}")
    _require(children == index.count_children(), "each published block is among its parent's children", f"{children}")


def _states(core: MemoryCore) -> None:
    rule = "a block is cached if and only if it has no references"
    cached = 0
    is_streamed = core.blocks.streamed
    for block in core.blocks.in_use():
        references = core.blocks.references[block]
        in_pool = any(block in tenant.policy for tenant in core.tenants)
        in_policy = in_pool or block in core.streamed.cached
        cached += in_pool
        in_place = not in_policy or is_streamed[block] != in_pool
        _require(in_place, "what is cached is listed where it lies", f"block {block}")
        _require(in_policy == (references == 0), rule, f"block {block}: {references=}, {in_policy=}")
        _require(not in_policy or core.index.digest[block] != b"", "what is cached can be found", f"block {block}")
    listed = core.tenants.cached
    _require(cached == listed, rule, f"{cached} blocks, {listed} in the policies")
    for step, _, _ in core.held:
        _require(step > core.last_retired, "a retired step holds nothing", f"step {step}")


def _charges(core: MemoryCore) -> None:
    owned: dict[Tenant, set[int]] = {tenant: set() for tenant in core.tenants}
    in_pool = {block for block in core.blocks.in_use() if not core.blocks.streamed[block]}
    for table in core.tables:
        owned[table.tenant].update(block for entries in table.blocks for block in entries if block >= 0)
    for _, tenant, blocks in core.held:
        owned[tenant].update(blocks)
    for block in core.blocks.in_use():
        for tenant in core.tenants:
            if block in tenant.policy:
                owned[tenant].add(block)
                _require(core.blocks.owner[block] == tenant.number, "a block has one owner", f"block {block}")
    rule = "a block of the pool is charged once, to the owner of its namespace"
    promised = sum(tenant.promised for tenant in core.tenants)
    detail = f"{core.tenants.promised}, and it is {promised}"
    _require(core.tenants.promised == promised, "what is promised is the sum over tenants", detail)
    used, charges = len(in_pool), sum(tenant.charged for tenant in core.tenants)
    _require(charges == used, rule, f"{charges} are charged, {used} in use")
    for tenant, held in owned.items():
        held &= in_pool
        _require(tenant.charged == len(held), rule, f"{tenant.name!r} has {len(held)}, {tenant.charged} charged")
        within = tenant.charged <= tenant.max_blocks or not tenant.cached
        detail = f"{tenant.name!r}: {tenant.charged} of {tenant.max_blocks}, {tenant.cached} cached"
        _require(within, "a quota is exceeded by nothing cached", detail)
