"""MemoryCore: the whole state of one memory system, and the few transitions that change a block's state.

Operations (`prefix_cache`, `reservation`, `moving`, `offload`, `compaction`) are functions over it, `MemoryManager` is
the façade over them, and `checks` recounts it. It calls nothing above it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from pagemill.memory.block_table import BlockTable
from pagemill.memory.blocks import Blocks
from pagemill.memory.eviction import GhostList, PolicyFactory
from pagemill.memory.frames import FramePool, StreamedFrames
from pagemill.memory.kv_events import RecordedIndex
from pagemill.memory.pending_work import PendingWork
from pagemill.memory.prefix_index import PrefixIndex
from pagemill.memory.tenants import Tenant, Tenants
from pagemill.memory.work import BlockName, Save


class MemoryCore:
    """Invariants, between two operations:

    - A frame is free, or occupied by one block. A block lies in the pool or is streamed: `blocks.streamed` says which.
    - A block's references are the table entries that name it, and the steps in flight that hold it.
    - A block is *active* while it has references; else *cached* if the index finds it, until a policy picks it as a
      victim; else it ends. Its state is derived from these facts and stored nowhere.
    - A cached block is listed once: by its tenant's policy if it lies in the pool, else in `streamed.cached`.
    - A tenant is charged for its blocks in the pool, active and cached, each once. Streamed blocks are not charged.
    - What a table may write is held by that table alone, is not published, and lies in the pool.

    frames, streamed: the frames of the pool, and those from which attention streams.
    blocks, index:    the blocks in them, and those of these that can be found by their contents.
    tables:           all open block tables.
    tenants:          the accounts, with each tenant's eviction policy.
    pending:          what the device has not been told yet.
    moving:           blocks whose frames hold their contents only once the step that copies them has retired.
    held:             steps in flight, and the blocks (all of one tenant) that were released under them.
    saves:            evicted blocks that offload stores have not been offered yet.
    ghosts:           names of blocks that were evicted last.
    now:              seconds, of the last operation that had a time.
    """

    def __init__(
        self,
        num_frames: int,
        block_size: int,
        windows: Sequence[int | None],
        caches_prefixes: bool,
        policy: PolicyFactory,
        saves_evicted: bool,
        streamed: StreamedFrames,
        records_events: bool = False,
    ) -> None:
        self.block_size = block_size
        self.windows = tuple(windows)
        self.windowed = [(group, window) for group, window in enumerate(windows) if window is not None]
        self.caches_prefixes = caches_prefixes
        self.frames = FramePool(num_frames)
        self.streamed = streamed
        self.blocks = Blocks(num_frames + streamed.count)
        index = RecordedIndex if records_events else PrefixIndex
        self.index = index(num_frames + streamed.count, block_size, windows)
        self.tables: set[BlockTable] = set()
        self.tenants = Tenants(lambda: policy(self))
        self.pending = PendingWork(len(windows))
        self.moving: set[int] = set()
        self.held: deque[tuple[int, Tenant, list[int]]] = deque()
        self.last_begun = self.last_retired = -1
        self.saves: list[Save] = []
        self.ghosts = GhostList(num_frames)
        self.now = 0.0
        self.num_copies = 0
        self._saves_evicted = saves_evicted

    # Facts

    @property
    def in_flight(self) -> bool:
        """Returns whether a step has begun that has not retired."""
        return self.last_begun > self.last_retired

    @property
    def num_available(self) -> int:
        """Returns how many frames of the pool hold nothing active: free, or cached."""
        return self.frames.num_free + self.tenants.cached

    def available(self, tenant: Tenant) -> int:
        """Returns how many frames a tenant can have by what is free and evictable for it, whatever its own quota."""
        return self.tenants.available(tenant, self.frames.num_free)

    def depth(self, block: int) -> int:
        """Returns how many blocks stand before a published block in its chain."""
        return self.index.depth[block]

    def parent(self, block: int) -> int:
        """Returns the block before a published block, or -1 if there is none or it cannot be found."""
        return self.index.by_digest[self.blocks.group[block]].get(self.index.parent[block], -1)

    def frames_of(self, blocks: Sequence[int]) -> list[int]:
        """Returns the frames of blocks, -1 for each -1."""
        frame = self.blocks.frame
        return [frame[block] if block >= 0 else -1 for block in blocks]

    def save_of(self, block: int) -> Save:
        """Returns the name of a published block, and the frame from which to read it."""
        index, blocks = self.index, self.blocks
        owner = self.tenants.accounts[blocks.owner[block]].name
        name = BlockName(index.digest[block], blocks.group[block], index.parent[block], index.depth[block], owner)
        return Save(blocks.frame[block], name)

    # Steps

    def begin(self, step: int) -> None:
        """Begins a step: what is released until it retires is held by it. Raises ValueError unless steps rise."""
        if step <= self.last_begun:
            raise ValueError(f"step {step} cannot follow step {self.last_begun}: steps must rise")
        self.last_begun = step

    def retire(self, step: int) -> None:
        """Ends this step and all before it: they hold nothing any more."""
        self.last_retired = max(self.last_retired, step)
        self.moving.clear()  # nothing moves while a step is in flight: the first that begins afterwards copies it all
        while self.held and self.held[0][0] <= step:
            _, tenant, blocks = self.held.popleft()
            self._drop(blocks, tenant)

    # References

    def hold(self, blocks: Sequence[int], tenant: Tenant) -> None:
        """Adds a reference to each block, active or cached."""
        is_streamed, streamed = self.blocks.streamed, self.streamed.cached
        for block in self.blocks.hold(blocks):
            (streamed if is_streamed[block] else tenant.policy).remove(block)

    def release(self, blocks: list[int], tenant: Tenant) -> None:
        """Takes a table's reference from each block; the last step in flight, if any, holds them instead."""
        if self.in_flight:
            self.held.append((self.last_begun, tenant, blocks))
        else:
            self._drop(blocks, tenant)

    def _drop(self, blocks: Sequence[int], tenant: Tenant) -> None:
        """Takes references back. A block that has none left is cached if it can be found, else it ends."""
        digest, is_streamed, streamed = self.index.digest, self.blocks.streamed, self.streamed.cached
        add, now = tenant.policy.add, self.now
        ended = []
        for block in self.blocks.drop(blocks):
            if not digest[block]:
                ended.append(block)
            elif is_streamed[block]:
                streamed.add(block, now)
            else:
                add(block, now)
        if ended:
            tenant.charged -= self._end(ended)
        if tenant.charged > tenant.max_blocks:
            self.make_room(tenant, 0)

    def _end(self, blocks: list[int]) -> int:
        """Ends blocks without references and frees their frames. Returns how many of these are the pool's."""
        if self.streamed.count and (streamed := [block for block in blocks if self.blocks.streamed[block]]):
            self.streamed.give(self.blocks.end(streamed))
            blocks = [block for block in blocks if not self.blocks.streamed[block]]
            self.blocks.set_streamed(streamed, False)
        self.frames.give(self.blocks.end(blocks))
        return len(blocks)

    # Frames

    def take(self, count: int, after: int) -> list[int]:
        """Takes frames of the pool, preferably behind that of block `after` (-1: none). They must be free."""
        near = after >= 0 and not self.blocks.streamed[after]
        frames = self.frames.take(count, self.blocks.frame[after] if near else None)
        assert frames is not None
        return frames

    def take_streamed(self, count: int, after: int) -> list[int]:
        """Takes streamed frames, preferably behind that of block `after` (-1: none); evicts what is cached in them.

        So many must hold nothing active.
        """
        if (missing := count - self.streamed.num_free) > 0:
            self._evict_streamed(missing)
        near = after >= 0 and self.blocks.streamed[after]
        return self.streamed.take(count, self.blocks.frame[after] if near else None)

    def move(self, block: int, frame: int, streamed: bool) -> int:
        """Puts a block's contents into another frame, of the pool or streamed, with the work of the next `drain`.

        Returns the frame that it leaves. The caller changes which frames are free, and tables on the device.
        """
        source = self.blocks.frame[block]
        self.pending.copy(source, frame)
        self.moving.add(block)  # in this order, see `find_placed`
        self.blocks.versions[block] += 1
        self.blocks.frame[block] = frame
        self.blocks.streamed[block] = streamed
        return source

    def edit(self, table: BlockTable, group: int, start: int, frames: Sequence[int]) -> None:
        """Tells the device, if it knows the table, that entries from `start` on become these frames (-1: none)."""
        if table.row >= 0:
            self.pending.edit(table.row, group, start, frames)

    # Eviction

    def make_room(self, tenant: Tenant, count: int) -> None:
        """Evicts what must go before the tenant can have `count` frames.

        First its own cached blocks beyond its quota go, then those of whoever has borrowed most.
        """
        own = min(tenant.charged + count - tenant.max_blocks, tenant.cached)
        if own > 0:
            self.evict(tenant, own)
        if (missing := count - self.frames.num_free) > 0:
            for lender, part in self.tenants.making_room(tenant, missing).items():
                self.evict(lender, part)

    def evict(self, tenant: Tenant, count: int) -> None:
        """Ends the `count` cached blocks that the tenant's policy gives up first."""
        victim = tenant.policy.victim
        victims = [victim() for _ in range(count)]
        for block in victims:
            if self.blocks.group[block] == self.index.leading:
                self.ghosts.evicted(self.index.digest[block])
        tenant.evictions += count
        self._end_cached(victims, tenant)

    def end_idle(self, now: float) -> float:
        """Ends cached blocks that were idle for their tenant's time-out. Nobody lacked room, so these are no evictions.

        Returns when to call it again, at the latest (inf: never).
        """
        for tenant in self.tenants:
            if tenant.idle_timeout_s is not None and now >= tenant.look_s:
                self._end_cached(tenant.policy.take_idle(now - tenant.idle_timeout_s), tenant)
                oldest = tenant.policy.oldest()
                tenant.look_s = (now if oldest is None else oldest) + tenant.idle_timeout_s
        return min(tenant.look_s for tenant in self.tenants)

    def _end_cached(self, victims: list[int], tenant: Tenant) -> None:
        """Ends blocks of the pool that the tenant's policy has let go."""
        unpublish, group = self.index.forget, self.blocks.group
        self._offer(victims)
        for block in victims:
            unpublish(block, group[block])
        tenant.charged -= len(victims)
        self.frames.give(self.blocks.end(victims))

    def _evict_streamed(self, count: int) -> None:
        """Ends the `count` cached streamed blocks used longest ago. Blocks that hang on them and lie in the pool stay,
        though nobody finds them any more."""
        victims = [self.streamed.cached.victim() for _ in range(count)]
        self._offer(victims)
        for block in victims:
            self.unpublish(block)
        self._end(victims)

    def _offer(self, victims: Sequence[int]) -> None:
        """Keeps victims for `take_saves`, except those whose contents are still to be copied to their frames."""
        if self._saves_evicted:
            unwritten, frame = self.pending.copy_targets(), self.blocks.frame
            self.saves += [self.save_of(block) for block in victims if frame[block] not in unwritten]

    def unpublish(self, block: int) -> None:
        """Makes a published block that is not listed as cached unfindable."""
        self.index.forget(block, self.blocks.group[block])
        self.tenants.accounts[self.blocks.owner[block]].policy.forget(block)

    def forget(self, block: int) -> None:
        """Makes a published block unfindable, and ends it, unsaved, unless somebody holds it."""
        owner, cached = self.tenants.accounts[self.blocks.owner[block]], not self.blocks.references[block]
        if cached:
            (self.streamed.cached if self.blocks.streamed[block] else owner.policy).remove(block)
        self.unpublish(block)
        if cached:
            owner.charged -= self._end([block])
