"""What an engine shows of its KV memory: the message that answers `KVMapQuery`."""

from __future__ import annotations

import msgspec

from pagemill.engine.stats import EngineStats


class KVTier(msgspec.Struct, kw_only=True):
    """The frames of a tier in order, `frames_per_cell` to a cell.

    cells: rows of uint16 (little endian), `KVMap.columns` wide.
    """

    name: str
    first_frame: int
    num_frames: int
    frames_per_cell: int
    cells: bytes


class KVTable(msgspec.Struct, kw_only=True):
    """A block table, of a running sequence or a pin; or a sequence that waits, and has none.

    frames: by layer group, the frames of its entries from `first_entry` on as int32 (little endian), -1 where nothing
    is held. holders: the same for how many tables hold each of these blocks.
    """

    kind: str
    """"request" or "pin"."""
    name: str
    index: int
    """The number of the sequence among the request's `n`."""
    tenant: str
    running: bool
    num_tokens: int
    num_computed: int
    """Tokens whose K/V are in the cache."""
    num_entries: int = 0
    first_entry: int = 0
    """Entries before it are left out, since a table is shown with its last ones only."""
    frames: list[bytes] = []
    holders: list[bytes] = []


class KVTreeNode(msgspec.Struct, kw_only=True):
    """A run of blocks in the prefix tree. parent: its place in the list; -1: it is a root."""

    parent: int
    num_blocks: int
    frame: int
    """Where its first block lies."""
    tables: list[int]
    """Places in `KVMap.tables` of those that hold it; none: it is only cached."""
    tenant: str


class KVMap(msgspec.Struct, tag=True, kw_only=True):
    """The KV memory between two steps, as one tenant or an admin may see it.

    Lists are cut to their bounds; the numbers beside them count all.
    """

    block_size: int
    layer_groups: int
    columns: list[str]
    tiers: list[KVTier]
    owners: dict[int, str]
    """Tenants by their number in a cell. 0 is nobody, and a number that is not in here another tenant."""
    tables: list[KVTable]
    num_tables: int
    tree: list[KVTreeNode] | None
    """None unless it was asked for."""
    published_blocks: int
    stats: EngineStats
