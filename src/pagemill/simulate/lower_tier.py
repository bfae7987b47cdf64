"""Simulates host memory below the pool: what is evicted goes there over a link, and comes back when that pays."""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Sequence
from itertools import compress

from pagemill.kvcache.load_time import LoadTime, PrefillTime
from pagemill.memory.manager import MemoryManager
from pagemill.memory.wanted import longest_unused
from pagemill.memory.work import Load, Save
from pagemill.scheduling.scheduler import Scheduler
from pagemill.scheduling.step_plan import StepPlan


class LowerTier:
    """Holds the names of blocks, the least recently used first, and the loads under way.

    It does with names what `engine.tiers` and `kvcache.transfers` do with bytes. A block that is saved is copied out of
    its frame at once, and the step waits for that; one that is here already is not copied again. Loads run beside
    steps, one after the other, in the link's other direction. The same estimates decide whether a load pays.

    memory:   its `take_saves` must offer what is evicted.
    capacity: blocks. block_s: seconds that one takes over the link.
    mode:     as EngineConfig's preemption_mode.

    saved, loaded: blocks that crossed the link. saving_s: seconds for which steps waited.
    """

    def __init__(self, memory: MemoryManager, capacity: int, block_s: float, mode: str = "auto") -> None:
        self._memory = memory
        self._capacity = capacity
        self._block_s = block_s
        self._mode = mode
        self._held: OrderedDict[tuple[bytes, int], None] = OrderedDict()
        self._loads: deque[tuple[float, float, int, list[bool]]] = deque()  # ends, seconds, id, arrived
        self._load_time = LoadTime()
        self._prefill = PrefillTime()
        self._link_free_s = 0.0
        self.saved = self.loaded = 0
        self.saving_s = 0.0

    @property
    def swap_blocks(self) -> int:
        """Returns how many blocks of preempted sequences it has room for, to come back from here."""
        return 0 if self._mode == "recompute" else self._capacity

    @property
    def next_s(self) -> float:
        """When the next load ends; infinity if none is under way."""
        return self._loads[0][0] if self._loads else math.inf

    def stored(self, digests: Sequence[bytes], found: int, preempted: bool) -> int:
        """Returns up to which block of a chain to load, as `scheduling.loading.Stored` says."""
        if preempted and self._mode == "recompute":
            return found
        reach = self._memory.reach(digests, self._held.__contains__)
        if reach == found or (preempted and self._mode == "swap"):
            return reach
        blocks, tokens = self._memory.missing(digests[:reach]), (reach - found) * self._memory.block_size
        return reach if self._prefill.exceeds(self._load_time, len(blocks), tokens) else found

    def finish_loads(self, scheduler: Scheduler, now: float) -> None:
        """Tells the scheduler of the loads that have ended by now."""
        while self._loads and self._loads[0][0] <= now:
            _, seconds, ident, arrived = self._loads.popleft()
            self._load_time.note(len(arrived), seconds)
            scheduler.finish_load(ident, arrived, now)

    def start_transfers(self, scheduler: Scheduler, now: float) -> float:
        """Takes in what was evicted for the step that has been planned, and begins loads once that is out.

        Returns the seconds for which the step waits.
        """
        waits_s = self._save(self._memory.take_saves())
        for load in scheduler.take_loads():
            self._begin(load, now + waits_s)
        return waits_s

    def _save(self, saves: Sequence[Save]) -> float:
        new = sum(save.name[:2] not in self._held for save in saves)
        for save in saves:
            self._use(save.name[:2])
        spared = 0
        while len(self._held) > self._capacity:
            block, spared = longest_unused(self._held, self._memory.wanted, spared)
            del self._held[block]
        self.saved += new
        self.saving_s += new * self._block_s
        return new * self._block_s

    def _begin(self, load: Load, now: float) -> None:
        arrived = [block in self._held for block in load.blocks]
        for block in compress(load.blocks, arrived):
            self._use(block)
        self._link_free_s = max(now, self._link_free_s) + sum(arrived) * self._block_s
        self._loads.append((self._link_free_s, self._link_free_s - now, load.id, arrived))
        self.loaded += sum(arrived)

    def note_step(self, plan: StepPlan, seconds: float) -> None:
        """Notes how long a step took, without the saves before it."""
        self._load_time.note_step(seconds)
        self._prefill.note_step(plan.num_tokens, plan.num_generating, seconds)

    def _use(self, block: tuple[bytes, int]) -> None:
        self._held[block] = None
        self._held.move_to_end(block)
