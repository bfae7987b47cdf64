"""Says where the memory of a KV pool goes, over time: tokens, what is reserved, and what is free."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields

from benchmarks.replay.contiguous import ContiguousMemory

from pagemill.memory.block_table import BlockTable
from pagemill.memory.manager import MemoryManager
from pagemill.scheduling.scheduler import Scheduler
from pagemill.scheduling.step_plan import StepPlan
from pagemill.simulate.step_time import KVShape


@dataclass
class Parts:
    """Divides a pool's bytes, or their sum over time. Each byte is in one part.

    tokens:   hold a committed token's keys and values; a shared one counts once.
    ahead:    reserved, and the sequence that has them will fill them before it ends.
    internal: reserved, and never filled: what a length was rounded up by, the end of a sequence's last block, padding.
    external: free while a request waits for memory: no free part is what it needs. In paged memory any free block is,
              and these are the blocks that admission leaves to running sequences.
    idle:     free, and nobody waits for memory.
    """

    tokens: float = 0.0
    ahead: float = 0.0
    internal: float = 0.0
    external: float = 0.0
    idle: float = 0.0

    @classmethod
    def names(cls) -> list[str]:
        return [field.name for field in fields(cls)]

    def add(self, other: Parts, weight: float) -> None:
        for name in self.names():
            setattr(self, name, getattr(self, name) + weight * getattr(other, name))

    @property
    def total(self) -> float:
        return sum(getattr(self, name) for name in self.names())

    def shares(self) -> dict[str, float]:
        """Returns each part's share of all of them; 0 where nothing was counted."""
        return {name: getattr(self, name) / (self.total or 1.0) for name in self.names()}


@dataclass(frozen=True)
class Held:
    """Says what sequences hold: bytes in all, bytes of committed tokens, and a slot's bytes in all layers."""

    reserved: float
    tokens: float
    slot_bytes: float


class PoolMeter:
    """Integrates the parts of a pool of so many bytes, over the time in steps; an observer.

    held: what sequences hold now. reach: how many slots one has, filled or not.
    """

    def __init__(
        self, scheduler: Scheduler, pool_bytes: float, held: Callable[[], Held], reach: Callable[[BlockTable], int]
    ) -> None:
        self._state = scheduler.state
        self._pool_bytes = pool_bytes
        self._held = held
        self._reach = reach
        self.parts = Parts()

    def __call__(self, plan: StepPlan, seconds: float) -> None:
        self.parts.add(self.now(), seconds)

    def now(self) -> Parts:
        """Divides the pool as it is at this moment."""
        state, held = self._state, self._held()
        # The last token of an answer is never computed, so nothing is kept of it.
        ahead = held.slot_bytes * sum(
            min(self._reach(one.table), one.request.max_len - 1) - one.table.length
            for one in state.running
            if one.table is not None
        )
        waits = state.crowded and state.batch.num_free > 0
        free = self._pool_bytes - held.reserved
        return Parts(
            tokens=held.tokens,
            ahead=ahead,
            internal=held.reserved - held.tokens - ahead,
            external=free if waits else 0.0,
            idle=0.0 if waits else free,
        )


def paged_meter(scheduler: Scheduler, memory: MemoryManager, shape: KVShape, pool_bytes: float) -> PoolMeter:
    block_size = memory.block_size
    reserved_slot_bytes = shape.frame_bytes(block_size) / block_size

    def held() -> Held:
        found = memory.occupancy()
        return Held(
            found.slots_reserved * reserved_slot_bytes,
            found.slots_written * shape.slot_bytes,
            shape.slot_bytes * len(memory.windows),
        )

    return PoolMeter(scheduler, pool_bytes, held, lambda table: table.num_entries * block_size)


def contiguous_meter(scheduler: Scheduler, memory: ContiguousMemory, slot_bytes: float, pool_bytes: float) -> PoolMeter:
    def held() -> Held:
        return Held(memory.reserved * slot_bytes, memory.written * slot_bytes, slot_bytes)

    return PoolMeter(scheduler, pool_bytes, held, lambda table: memory.extent(table)[1])
