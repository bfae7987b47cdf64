"""MemoryManager: the one door into the memory system.

It gives block tables their blocks, shares what is equal, copies what is shared before it is written, keeps what can
be found again until its frame is needed, and tells the device what to do. It calls its parts (frames, blocks, prefix
index, eviction policy); its parts do not call each other.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence, Set
from typing import NamedTuple

from pagemill.memory.block_table import BlockTable, first_entry_in_window
from pagemill.memory.eviction import PolicyFactory, least_recently_used
from pagemill.memory.loads import Lacking, OpenedLoad, end_load, needed, open_load, reserve_load
from pagemill.memory.lower_frames import NO_LOWER, LowerFrames
from pagemill.memory.needs import Needs
from pagemill.memory.pending_work import PendingWork
from pagemill.memory.prefix_index import PrefixIndex
from pagemill.memory.publishing import publish
from pagemill.memory.residency import MemoryStats, Residency
from pagemill.memory.resizing import change_frames
from pagemill.memory.streaming import Places, places, places_of, stream
from pagemill.memory.tenants import Tenant
from pagemill.memory.work import MemoryWork, Save
from pagemill.tenant_limits import DEFAULT_TENANT


class Opened(NamedTuple):
    """A new table, and how many tokens of it were found in the cache (its length)."""

    table: BlockTable
    num_cached_tokens: int


class Shortage(NamedTuple):
    """Frames that a `reserve` needed, and those that its tenant could have had."""

    needed: int
    available: int

    @property
    def missing(self) -> int:
        return self.needed - self.available


class MemoryManager:
    """Block tables over one pool of frames. Not thread-safe; every operation is O(1) per block that it touches.

    num_frames: frames in the device pool, for the blocks of all groups.
    block_size: tokens per block.
    windows:    by layer group, the attention window in tokens, or None for full attention.
    policy:     each tenant's order of eviction; the least recently used by default.
    saves_evicted: whether `take_saves` offers what is evicted to lower tiers.
    lower_frames: the number of the first frame of a lower tier, and how many there are, for blocks that `stream` moves.
    """

    def __init__(
        self,
        num_frames: int,
        block_size: int,
        windows: Sequence[int | None],
        enable_prefix_caching: bool = True,
        policy: PolicyFactory = least_recently_used,
        saves_evicted: bool = False,
        lower_frames: tuple[int, int] = (NO_LOWER, 0),
    ) -> None:
        if num_frames < 1 or block_size < 1 or not windows or any(w is not None and w < 1 for w in windows):
            raise ValueError(f"need frames, a block size and groups: {num_frames=}, {block_size=}, {windows=}")
        self.block_size = block_size
        self.windows = tuple(windows)
        self._windowed = [(group, window) for group, window in enumerate(windows) if window is not None]
        self._caching = enable_prefix_caching
        self.lower = LowerFrames(*lower_frames)
        self.needs = Needs(block_size, self.windows, self.lower.count)
        self._index = PrefixIndex(num_frames + self.lower.count, block_size, windows)
        self._work = PendingWork(len(windows))
        self._residency = Residency(num_frames, self._index, policy, saves_evicted, self.lower, self._work.copy_targets)
        self._pool, self._blocks = self._residency.pool, self._residency.blocks
        self.tenants = self._residency.tenants
        self._tables: set[BlockTable] = set()
        self._num_copies = 0

    # Tables come and go

    def open(
        self,
        token_ids: Sequence[int],
        digests: Sequence[bytes],
        root: bytes,
        now: float,
        limit: int,
        tenant: str = DEFAULT_TENANT,
    ) -> Opened:
        """A table for a sequence, holding the longest prefix of at most `limit` tokens that can be found.

        Takes references, no frames. `limit` below the sequence's length leaves tokens to compute. `digests` are of the
        full blocks of `token_ids`, all or the leading ones; `root` begins their chain, and belongs to this tenant.
        Raises UnknownTenantError.
        """
        account = self.tenants[tenant]
        self._residency.now = now
        if self._caching:
            length, blocks, first_held = self._index.match(digests, root, token_ids, max(0, min(limit, len(token_ids))))
        else:
            length, blocks, first_held = 0, [array("i") for _ in self.windows], [0] * len(self.windows)
        table = BlockTable(root, account, blocks, first_held, length)
        table.published = length // self.block_size
        for entries, first in zip(blocks, first_held, strict=True):
            self._residency.hold(entries[first:], account)
        self._tables.add(table)
        return Opened(table, length)

    def peek(self, digests: Sequence[bytes], root: bytes) -> int:
        """How many leading full blocks `open` would find now. Changes nothing."""
        if not self._caching:
            return 0
        return self._index.match(digests, root, (), len(digests) * self.block_size).num_tokens // self.block_size

    def count_active(self, digests: Sequence[bytes], root: bytes) -> int:
        """How many of the blocks that `open` would find by these digests are active already. Changes nothing."""
        if not self._caching:
            return 0
        match = self._index.match(digests, root, (), len(digests) * self.block_size)
        references = self._blocks.references
        return sum(block >= 0 and references[block] > 0 for entries in match.blocks for block in entries)

    def fork(self, table: BlockTable, length: int) -> BlockTable:
        """A table that shares the first `length` committed tokens and takes no frame: writing copies, see `reserve`.

        Raises ValueError if `length` exceeds the table's, or if blocks that its window needs were given back.
        """
        if length > table.length:
            raise ValueError(f"can not fork at {length}: only {table.length} tokens are committed")
        self._require_window(table, length)
        entries = -(-length // self.block_size)
        blocks = [held[:entries] for held in table.blocks]
        child = BlockTable(table.root, table.tenant, blocks, table.first_held.copy(), length)
        child.published = min(table.published, length // self.block_size)
        table.writable = 0
        self._blocks.hold(child.tail_first(0))
        self._tables.add(child)
        return child

    def truncate(self, table: BlockTable, length: int) -> None:
        """Gives back all entries behind the first `length` tokens, reserved or committed.

        Raises ValueError if blocks that the window at `length` needs were given back.
        """
        self._require_window(table, length)
        entries = -(-length // self.block_size)
        released = table.tail_first(entries)
        for group, held in enumerate(table.blocks):
            self._edit(table, group, entries, [-1] * (len(held) - entries))
            del held[entries:]
        table.length = min(table.length, length)
        table.published = min(table.published, length // self.block_size)
        table.writable = 0
        self._residency.release(released, table.tenant)

    def close(self, table: BlockTable, now: float) -> None:
        """Gives back all that the table holds, and its row. Raises KeyError if it is not open."""
        self._tables.remove(table)
        self._residency.now = now
        released = table.tail_first(0)
        table.blocks = [array("i") for _ in self.windows]
        table.first_held = [0] * len(self.windows)
        table.length = table.published = table.writable = 0
        if table.row >= 0:
            self._work.leave(table.row)
            table.row = -1
        self._residency.release(released, table.tenant)

    def place(self, table: BlockTable, row: int) -> None:
        """Gives the table a row of the persistent batch; the device learns all of its entries with the next `drain`."""
        table.row = row
        self._work.place(row)
        for group, entries in enumerate(table.blocks):
            self._edit(table, group, 0, self._frames_of(entries))

    # What lies below the pool comes up

    def reach(self, digests: Sequence[bytes], below: Callable[[tuple[bytes, int]], bool]) -> int:
        """How many leading blocks `peek` would find, if those that `below` has (digest, group) were here too."""
        return self._index.reach(digests, below)

    def lacking(self, digests: Sequence[bytes]) -> list[Lacking]:
        """Of the blocks that position len(digests) * block_size sees, those that are not here, the oldest first."""
        return needed(self, digests).lacking

    def found_places(self, digests: Sequence[bytes]) -> Places:
        """Of the same blocks, how many lie in the pool, and how many below, where they would be streamed."""
        return places_of(self, needed(self, digests).here)

    def open_load(self, digests: Sequence[bytes], root: bytes, now: float, tenant: str) -> OpenedLoad:
        """A table that holds what is here of a chain. Then `reserve_load`, or `close`. Raises UnknownTenantError."""
        return open_load(self, digests, root, now, tenant)

    def reserve_load(self, load: OpenedLoad, streamed: int) -> list[int] | None:
        """Frames for what a load lacks; None, and no change, if there are too few. Then `end_load`, or `close`.

        Those of the `streamed` oldest blocks, of layers with full attention, are lower ones. Evicts as `reserve` does.
        """
        return reserve_load(self, load, streamed)

    def end_load(
        self, table: BlockTable, whole: int, token_ids: Sequence[int], digests: Sequence[bytes], now: float
    ) -> None:
        """Closes a load's table: what it has of the first `whole` entries can be found from now on, the rest ends."""
        end_load(self, table, whole, token_ids, digests, now)

    # A step: reserve, drain, (the device works,) commit, retire

    def reserve(self, table: BlockTable, up_to: int) -> Shortage | None:
        """Makes positions table.length .. up_to - 1 writable in every group, or changes nothing and says what it lacks.

        New blocks where there are none; and a copy of the block in which the first of these positions lies, if others
        hold it or it is published. Evicts cached blocks as needed, and never takes from a table. The table's tenant is
        charged.
        """
        if up_to <= table.writable or up_to <= table.length:
            return None
        held = len(table.blocks[0])
        tail = table.length // self.block_size
        new = -(-up_to // self.block_size) - held
        unwritable = []
        if tail < held:
            references, digest = self._blocks.references, self._index.digest
            for group, entries in enumerate(table.blocks):
                block = entries[tail]
                if references[block] > 1 or digest[block]:
                    unwritable.append(group)
        if new <= 0:
            if not unwritable:
                table.writable = held * self.block_size
                return None
            new = 0

        tenant, needed = table.tenant, new * len(self.windows) + len(unwritable)
        if needed > self._pool.num_free or needed > tenant.max_blocks - tenant.charged:
            available = min(self.tenants.available(tenant, self._pool.num_free), tenant.room)
            if needed > available:
                # Where the table is the only holder, the published block itself can make room: instead of copying it
                # and evicting it, take it back from the index. So a sequence alone in the pool never fails here.
                own = [group for group in unwritable if self._is_own(table.blocks[group][tail])]
                missing = needed - available
                if missing > len(own):
                    return Shortage(needed, available)
                for group in own[:missing]:
                    self._residency.withdraw(table.blocks[group][tail], tenant)
                    unwritable.remove(group)
                needed = available
            self._residency.make_room(tenant, needed)
        tenant.charged += needed
        for group in unwritable:
            self._copy(table, group, tail)
        if new:
            for group, entries in enumerate(table.blocks):
                frames = self._residency.take(new, entries[-1] if entries else -1)
                entries.extend(self._blocks.new(group, frames))
                if table.row >= 0:
                    self._edit(table, group, held, frames)
        table.writable = (held + new) * self.block_size
        return None

    def commit(self, table: BlockTable, length: int, token_ids: Sequence[int], digests: Sequence[bytes]) -> None:
        """Tokens up to `length` are now in the cache: publishes full blocks, gives back those out of their window.

        A block is published once its digest is given, at this commit or a later one. If an equal block of another
        sequence is published already, the table takes that one instead of its own: equal digests mean equal bits, a
        frame comes back, and all that a published block hangs on stays findable. Raises ValueError if `length` goes
        back (see `truncate`) or beyond what was reserved.
        """
        size = self.block_size
        if length < table.length or (length > table.writable and length > table.num_entries * size):
            raise ValueError(
                f"can not commit up to {length}: {table.length} tokens are committed, "
                f"{table.num_entries * size} are reserved"
            )
        table.length = length
        if self._caching and table.published < length // size:
            full = min(length // size, len(digests))
            if table.published < full:
                publish(self, table, full, token_ids, digests)
        for group, window in self._windowed:
            first, now_first = table.first_held[group], first_entry_in_window(length, window, size)
            if first < now_first:
                entries = table.blocks[group]
                released = entries[first:now_first].tolist()
                gone = [-1] * (now_first - first)
                entries[first:now_first] = array("i", gone)
                table.first_held[group] = now_first
                self._edit(table, group, first, gone)
                self._residency.release(released, table.tenant)

    def drain(self, step: int) -> MemoryWork:
        """What the device must do before this step, since the last drain. The step is in flight from now on.

        Until it retires, it holds whatever is released, so that nothing under a running step becomes something else.
        Raises ValueError unless steps rise.
        """
        self._residency.begin(step)
        return self._work.drain()

    def take_saves(self) -> list[Save]:
        """Blocks for lower tiers, since the last call; read them before the device does the work of a later `drain`."""
        return self._residency.take_saves()

    def cached_blocks(self) -> list[Save]:
        """All blocks that can be found and that nobody holds, those used last first, each chain from its beginning."""
        return self._residency.cached_blocks()

    def frames(self, table: BlockTable, first: int) -> list[int]:
        """Frames of a table's entries from `first` on, entry by entry, groups side by side; -1 where none is held."""
        columns = [self._frames_of(entries[first:]) for entries in table.blocks]
        return [frame for entry in zip(*columns, strict=True) for frame in entry]

    def lies_in(self, table: BlockTable, frames: Set[int]) -> bool:
        """Whether any of a table's blocks is in one of these frames."""
        return not frames.isdisjoint(self.frames(table, 0))

    def resize(self, num_frames: int) -> Shortage | None:
        """A pool of `num_frames` frames from now on, or, if blocks that are held do not fit, a shortage and no change.

        The frames that went are empty once the device has done the work of the next `drain`. Raises ValueError for
        fewer frames than groups, or while a step is in flight.
        """
        if num_frames < len(self.windows) or self._residency.in_flight:
            raise ValueError(f"{num_frames=}: each group needs one, and no step may be in flight")
        held = self.num_frames - self.num_available
        if held > num_frames:
            return Shortage(held, num_frames)
        change_frames(self, num_frames)
        return None

    def stream(self, table: BlockTable, count: int) -> bool:
        """Makes `count` frames free by moving blocks of a table to lower ones; False, and no change, if it can not."""
        return stream(self, table, count)

    def places(self, table: BlockTable) -> Places:
        """How many of a table's blocks lie in the pool, and how many are streamed."""
        return places(self, table)

    @property
    def has_copies(self) -> bool:
        """Whether the next `drain` has frames to copy."""
        return self._work.has_copies

    def retire(self, step: int) -> None:
        """This step and all before it have finished and hold nothing any more."""
        self._residency.retire(step)

    # Tenants and figures

    @property
    def num_frames(self) -> int:
        """Frames in the pool."""
        return self._pool.num_frames

    @property
    def num_available(self) -> int:
        """Frames that hold nothing active: free, or cached."""
        return self._residency.num_available

    def set_quota(self, tenant: str, guaranteed_blocks: int = 0, max_blocks: int | None = None) -> None:
        """Makes this tenant known, or changes its limits: as many blocks are kept for it, and it never gets more.

        What it has cached beyond a lower quota is evicted; what is active beyond it stays until it is given back.
        Raises ConfigError, and changes nothing, for what the pool can not keep.
        """
        self._residency.make_room(self.tenants.set(tenant, guaranteed_blocks, max_blocks, self.num_frames), 0)

    def end_idle(self, now: float) -> float:
        """Evicts cached blocks that nobody has used for their tenant's `idle_timeout_s`; when to call it again."""
        return self._residency.end_idle(now)

    def available(self, tenant: Tenant) -> int:
        """Frames that this tenant can have, if its own quota has room: free, or cached and evictable for it."""
        return self.tenants.available(tenant, self._pool.num_free)

    def stats(self) -> MemoryStats:
        free, cached = self._pool.num_free, self.tenants.cached
        return MemoryStats(
            frames=self.num_frames,
            frames_free=free,
            frames_cached=cached,
            frames_active=self.num_frames - free - cached,
            blocks_streamed=self.lower.active,
            evictions=sum(tenant.evictions for tenant in self.tenants),
            evictions_regretted=self._residency.regret.count,
            copies=self._num_copies,
        )

    def check(self) -> None:
        """Recounts everything, O(pool and tables). Raises MemoryInvariantError, which names the broken invariant."""
        from pagemill.memory.recount import recount

        recount(self)

    # Blocks of a table

    def _is_own(self, block: int) -> bool:
        """Whether one table alone holds it, in the pool."""
        return self._blocks.references[block] == 1 and self._blocks.frame[block] < self.lower.first

    def _copy(self, table: BlockTable, group: int, entry: int) -> None:
        """Puts a copy of its own in the place of a block that others hold or may find. The frame must be there."""
        entries = table.blocks[group]
        source = entries[entry]
        frames = self._residency.take(1, entries[entry - 1] if entry else -1)
        self._work.copy(self._blocks.frame[source], frames[0])
        self._num_copies += 1
        entries[entry] = self._blocks.new(group, frames)[0]
        self._edit(table, group, entry, frames)
        self._residency.release([source], table.tenant)

    def _require_window(self, table: BlockTable, length: int) -> None:
        for first, window in zip(table.first_held, self.windows, strict=True):
            if first_entry_in_window(length, window, self.block_size) < first:
                raise ValueError(
                    f"can not go back to {length} tokens: a window of {window} needs blocks that were given back; "
                    f"the table holds positions from {first * self.block_size} on"
                )

    def _edit(self, table: BlockTable, group: int, start: int, frames: Sequence[int]) -> None:
        """The device's copy of these entries, from `start` on, must change, if it has one."""
        if table.row >= 0:
            self._work.edit(table.row, group, start, frames)

    def _frames_of(self, blocks: Sequence[int]) -> list[int]:
        frame = self._blocks.frame
        return [frame[block] if block >= 0 else -1 for block in blocks]
