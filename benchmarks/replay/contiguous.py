"""Models contiguous KV memory, as engines had before paging: each sequence gets one run of slots when it enters, for as
long as it may become. It has the memory manager's calls, so that the same scheduler runs over it, for comparison.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, insort
from collections.abc import Callable, Sequence
from math import inf
from typing import Protocol

from pagemill.memory.block_table import BlockTable, Footprint
from pagemill.memory.eviction import Lru
from pagemill.memory.frames import StreamedFrames
from pagemill.memory.manager import Opened, Residency, Shortage
from pagemill.memory.tenants import Tenant, Tenants
from pagemill.memory.wanted import WantedBlocks
from pagemill.memory.work import MemoryWork
from pagemill.simulate.trace import TracedRequest

Extent = tuple[int, int]
"""(first slot, number of slots)"""


class Placement(Protocol):
    """Says where runs of slots lie."""

    def take(self, count: int) -> Extent | None: ...

    def give(self, extent: Extent) -> None: ...

    def fits_when_empty(self, count: int) -> bool: ...


class FirstFit:
    """Takes the first hole that is large enough; holes that touch become one."""

    def __init__(self, slots: int) -> None:
        self._slots = slots
        self._holes: list[Extent] = [(0, slots)]  # by first slot; no two touch

    def take(self, count: int) -> Extent | None:
        for index, (start, length) in enumerate(self._holes):
            if length >= count:
                self._holes[index : index + 1] = [(start + count, length - count)] if length > count else []
                return start, count
        return None

    def give(self, extent: Extent) -> None:
        start, end = extent[0], extent[0] + extent[1]
        after = bisect_left(self._holes, (start, 0))
        if after < len(self._holes) and self._holes[after][0] == end:
            end += self._holes.pop(after)[1]
        if after and sum(self._holes[after - 1]) == start:
            start = self._holes.pop(after - 1)[0]
        insort(self._holes, (start, end - start))

    def fits_when_empty(self, count: int) -> bool:
        return count <= self._slots


class Buddy:
    """Powers of two (Knuth, "The Art of Computer Programming" I, 2.5): a run is cut in halves until it just holds what
    is asked, and joins its other half again when both are free. The pool is cut into powers of two, largest first."""

    def __init__(self, slots: int) -> None:
        self._free: list[set[int]] = [set() for _ in range(slots.bit_length())]
        self._roots: dict[int, int] = {}  # first slot: order
        start = 0
        for order in reversed(range(slots.bit_length())):
            if slots >> order & 1:
                self._free[order].add(start)
                self._roots[start] = order
                start += 1 << order

    def take(self, count: int) -> Extent | None:
        wanted = (count - 1).bit_length()
        for order in range(wanted, len(self._free)):
            if self._free[order]:
                start = min(self._free[order])
                self._free[order].remove(start)
                while order > wanted:
                    order -= 1
                    self._free[order].add(start + (1 << order))
                return start, 1 << wanted
        return None

    def give(self, extent: Extent) -> None:
        start, order = extent[0], (extent[1] - 1).bit_length()
        root = max(first for first in self._roots if first <= start)
        while order < self._roots[root]:
            other = root + ((start - root) ^ (1 << order))
            if other not in self._free[order]:
                break
            self._free[order].remove(other)
            start = min(start, other)
            order += 1
        self._free[order].add(start)

    def fits_when_empty(self, count: int) -> bool:
        return any(count <= 1 << order for order in self._roots.values())


class ContiguousMemory:
    """Answers the memory manager's calls over runs of slots; a block is one slot. Nothing is shared.

    reserve_for: how many slots a request's sequence gets, by the root of its chain (which names it, see `root_of`).
    """

    block_size = 1
    windows = (None,)
    footprint = Footprint(1, (None,))
    has_copies = False

    def __init__(self, slots: int, placement: Placement, reserve_for: Callable[[bytes], int]) -> None:
        self.num_frames = slots
        self.tenants = Tenants(Lru)
        self.streamed = StreamedFrames()
        self.wanted = WantedBlocks()
        self._placement = placement
        self._reserve_for = reserve_for
        self._extents: dict[BlockTable, Extent] = {}
        self.tables: set[BlockTable] = set()

    def available(self, tenant: Tenant) -> int:
        """Returns more than any forecast of the scheduler: whoever has entered has all that it will need."""
        return 1 << 60

    @property
    def reserved(self) -> int:
        return sum(count for _, count in self._extents.values())

    @property
    def written(self) -> int:
        return sum(table.length for table in self.tables)

    def extent(self, table: BlockTable) -> Extent:
        """Returns where the slots of a sequence lie that has some."""
        return self._extents[table]

    def residency(self, table: BlockTable) -> Residency:
        return Residency(table.num_held, 0)

    def end_idle(self, now: float) -> float:
        return inf

    def peek(self, digests: Sequence[bytes], root: bytes) -> int:
        return 0

    def open(
        self, token_ids: Sequence[int], digests: Sequence[bytes], root: bytes, now: float, limit: int, tenant: str
    ) -> Opened:
        table = BlockTable(root, self.tenants[tenant], [array("i")], [0], 0)
        self.tables.add(table)
        return Opened(table, 0)

    def reserve(self, table: BlockTable, up_to: int) -> Shortage | None:
        if table not in self._extents:
            count = self._reserve_for(table.root)
            extent = self._placement.take(count)
            if extent is None:
                return Shortage(count, 0)
            self._extents[table] = extent
        return None

    def place(self, table: BlockTable, row: int) -> None:
        table.row = row

    def commit(self, table: BlockTable, length: int, token_ids: Sequence[int], digests: Sequence[bytes]) -> None:
        table.length = length

    def close(self, table: BlockTable, now: float, *, used: bool = True) -> None:
        self.tables.remove(table)
        if table in self._extents:
            self._placement.give(self._extents.pop(table))

    def drain(self, step: int) -> MemoryWork:
        return MemoryWork.none()

    def retire(self, step: int) -> None:
        pass


class WholeBatches(ContiguousMemory):
    """Lets sequences in by whole batches, as engines had before continuous batching: none enters from the first step of
    a batch on until its longest answer has ended, and only then does anyone's memory come back.

    All that a batch is to hold must enter in one step.
    """

    def __init__(self, slots: int, placement: Placement, reserve_for: Callable[[bytes], int]) -> None:
        super().__init__(slots, placement, reserve_for)
        self.ends: dict[bytes, float] = {}
        """By root of the request: when its batch ended, and all answers of the batch were given back."""

    def reserve(self, table: BlockTable, up_to: int) -> Shortage | None:
        if table not in self._extents and any(other.length for other in self._extents):
            return Shortage(1, 0)
        return super().reserve(table, up_to)

    def close(self, table: BlockTable, now: float, *, used: bool = True) -> None:
        self.tables.remove(table)
        if table not in self._extents or not self.tables.isdisjoint(self._extents):
            return
        for other, extent in self._extents.items():
            self._placement.give(extent)
            self.ends[other.root] = now
        self._extents.clear()


def root_of(request: TracedRequest) -> bytes:
    """Names the request to the memory."""
    return request.number.to_bytes(8, "little")


def power_of_two(count: int) -> int:
    return 1 << (count - 1).bit_length()


RESERVATIONS: dict[str, Callable[[TracedRequest, int], int]] = {
    "maximum": lambda request, longest: longest,
    "power of two": lambda request, longest: request.prompt_len + power_of_two(request.output_len),
    "exact": lambda request, longest: request.length,
}
"""Slots for a request, given those of the longest in the trace. The first knows nothing; the second over-reserves the
output by at most 2, as if its length had been guessed; the third knows the future."""
PLACEMENTS: dict[str, Callable[[int], Placement]] = {"first fit": FirstFit, "buddy": Buddy}
