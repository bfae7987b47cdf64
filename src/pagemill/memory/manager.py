"""MemoryManager: the one door into the memory system, and its table of contents.

It gives block tables their blocks, shares what is equal, copies what is shared before it is written, keeps what can be
found again until its frame is needed, and tells the device what to do. Every method is one operation over `MemoryCore`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence, Set

import numpy as np
import numpy.typing as npt

from pagemill.memory import block_map, checks, moving, offload, prefix_cache, prefix_tree, reservation, statistics
from pagemill.memory.block_map import MAP_COLUMNS, TierMap
from pagemill.memory.block_table import BlockTable, Footprint
from pagemill.memory.compaction import Compaction
from pagemill.memory.core import MemoryCore
from pagemill.memory.eviction import PolicyFactory, least_recently_used
from pagemill.memory.frames import StreamedFrames
from pagemill.memory.kv_events import KVEvents, RecordedIndex
from pagemill.memory.offload import MissingBlock, OpenedLoad, Placed
from pagemill.memory.prefix_cache import Opened
from pagemill.memory.prefix_tree import TreeNode
from pagemill.memory.reservation import Shortage
from pagemill.memory.statistics import MemoryStats, Occupancy, Residency, Scatter
from pagemill.memory.tenants import Quota, Tenant
from pagemill.memory.wanted import WantedBlocks
from pagemill.memory.work import MemoryWork, Save
from pagemill.tenant_limits import DEFAULT_TENANT

__all__ = [
    "MAP_COLUMNS", "KVEvents", "MemoryManager", "MemoryStats", "MissingBlock", "Occupancy", "Opened", "OpenedLoad",
    "Placed", "Residency", "Scatter", "Shortage", "TierMap", "TreeNode",
]  # fmt: skip


class MemoryManager:
    """Block tables over one pool of frames. Not thread-safe; every operation is O(1) per block that it touches.

    num_frames: frames in the device pool, for the blocks of all groups.
    block_size: tokens per block.
    windows:    by layer group, the attention window in tokens, or None for full attention.
    policy:     each tenant's order of eviction; the least recently used by default.
    saves_evicted:   whether `take_saves` offers what is evicted to offload stores.
    streamed_frames: the number of the first frame beside the pool from which attention streams, and how many there are.
    records_events:  whether `take_events` says which blocks come and go.

    footprint:  how many blocks and frames a sequence takes.
    tenants:    the accounts.
    streamed:   the streamed frames.
    compaction: makes the frames of a table neighbours again.
    wanted:     what preempted sequences will need again.
    """

    def __init__(
        self,
        num_frames: int,
        block_size: int,
        windows: Sequence[int | None],
        enable_prefix_caching: bool = True,
        policy: PolicyFactory = least_recently_used,
        saves_evicted: bool = False,
        streamed_frames: tuple[int, int] = (0, 0),
        records_events: bool = False,
    ) -> None:
        if num_frames < 1 or block_size < 1 or not windows or any(w is not None and w < 1 for w in windows):
            raise ValueError(f"need frames, a block size and groups: {num_frames=}, {block_size=}, {windows=}")
        self.streamed = StreamedFrames(*streamed_frames)
        self.core = MemoryCore(
            num_frames,
            block_size,
            windows,
            enable_prefix_caching,
            policy,
            saves_evicted,
            self.streamed,
            records_events,
        )
        self.block_size = block_size
        self.windows = self.core.windows
        self.footprint = Footprint(block_size, self.windows, self.streamed.count)
        self.tenants = self.core.tenants
        self.compaction = Compaction(self.core)
        self.wanted = WantedBlocks()

    # Find: the prefix cache

    def open(
        self,
        token_ids: Sequence[int],
        digests: Sequence[bytes],
        root: bytes,
        now: float,
        limit: int,
        tenant: str = DEFAULT_TENANT,
    ) -> Opened:
        """Opens a table that holds the longest prefix of at most `limit` tokens that can be found.

        Takes references, no frames. `limit` below the sequence's length leaves tokens to compute. `digests` are of the
        full blocks of `token_ids`, all or the leading ones; `root` begins their chain, and belongs to this tenant.
        Raises UnknownTenantError.
        """
        return prefix_cache.open_table(self.core, token_ids, digests, root, now, limit, tenant)

    def peek(self, digests: Sequence[bytes], root: bytes) -> int:
        """Returns how many leading full blocks `open` would find now. Changes nothing."""
        return prefix_cache.match_whole(self.core, digests, root).num_tokens // self.block_size

    def count_active(self, digests: Sequence[bytes], root: bytes) -> int:
        """Returns how many of the blocks that `open` would find by these digests are active. Changes nothing."""
        match, references = prefix_cache.match_whole(self.core, digests, root), self.core.blocks.references
        return sum(block >= 0 and references[block] > 0 for entries in match.blocks for block in entries)

    def count_cached(self, digests: Sequence[bytes], root: bytes) -> int:
        """Returns how many of the blocks that `open` would find by these digests are cached in the pool, so that nobody
        could have their frames any more. Changes nothing."""
        match, blocks = prefix_cache.match_whole(self.core, digests, root), self.core.blocks
        found = [block for entries in match.blocks for block in entries if block >= 0]
        return sum(not blocks.references[block] and not blocks.streamed[block] for block in found)

    def reach(self, digests: Sequence[bytes], stored: Callable[[tuple[bytes, int]], bool]) -> int:
        """Returns how many leading blocks `peek` would find if those `stored` elsewhere (digest, group) were here."""
        return self.core.index.reach(digests, stored)

    # Reserve and release: a step is reserve, drain, (the device works,) commit, retire

    def reserve(self, table: BlockTable, up_to: int) -> Shortage | None:
        """Makes positions table.length .. up_to - 1 writable in every group, or changes nothing and says what it lacks.

        New blocks where there are none; and a copy of the block in which the first of these positions lies, if others
        hold it or it is published. Evicts cached blocks as needed, and never takes from a table. The table's tenant is
        charged.
        """
        return reservation.reserve(self.core, table, up_to)

    def commit(self, table: BlockTable, length: int, token_ids: Sequence[int], digests: Sequence[bytes]) -> None:
        """Notes that tokens up to `length` are in the cache: publishes full blocks, releases those out of their window.

        A block is published once its digest is given, at this commit or a later one. If an equal block of another
        sequence is published already, the table takes that one instead of its own: equal digests mean equal bits, a
        frame comes back, and all that a published block hangs on stays findable. Raises ValueError if `length` goes
        back (see `truncate`) or beyond what was reserved.
        """
        reservation.commit(self.core, table, length, token_ids, digests)

    def fork(self, table: BlockTable, length: int) -> BlockTable:
        """Opens a table that shares the first `length` committed tokens. Takes no frame: writing copies, see `reserve`.

        Raises ValueError if `length` exceeds the table's, or if blocks that its window needs were given back.
        """
        return reservation.fork(self.core, table, length)

    def adopt(self, table: BlockTable, fork: BlockTable, now: float) -> None:
        """Gives a table the blocks of a fork of it, from the one in which the next token lies, in the place of its own;
        closes the fork.

        To be called before either commits more: what the fork has written becomes the table's. Raises ValueError
        unless both have as many committed tokens, in the same blocks before that one.
        """
        reservation.adopt(self.core, table, fork, now)

    def truncate(self, table: BlockTable, length: int) -> None:
        """Gives back all entries behind the first `length` tokens, reserved or committed.

        Raises ValueError if blocks that the window at `length` needs were given back.
        """
        reservation.truncate(self.core, table, length)

    def close(self, table: BlockTable, now: float, *, used: bool = True) -> None:
        """Gives back all that the table holds, and its row. Raises KeyError if it is not open.

        used: whether that counts as a use of the blocks that it found, by which some policies evict.
        """
        reservation.close(self.core, table, now, used=used)

    def place(self, table: BlockTable, row: int) -> None:
        """Gives the table a row of the persistent batch; the device learns all of its entries with the next `drain`."""
        table.row = row
        self.core.pending.place(row)
        for group, entries in enumerate(table.blocks):
            self.core.edit(table, group, 0, self.core.frames_of(entries))

    def drain(self, step: int) -> MemoryWork:
        """Returns what the device must do before this step, since the last drain, and begins the step.

        Until it retires, it holds whatever is released, so that nothing under a running step becomes something else.
        Raises ValueError unless steps rise.
        """
        self.core.begin(step)
        return self.core.pending.drain()

    @property
    def has_copies(self) -> bool:
        """Returns whether the next `drain` has frames to copy."""
        return self.core.pending.has_copies

    def retire(self, step: int) -> None:
        """Ends this step and all before it: they hold nothing any more."""
        self.core.retire(step)

    # Move: another size of the pool, streaming, offload stores, loss. See also `compaction`.

    def resize(self, num_frames: int) -> Shortage | None:
        """Gives the pool `num_frames` frames, or, if blocks that are held do not fit, changes nothing and says so.

        The frames that went are empty once the device has done the work of the next `drain`. Raises ValueError for
        fewer frames than groups, or while a step is in flight.
        """
        if num_frames < len(self.windows) or self.core.in_flight:
            raise ValueError(f"{num_frames=}: each group needs one, and no step may be in flight")
        held = self.num_frames - self.num_available
        if held > num_frames:
            return Shortage(held, num_frames)
        moving.resize(self.core, num_frames)
        return None

    def stream(self, table: BlockTable, count: int) -> bool:
        """Makes `count` frames free by moving blocks of a table to streamed ones; else returns False, changing nothing.

        The oldest go first, of those that are whole, in layers with full attention, and nobody else's: what others
        share or have pinned stays, and so does what a window sees. Not while a step is in flight, which reads them.
        """
        return moving.stream(self.core, table, count)

    def unstream(self, table: BlockTable, count: int) -> int:
        """Moves at most `count` streamed blocks of a table into frames of the pool, the newest first, and evicts for it
        as `reserve` does. Returns how many.

        What others hold too stays where it is. No more move than are available to the table's tenant. Not while a step
        is in flight, which reads them.
        """
        return moving.unstream(self.core, table, count)

    def missing(self, digests: Sequence[bytes]) -> list[MissingBlock]:
        """Returns those blocks that position len(digests) * block_size sees and that are not here, the oldest first."""
        return offload.find_chain(self.core, digests).missing

    def chain_residency(self, digests: Sequence[bytes]) -> Residency:
        """Counts those of the same blocks that are here, by where they lie."""
        return statistics.residency(self.core, offload.find_chain(self.core, digests).here)

    def open_load(self, digests: Sequence[bytes], root: bytes, now: float, tenant: str) -> OpenedLoad:
        """Opens a table of what is here of a chain. Then `reserve_load`, or `close`. Raises UnknownTenantError."""
        return offload.open_load(self.core, digests, root, now, tenant)

    def reserve_load(self, load: OpenedLoad, num_streamed: int) -> list[int] | None:
        """Takes frames for what a load misses, in that order; returns None, and changes nothing, if there are too few.

        The `num_streamed` oldest blocks, of layers with full attention, get streamed frames. Evicts as `reserve` does.
        Then `end_load`, or `close`.
        """
        return offload.reserve_load(self.core, load, num_streamed)

    def end_load(
        self, table: BlockTable, whole: int, token_ids: Sequence[int], digests: Sequence[bytes], now: float
    ) -> None:
        """Closes a load's table: what it has of the first `whole` entries can be found from now on, the rest ends."""
        prefix_cache.publish(self.core, table, whole, token_ids, digests)
        self.close(table, now)

    def find_placed(self, digest: bytes, group: int) -> Placed | None:
        """Returns where a published block lies in the pool; None if it does not, is streamed or about to be moved.

        Any thread may call it, beside all other methods. Its frame was read as it should be if a second call, after
        the read, returns the same.
        """
        return offload.find_placed(self.core, digest, group)

    def take_saves(self) -> list[Save]:
        """Returns what was evicted since the last call, for offload stores.

        It must be read before the device does the work of a later `drain`.
        """
        saves, self.core.saves = self.core.saves, []
        return saves

    def take_events(self) -> KVEvents:
        """Returns which blocks can be found since the last call, and which no longer, if it records them."""
        index = self.core.index
        return index.take_events() if isinstance(index, RecordedIndex) else KVEvents([], [])

    def are_published(self, digests: Sequence[bytes]) -> list[bool]:
        """Returns which of these blocks can be found in the leading layer group, of which `take_events` tells."""
        published = self.core.index.by_digest[self.leading]
        return [digest in published for digest in digests]

    @property
    def leading(self) -> int:
        """Returns the number of the layer group that decides what can be found."""
        return self.core.index.leading

    def cached_blocks(self) -> list[Save]:
        """Returns all cached blocks, those used last first, each chain from its beginning."""
        return offload.cached_blocks(self.core)

    def forget_lost(self, frames: Set[int]) -> None:
        """Makes what lies in these frames, and what hangs on it, unfindable, since they do not hold what they should.

        What was evicted from them is not saved. O(blocks).
        """
        moving.forget_lost(self.core, frames)

    def distrust(self, tables: Sequence[BlockTable]) -> None:
        """Makes what these tables hold, and no other table holds, unfindable, as `forget_lost` does. O(blocks)."""
        held = Counter(block for table in tables for block in table.held)
        references = self.core.blocks.references
        own = [block for block, times in held.items() if references[block] == times]
        self.forget_lost(set(self.core.frames_of(own)))

    def reset(self) -> bool:
        """Makes all cached blocks unfindable, unsaved, so that every frame is free. Returns False, and changes nothing,
        while any block is active, or a step in flight. O(blocks)."""
        if self.core.in_flight or self.num_available < self.num_frames or self.streamed.active:
            return False
        self.forget_lost({*range(self.num_frames), *self.streamed.numbers})
        return True

    # Account: tenants, and the pool's frames. See also `Pins`.

    def set_quotas(self, quotas: Mapping[str, Quota]) -> None:
        """Makes these tenants known, or changes their quotas, all at once.

        What one has cached beyond a lower quota is evicted; what is active beyond it stays until it is given back.
        Raises ConfigError, and changes nothing, for what the pool cannot keep.
        """
        self.tenants.set(quotas, self.num_frames)
        for name in quotas:
            self.core.make_room(self.tenants[name], 0)

    def end_idle(self, now: float) -> float:
        """Evicts cached blocks that nobody has used for their tenant's `idle_timeout_s`; returns when to call again."""
        return self.core.end_idle(now)

    def available(self, tenant: Tenant) -> int:
        """Returns how many frames this tenant can have, if its own quota has room: free, or evictable for it."""
        return self.core.available(tenant)

    @property
    def num_frames(self) -> int:
        """Returns how many frames the pool has."""
        return self.core.frames.num_frames

    @property
    def num_available(self) -> int:
        """Returns how many frames hold nothing active: free, or cached."""
        return self.core.num_available

    # Look and check

    def frames(self, table: BlockTable, first: int) -> list[int]:
        """Returns frames of a table's entries from `first` on, groups side by side; -1 where none is held."""
        columns = [self.core.frames_of(entries[first:]) for entries in table.blocks]
        return [frame for entry in zip(*columns, strict=True) for frame in entry]

    def locate(self, blocks: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
        """Returns the frames of blocks, -1 for each -1."""
        return np.where(blocks < 0, -1, np.frombuffer(self.core.blocks.frame, np.int32)[blocks])

    def count_holders(self, blocks: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
        """Returns how many tables hold each block, 0 for each -1."""
        return np.where(blocks < 0, 0, np.frombuffer(self.core.blocks.references, np.int32)[blocks])

    def count_own(self, tables: Sequence[BlockTable]) -> npt.NDArray[np.int64]:
        """Returns how many of each table's blocks no other table holds, so that they would come free with it."""
        held = [table.held for table in tables]
        own = self.count_holders(np.frombuffer(b"".join(held), np.int32)) == 1
        before = np.concatenate(([0], np.cumsum(own)))
        ends = np.cumsum([len(blocks) for blocks in held])
        return np.diff(before[np.concatenate(([0], ends))])

    @property
    def shares_blocks(self) -> bool:
        """Returns whether any block is held by more than one table."""
        return self.core.blocks.num_shared > 0

    @property
    def num_published(self) -> int:
        """Returns how many blocks can be found by their digests."""
        return sum(map(len, self.core.index.by_digest))

    def lies_in(self, table: BlockTable, frames: Set[int]) -> bool:
        """Returns whether any of a table's blocks is in one of these frames."""
        return not frames.isdisjoint(self.frames(table, 0))

    def residency(self, table: BlockTable) -> Residency:
        """Counts a table's blocks by where they lie: in the pool, or in streamed frames."""
        return statistics.residency(self.core, table.held)

    def stats(self) -> MemoryStats:
        return statistics.stats(self.core)

    def occupancy(self) -> Occupancy:
        """Counts how many slots are reserved, and written. O(tables and blocks reserved ahead)."""
        return statistics.occupancy(self.core)

    def scatter(self) -> Scatter:
        """Counts how often a sequence's next block lies elsewhere than in the next frame. O(entries of all tables)."""
        return statistics.scatter(self.core)

    def block_map(
        self, pinned: Iterable[BlockTable], arriving: Sequence[int], seen_by: Tenant | None, max_cells: int
    ) -> tuple[TierMap, TierMap]:
        """Returns what lies in the pool's and the streamed frames, in at most `max_cells` cells each. O(pool).

        pinned: the tables of pins. arriving: blocks that are being loaded. seen_by: the only tenant whose blocks are
        told apart; None: all are.
        """
        return block_map.block_map(self.core, pinned, arriving, seen_by, max_cells)

    def prefix_tree(
        self, tables: Sequence[BlockTable], accounts: Iterable[Tenant], max_cached: int, max_chains: int
    ) -> list[TreeNode]:
        """Returns the tree that these tables and the cached blocks used last make, parents before children.

        It covers the leading layer group. max_cached, max_chains: at most so many cached blocks of each of these
        tenants are looked at, in so many chains.
        """
        return prefix_tree.prefix_tree(self.core, tables, accounts, max_cached, max_chains)

    def check(self) -> None:
        """Recounts everything, O(pool and tables). Raises MemoryInvariantError, which names the broken invariant."""
        checks.check(self.core)
