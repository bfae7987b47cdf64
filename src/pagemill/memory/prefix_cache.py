"""The prefix cache: finds published blocks for a prompt, and publishes those of a table."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import NamedTuple

from pagemill.memory.block_table import BlockTable
from pagemill.memory.core import MemoryCore
from pagemill.memory.digest import TOKEN_BYTES, pack_tokens
from pagemill.memory.prefix_index import Match


class Opened(NamedTuple):
    """A new table, and how many tokens of it were found in the cache (its length)."""

    table: BlockTable
    num_cached_tokens: int


def open_table(
    core: MemoryCore,
    token_ids: Sequence[int],
    digests: Sequence[bytes],
    root: bytes,
    now: float,
    limit: int,
    tenant: str,
) -> Opened:
    """Implements `MemoryManager.open`."""
    account = core.tenants[tenant]
    core.now = now
    if core.caches_prefixes:
        length, blocks, first_held = core.index.match(digests, root, token_ids, max(0, min(limit, len(token_ids))))
    else:
        length, blocks, first_held = 0, [array("i") for _ in core.windows], [0] * len(core.windows)
    table = BlockTable(root, account, blocks, first_held, length)
    table.published = length // core.block_size
    for entries, first in zip(blocks, first_held, strict=True):
        core.hold(entries[first:], account)
    core.tables.add(table)
    return Opened(table, length)


def match_whole(core: MemoryCore, digests: Sequence[bytes], root: bytes) -> Match:
    """Returns what `open` would find of a chain's whole blocks. Changes nothing."""
    known = digests if core.caches_prefixes else ()
    return core.index.match(known, root, (), len(known) * core.block_size)


def publish(core: MemoryCore, table: BlockTable, full: int, token_ids: Sequence[int], digests: Sequence[bytes]) -> None:
    """Publishes those of a table's first `full` entries that are not published yet.

    Where an equal block of another sequence is published already, the table takes that one instead of its own.
    """
    size, index, owner = core.block_size, core.index, core.blocks.owner
    first = table.published
    packed = pack_tokens(token_ids[first * size : full * size])
    stride = size * TOKEN_BYTES
    for entry in range(first, full):
        digest = digests[entry]
        parent = digests[entry - 1] if entry else table.root
        tokens = packed[(entry - first) * stride : (entry - first + 1) * stride]
        for group, entries in enumerate(table.blocks):
            block = entries[entry]
            if block < 0 or index.digest[block]:
                continue
            published = index.by_digest[group].get(digest)
            if published is None:
                core.blocks.versions[block] += 1  # before, see `find_placed`
                index.publish(block, group, digest, parent, tokens, entry)
                owner[block] = table.tenant.number
                if group == index.leading:
                    core.ghosts.published(digest)
            else:
                core.hold([published], table.tenant)
                entries[entry] = published
                core.edit(table, group, entry, [core.blocks.frame[published]])
                core.release([block], table.tenant)
    table.published = full
