"""Residency: which blocks have frames, in which state, and whose frame makes room for another.

A state is derived, not stored. A frame is free or occupied by one block. A block is *active* while it is referenced, by
tables or by a step in flight under which a table let go of it; else *cached* if the index finds it, until the policy
picks it; else it ends.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from heapq import merge

from pagemill.memory.blocks import Blocks
from pagemill.memory.eviction import PolicyFactory
from pagemill.memory.frames import FramePool
from pagemill.memory.lower_frames import NO_LOWER, LowerFrames
from pagemill.memory.prefix_index import Chains, PrefixIndex
from pagemill.memory.regret import Regret
from pagemill.memory.tenants import Tenant, Tenants
from pagemill.memory.work import BlockName, Save


@dataclass(frozen=True, slots=True)
class MemoryStats:
    """Frames now, and sums since the start. frames = frames_free + frames_cached + frames_active.

    blocks_streamed: active blocks beside these, in frames of a lower tier.
    evictions_regretted: evicted blocks that were computed or loaded again before as many others as the pool has frames
    were evicted; one layer group's.
    """

    frames: int
    frames_free: int
    frames_cached: int
    frames_active: int
    blocks_streamed: int
    evictions: int
    evictions_regretted: int
    copies: int


class Residency:
    """The blocks of one pool, and those in frames of a lower tier, which are not charged to tenants.

    now:           seconds, of the last operation that had a time; blocks are cached with it.
    saves_evicted: whether `take_saves` offers what is evicted to lower tiers.
    unwritten:     frames that do not hold their blocks yet, since those are to be moved there; these are not offered.
    """

    def __init__(
        self,
        num_frames: int,
        index: PrefixIndex,
        policy: PolicyFactory,
        saves_evicted: bool,
        lower: LowerFrames,
        unwritten: Callable[[], Set[int]],
    ) -> None:
        self.pool = FramePool(num_frames)
        self.lower = lower
        self.blocks = Blocks(num_frames + lower.count)
        self.index = index
        self.tenants = Tenants(lambda: policy(Chains(index, self.blocks.group)))
        self.regret = Regret(num_frames)
        self.now = 0.0
        # Steps, and the blocks (all of one tenant) that were released while they were in flight.
        self.held: deque[tuple[int, Tenant, list[int]]] = deque()
        self.begun = self.retired = -1
        self._saves_evicted = saves_evicted
        self._unwritten = unwritten
        self._saves: list[Save] = []

    @property
    def in_flight(self) -> bool:
        """Whether a step has begun that has not retired."""
        return self.begun > self.retired

    @property
    def num_available(self) -> int:
        """Frames that hold nothing active: free, or cached."""
        return self.pool.num_free + self.tenants.cached

    def begin(self, step: int) -> None:
        """The step is in flight from now on, and holds whatever is released. Raises ValueError unless steps rise."""
        if step <= self.begun:
            raise ValueError(f"step {step} can not follow step {self.begun}: steps must rise")
        self.begun = step

    def retire(self, step: int) -> None:
        """This step and all before it have finished and hold nothing any more."""
        self.retired = max(self.retired, step)
        while self.held and self.held[0][0] <= step:
            _, tenant, blocks = self.held.popleft()
            self._drop(blocks, tenant)

    def take(self, count: int, after: int) -> list[int]:
        """Frames, preferably behind that of block `after` (-1: none). They must be free."""
        frame = self.blocks.frame[after] if after >= 0 else NO_LOWER
        frames = self.pool.take(count, frame if frame < self.lower.first else None)
        assert frames is not None
        return frames

    def hold(self, blocks: Sequence[int], tenant: Tenant) -> None:
        """A table refers to blocks, active or cached."""
        frame, lower = self.blocks.frame, self.lower
        for block in self.blocks.hold(blocks):
            (tenant.policy if frame[block] < lower.first else lower.cached).remove(block)

    def release(self, blocks: list[int], tenant: Tenant) -> None:
        """A table lets go of blocks; the last step in flight, if any, holds them instead."""
        if self.in_flight:
            self.held.append((self.begun, tenant, blocks))
        else:
            self._drop(blocks, tenant)

    def make_room(self, tenant: Tenant, count: int) -> None:
        """Evicts what must go before the tenant can have `count` frames: its own cached blocks beyond its quota, then
        those of whoever has borrowed most."""
        own = min(tenant.charged + count - tenant.max_blocks, tenant.cached)
        if own > 0:
            self.evict(tenant, own)
        while (missing := count - self.pool.num_free) > 0:
            self.evict(*self.tenants.lender(tenant, missing))

    def evict(self, tenant: Tenant, count: int) -> None:
        """Ends the `count` cached blocks that the tenant's policy gives up first."""
        victim = tenant.policy.victim
        self._end_cached([victim() for _ in range(count)], tenant)

    def end_idle(self, now: float) -> float:
        """Ends cached blocks that nobody has used for as long as their tenant says; when to call it again, at the
        latest (inf: never)."""
        for tenant in self.tenants:
            if tenant.idle_timeout_s is not None and now >= tenant.look_s:
                self._end_cached(tenant.policy.take_idle(now - tenant.idle_timeout_s), tenant)
                oldest = tenant.policy.oldest()
                tenant.look_s = (now if oldest is None else oldest) + tenant.idle_timeout_s
        return min(tenant.look_s for tenant in self.tenants)

    def _end_cached(self, victims: list[int], tenant: Tenant) -> None:
        """Of blocks that its policy has let go."""
        forget, group = self.index.forget, self.blocks.group
        self._offer(victims)
        for block in victims:
            if group[block] == self.index.leading:
                self.regret.evicted(self.index.digest[block])
            forget(block, group[block])
        tenant.evictions += len(victims)
        tenant.charged -= len(victims)
        self.pool.give(self.blocks.end(victims))

    def evict_lower(self, count: int) -> None:
        """Ends the `count` cached blocks of the lower tier used longest ago. What hangs on them and lies in the pool
        may outlive them."""
        victims = [self.lower.cached.victim() for _ in range(count)]
        self._offer(victims)
        for block in victims:
            self.index.forget(block, self.blocks.group[block])
            for tenant in self.tenants:
                tenant.policy.forget(block)
            self._give(self.blocks.end([block]))

    def withdraw(self, block: int, tenant: Tenant) -> None:
        """A published block that one table alone holds can not be found any more, as if it were evicted: it is that
        table's own again, to be written."""
        self.index.forget(block, self.blocks.group[block])
        tenant.policy.forget(block)
        tenant.evictions += 1

    def forget(self, block: int) -> None:
        """A published block can not be found any more, and ends unless somebody holds it. It is not saved."""
        self.index.forget(block, self.blocks.group[block])
        cached = not self.blocks.references[block]
        for tenant in self.tenants:
            if block in tenant.policy:
                tenant.policy.remove(block)
                tenant.charged -= 1
            tenant.policy.forget(block)
        if cached:
            if block in self.lower.cached:
                self.lower.cached.remove(block)
            self._give(self.blocks.end([block]))

    def take_saves(self) -> list[Save]:
        """Evicted blocks for lower tiers, since the last call."""
        saves, self._saves = self._saves, []
        return saves

    def drop_saves(self, frames: Set[int]) -> None:
        """What was to be saved of these frames is not there any more."""
        self._saves = [save for save in self._saves if save.frame not in frames]

    def cached_blocks(self) -> list[Save]:
        """All blocks that can be found and that nobody holds, those used last first, each chain from its beginning."""
        orders = (order.latest() for order in (self.lower.cached, *(tenant.policy for tenant in self.tenants)))
        return [self._save(block) for block, _ in merge(*orders, key=lambda since: since[1], reverse=True)]

    def _offer(self, victims: Sequence[int]) -> None:
        if self._saves_evicted:
            unwritten, frame = self._unwritten(), self.blocks.frame
            self._saves += [self._save(block) for block in victims if frame[block] not in unwritten]

    def _save(self, block: int) -> Save:
        index, blocks = self.index, self.blocks
        name = BlockName(index.digest[block], blocks.group[block], index.parent[block], index.depth[block])
        return Save(blocks.frame[block], name)

    def _give(self, frames: list[int]) -> int:
        """Makes frames free again; how many of them were the pool's."""
        first = self.lower.first
        if self.lower.count and (below := [frame - first for frame in frames if frame >= first]):
            self.lower.pool.give(below)
            frames = [frame for frame in frames if frame < first]
        self.pool.give(frames)
        return len(frames)

    def _drop(self, blocks: Sequence[int], tenant: Tenant) -> None:
        """Takes references back. Blocks without any are cached if they can be found, else ended."""
        digest, frame, lower = self.index.digest, self.blocks.frame, self.lower
        add, first, now = tenant.policy.add, lower.first, self.now
        ended = []
        for block in self.blocks.drop(blocks):
            if not digest[block]:
                ended.append(block)
            elif frame[block] < first:
                add(block, now)
            else:
                lower.cached.add(block, now)
        if ended:
            tenant.charged -= self._give(self.blocks.end(ended))
        if tenant.charged > tenant.max_blocks:
            self.make_room(tenant, 0)
