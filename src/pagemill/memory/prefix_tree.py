"""The prefix tree as people see it: runs of blocks that chains have in common, without what their tokens are."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice, pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from pagemill.memory.block_table import BlockTable
from pagemill.memory.core import MemoryCore
from pagemill.memory.tenants import Tenant

Blocks = npt.NDArray[np.int32]


class TreeNode(NamedTuple):
    """A run of blocks that belong together: each chain that has one of them and goes on has all.

    parent:      its place in the list, -1 for a root.
    first_block: the id of its first block.
    num_blocks:  how many blocks the run has.
    tables:      places of the tables that hold it, of those that were given; none if it is only cached.
    tenant:      whose it is.
    """

    parent: int
    first_block: int
    num_blocks: int
    tables: list[int]
    tenant: Tenant


class _Chain(NamedTuple):
    """A path from a root: its blocks in the leading layer group, and which table that is; -1 for what is cached."""

    blocks: Blocks
    table: int
    tenant: Tenant


def prefix_tree(
    core: MemoryCore, tables: Sequence[BlockTable], accounts: Iterable[Tenant], max_cached: int, max_chains: int
) -> list[TreeNode]:
    """Implements `MemoryManager.prefix_tree`."""
    leading = core.index.leading
    chains = [
        _Chain(np.array(table.blocks[leading][table.first_held[leading] :], np.int32), number, table.tenant)
        for number, table in enumerate(tables)
        if table.num_entries
    ]
    for account in accounts:
        chains += _cached_chains(core, account, tables, max_cached, max_chains)
    chains.sort(key=lambda chain: chain.blocks.tobytes())
    common = [0, *(_common(a.blocks, b.blocks) for a, b in pairwise(chains)), 0]
    nodes: list[TreeNode] = []
    _grow(nodes, -1, chains, common, 0)
    return nodes


def _grow(nodes: list[TreeNode], parent: int, chains: list[_Chain], common: list[int], depth: int) -> None:
    """Adds the runs of chains that have their first `depth` blocks in common.

    common: with how many blocks each chain begins like the one before it, and one more entry for the end.
    """
    begin = 0
    for end in range(1, len(chains) + 1):
        if end < len(chains) and common[end] > depth:
            continue
        group, shared = chains[begin:end], common[begin : end + 1]
        until = min(shared[1:-1], default=len(group[0].blocks))
        if until > depth:
            held_by = sorted(chain.table for chain in group if chain.table >= 0)
            nodes.append(TreeNode(parent, int(group[0].blocks[depth]), until - depth, held_by, group[0].tenant))
            if len(group) > 1:
                _grow(nodes, len(nodes) - 1, group, shared, until)
        begin = end


def _cached_chains(
    core: MemoryCore, account: Tenant, tables: Sequence[BlockTable], max_cached: int, max_chains: int
) -> list[_Chain]:
    """Returns the chains of a tenant's cached blocks, of the `max_cached` that were used last."""
    group, leading = core.blocks.group, core.index.leading
    chains: list[list[int]] = []
    place: dict[int, tuple[list[int], int]] = {}
    for block, _ in islice(account.policy.latest(), max_cached):
        if group[block] != leading:
            continue
        before = core.parent(block)
        chain, length = place.get(before, (None, 0))
        if chain is None or len(chain) != length:
            if len(chains) == max_chains:
                break
            chain = [*(_active_prefix(core, before, tables) if chain is None else chain[:length])]
            chains.append(chain)
        chain.append(block)
        place[block] = chain, len(chain)
    return [_Chain(np.array(chain, np.int32), -1, account) for chain in chains]


def _active_prefix(core: MemoryCore, block: int, tables: Sequence[BlockTable]) -> Sequence[int]:
    """Returns the chain up to an active block, as one of the tables has it; nothing if none has it."""
    if block < 0:
        return ()
    leading, entry = core.index.leading, core.depth(block)
    for table in tables:
        entries = table.blocks[leading]
        if entry < len(entries) and entries[entry] == block:
            return entries[table.first_held[leading] : entry + 1]
    return ()


def _common(a: Blocks, b: Blocks) -> int:
    """Returns how many leading blocks two chains have in common."""
    length = min(len(a), len(b))
    differs = np.flatnonzero(a[:length] != b[:length])
    return int(differs[0]) if len(differs) else length
