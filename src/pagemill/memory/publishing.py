"""Publishing: full, committed blocks of a table become findable, and equal contents one block."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pagemill.memory.block_table import BlockTable
from pagemill.memory.digest import TOKEN_BYTES, pack_tokens

if TYPE_CHECKING:
    from pagemill.memory.manager import MemoryManager


def publish(
    manager: MemoryManager, table: BlockTable, full: int, token_ids: Sequence[int], digests: Sequence[bytes]
) -> None:
    """The first `full` entries of a table, of those that are not published yet. Where an equal block of another
    sequence is, the table takes that one instead of its own."""
    size, index, residency = manager.block_size, manager._index, manager._residency
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
                index.publish(block, group, digest, parent, tokens, entry)
                if group == index.leading:
                    residency.regret.published(digest)
            else:
                residency.hold([published], table.tenant)
                entries[entry] = published
                manager._edit(table, group, entry, [manager._blocks.frame[published]])
                residency.release([block], table.tenant)
    table.published = full
