"""Blocks on their way up from lower tiers.

A load is a block table like a sequence's: it opens with what the pool has, reserves frames for what lower tiers have,
commits what has arrived, and closes. What arrived is then found by whoever waited for it, as if it had been computed.
Of a context longer than the pool, the oldest blocks are loaded into lower frames, where attention reads them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from itertools import count
from typing import NamedTuple

from pagemill.memory.block_table import BlockTable
from pagemill.memory.manager import MemoryManager
from pagemill.memory.work import Load
from pagemill.scheduling.sequence import Sequence as Waiting

Stored = Callable[[Sequence[bytes], bool], int]
"""Of a chain's digests, how many from the first on lower tiers hold, for all layer groups, and are to be loaded; asked
for a sequence that was preempted, or not."""


class Begun(NamedTuple):
    """A load, and the digests of the chain's blocks that will be there when it is over."""

    id: int
    digests: list[bytes]


class Loading:
    """The loads under way; its length is their number. Without `stored` there are none."""

    def __init__(self, memory: MemoryManager, stored: Stored | None) -> None:
        self._memory = memory
        self._stored = stored
        self._tables: dict[int, tuple[BlockTable, list[int], list[bytes], bool]] = {}
        self._begun: list[Load] = []
        self._lost: set[int] = set()
        self._missed: set[bytes] = set()
        """Blocks that did not arrive: who asks for one next computes it."""
        self._ids = count()
        self.swapped_in_tokens = 0
        """Tokens that have arrived for preempted sequences."""

    def __len__(self) -> int:
        return len(self._tables)

    def begin(
        self, sequence: Waiting, found: int, headroom: int, least_resident: int | None, now: float
    ) -> Begun | None:
        """Begins to load what lower tiers hold behind the first `found` blocks of a waiting sequence, if there is room
        for the whole sequence and `headroom` blocks more. One that streams what the pool never has room for only needs
        `least_resident` there; None: it does not stream."""
        memory, size, request = self._memory, self._memory.block_size, sequence.request
        last = (len(sequence.tokens) - 1) // size
        if self._stored is None or found >= last:
            return None
        groups, tenant = len(memory.windows), memory.tenants[request.tenant]
        wanted = (last + 1 - found) * groups

        def room() -> int:
            return max(0, min(memory.available(tenant) - headroom, tenant.room))

        if (wanted if least_resident is None else min(wanted, least_resident)) > room():
            return None
        if sequence.digests[found] in self._missed:
            self._missed.remove(sequence.digests[found])
            return None
        more = self._stored(sequence.digests[found:last], sequence.was_preempted)
        if more == 0:
            return None
        table, length = memory.open(sequence.tokens, sequence.digests, request.root, now, found * size, request.tenant)
        below = 0 if least_resident is None else min(more, max(0, last + 1 - found - room() // groups))
        if (
            length < found * size
            or not memory.reserve_streamed(table, (found + below) * size)
            or memory.reserve(table, (found + more) * size) is not None
        ):
            memory.close(table, now)
            return None
        digests = sequence.digests[: found + more]
        blocks = [(digest, group) for digest in digests[found:] for group in range(groups)]
        load = Load(next(self._ids), blocks, memory.frames(table, found))
        self._begun.append(load)
        self._tables[load.id] = table, sequence.tokens[: len(digests) * size], digests, sequence.was_preempted
        return Begun(load.id, digests)

    def take_begun(self) -> list[Load]:
        """Loads that nobody has been told of yet."""
        begun, self._begun = self._begun, []
        return begun

    def lose(self, frames: Set[int]) -> None:
        """These frames do not hold what they should: of a load that needs it, nothing will have arrived."""
        self._lost.update(load for load, (table, *_) in self._tables.items() if self._memory.lies_in(table, frames))

    def finish(self, load: int, arrived: Sequence[bool], now: float) -> int:
        """A load is over; `arrived` says which of its blocks are in their frames. Those before the first gap can be
        found from now on, the rest ends. Returns how many blocks of the chain are there."""
        memory = self._memory
        table, tokens, digests, swaps_in = self._tables.pop(load)
        whole = 0 if load in self._lost else [*arrived, False].index(False) // len(memory.windows)
        self._lost.discard(load)
        blocks = table.length // memory.block_size + whole
        if swaps_in:
            self.swapped_in_tokens += whole * memory.block_size
        self._missed.update(digests[blocks : blocks + 1])
        memory.commit(table, blocks * memory.block_size, tokens, digests)
        memory.close(table, now)
        return blocks
