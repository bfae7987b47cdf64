"""Describes the KV memory for somebody who watches it: the block map, block tables, the prefix tree."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import NamedTuple

import numpy as np

from pagemill.engine.kv_map import KVMap, KVTable, KVTier, KVTreeNode
from pagemill.engine.stats import EngineStats
from pagemill.memory.block_table import BlockTable
from pagemill.memory.manager import MAP_COLUMNS, MemoryManager, TierMap
from pagemill.memory.tenants import Tenant
from pagemill.scheduling.scheduler import Scheduler

MAX_CELLS = 4096
"""Cells of a tier's map; a cell of a larger tier has several frames."""
MAX_TABLES = 48
"""Block tables that are shown."""
MAX_ENTRIES = 512
"""Entries of a block table that are shown, the last ones."""
MAX_CACHED = 512
"""Cached blocks of a tenant that the prefix tree looks at, those used last."""
MAX_CHAINS = 32
"""Chains of a tenant's cached blocks in the prefix tree."""
MAX_TREE_TENANTS = 16
"""Tenants whose cached blocks the prefix tree looks at."""


class View(NamedTuple):
    """Who looks: whose blocks are told apart, and the roots of the namespace whose tables are shown: one for the model
    itself, and one for each adapter."""

    tenant: Tenant
    roots: set[bytes]


def kv_map(
    memory: MemoryManager,
    scheduler: Scheduler,
    stats: EngineStats,
    streamed: str,
    view: View | None,
    with_tree: bool,
) -> KVMap:
    """Returns what an admin sees (`view` is None), or one tenant.

    streamed: the name of the tier that has the streamed frames.
    """
    seen_by = None if view is None else view.tenant
    pinned = [pin.table for pin in scheduler.pins.list() if pin.table is not None]
    pool, below = memory.block_map(pinned, scheduler.arriving(), seen_by, MAX_CELLS)
    shown, num_tables = _shown(scheduler, view)
    accounts = [one.account for one in scheduler.tenants if view is None or one.account is view.tenant]
    for card, table in shown:
        if table is not None:
            _add_entries(card, table, memory)
    if view is not None:
        stats.tenants = {name: one for name, one in stats.tenants.items() if name == view.tenant.name}
    return KVMap(
        block_size=memory.block_size,
        layer_groups=len(memory.windows),
        columns=list(MAP_COLUMNS),
        tiers=[_tier("device", pool), *([_tier(streamed, below)] if below.num_frames else [])],
        owners={account.number + 1: account.name for account in accounts},
        tables=[card for card, _ in shown],
        num_tables=num_tables,
        tree=_tree(memory, [table for _, table in shown], accounts[:MAX_TREE_TENANTS]) if with_tree else None,
        published_blocks=memory.num_published,
        stats=stats,
    )


def _shown(scheduler: Scheduler, view: View | None) -> tuple[list[tuple[KVTable, BlockTable | None]], int]:
    """Returns the first tables that may be seen, and how many there are."""
    cards = _cards(scheduler, view)
    shown = list(islice(cards, MAX_TABLES))
    return shown, len(shown) + sum(1 for _ in cards)


def _cards(scheduler: Scheduler, view: View | None) -> Iterator[tuple[KVTable, BlockTable | None]]:
    for pin in scheduler.pins.list():
        if pin.table is not None and (view is None or pin.table.root in view.roots):
            yield KVTable(
                kind="pin", name=pin.name, index=0, tenant=pin.space.tenant, running=True,
                num_tokens=pin.num_tokens, num_computed=pin.num_tokens,
            ), pin.table  # fmt: skip
    for one in scheduler.sequences():
        request, table = one.request, one.table
        if view is None or request.root in view.roots:
            yield KVTable(
                kind="request", name=request.request_id, index=one.index, tenant=request.tenant,
                running=table is not None, num_tokens=len(one.tokens),
                num_computed=0 if table is None else table.length,
            ), table  # fmt: skip


def _add_entries(card: KVTable, table: BlockTable, memory: MemoryManager) -> None:
    """Adds the last entries of a table to what is shown of it."""
    card.num_entries = table.num_entries
    card.first_entry = first = max(0, table.num_entries - MAX_ENTRIES)
    for entries in table.blocks:
        blocks = np.array(entries[first:], np.int32)
        card.frames.append(memory.locate(blocks).astype("<i4").tobytes())
        card.holders.append(memory.count_holders(blocks).astype("<i4").tobytes())


def _tree(memory: MemoryManager, tables: list[BlockTable | None], accounts: list[Tenant]) -> list[KVTreeNode]:
    """Returns the prefix tree of the tables that are shown, and of what these tenants have cached last."""
    places = [place for place, table in enumerate(tables) if table is not None]
    nodes = memory.prefix_tree([table for table in tables if table is not None], accounts, MAX_CACHED, MAX_CHAINS)
    frames = memory.locate(np.array([node.first_block for node in nodes], np.int32)).tolist()
    return [
        KVTreeNode(
            parent=node.parent,
            num_blocks=node.num_blocks,
            frame=frame,
            tables=[places[table] for table in node.tables],
            tenant=node.tenant.name,
        )
        for node, frame in zip(nodes, frames, strict=True)
    ]


def _tier(name: str, tier: TierMap) -> KVTier:
    return KVTier(
        name=name,
        first_frame=tier.first_frame,
        num_frames=tier.num_frames,
        frames_per_cell=tier.frames_per_cell,
        cells=tier.cells.astype("<u2").tobytes(),
    )
