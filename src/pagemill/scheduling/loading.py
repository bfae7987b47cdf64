"""Loads: blocks on their way from offload stores into frames.

A load is a block table like a sequence's: it opens with what the pool has of all that a sequence would read that goes
on behind it, reserves frames for the rest, which the stores have, publishes what has arrived, and closes. What arrived
is then found by whoever waited for it, as if it had been computed. Of a context longer than the pool, the oldest blocks
are loaded into streamed frames, where attention reads them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from itertools import count
from typing import NamedTuple

from pagemill.memory.manager import MemoryManager, OpenedLoad
from pagemill.memory.work import Load
from pagemill.scheduling.sequence import Sequence as Waiting

Stored = Callable[[Sequence[bytes], int, bool], int]
"""Returns up to which block a chain is to be loaded from offload stores.

Takes the chain's digests, how many of its first blocks the pool has, and whether a preempted sequence asks. Returns
that same number if nothing is to be loaded.
"""


MOST_MISSED = 1024
"""The most blocks that are remembered since they did not arrive; one that is forgotten is loaded in vain once more."""


class Begun(NamedTuple):
    """A load, and the digests of the chain's blocks that will be there when it is over."""

    id: int
    digests: list[bytes]


class ActiveLoad(NamedTuple):
    """found: blocks that the pool had of the chain when it was begun. swaps_in: for a preempted sequence."""

    load: OpenedLoad
    tokens: list[int]
    digests: list[bytes]
    found: int
    swaps_in: bool


class Loading:
    """The loads under way; its length is their number. Without `stored` there are none. chunk: the most tokens of a
    step."""

    def __init__(self, memory: MemoryManager, chunk: int, stored: Stored | None) -> None:
        self._memory = memory
        self._chunk = chunk
        self._stored = stored
        self._loads: dict[int, ActiveLoad] = {}
        self._begun: list[Load] = []
        self.lost: set[int] = set()
        self._missed: dict[bytes, None] = {}
        """The last blocks that did not arrive: who asks for one next computes it."""
        self._ids = count()
        self.swapped_in_tokens = 0
        """Tokens that have arrived for preempted sequences."""

    def __len__(self) -> int:
        return len(self._loads)

    def begin(
        self, sequence: Waiting, found: int, headroom: int, least_resident: int | None, now: float
    ) -> Begun | None:
        """Begins to load what offload stores hold behind a waiting sequence's first `found` blocks.

        There must be room for the whole sequence and `headroom` blocks more. One that streams what the pool never has
        room for only needs `least_resident` there; None: it does not stream. Returns None if nothing is begun.
        """
        memory, size, request = self._memory, self._memory.block_size, sequence.request
        last = (len(sequence.tokens) - 1) // size
        if self._stored is None or found >= last:
            return None
        tenant = memory.tenants[request.tenant]

        def wanted(found: int) -> int:
            """Returns the blocks that the sequence still wants once `found` are there."""
            footprint, tokens = memory.footprint, len(sequence.tokens)
            return footprint.blocks(tokens, self._chunk, found * size) - footprint.pinned(
                tokens, self._chunk, found, found * size
            )

        def room() -> int:
            return max(0, min(memory.available(tenant) - headroom, tenant.room))

        least = wanted(found) + memory.count_cached(sequence.digests[:found], request.root)  # it would hold these too
        if least_resident is not None:
            least = min(least, least_resident)
        if least > room():
            return None
        digests = sequence.digests[:last]
        if self._missed and (missed := next((digest for digest in digests[found:] if digest in self._missed), None)):
            del self._missed[missed]
            digests = digests[: digests.index(missed)]
        reach = self._stored(digests, found, sequence.has_run)
        if reach == found:
            return None
        digests = digests[:reach]
        opened = memory.open_load(digests, request.root, now, request.tenant)
        streamed = 0 if least_resident is None else max(0, len(opened.missing) + wanted(reach) - room())
        frames = memory.reserve_load(opened, streamed)
        if frames is None:
            memory.close(opened.table, now, used=False)
            return None
        load = Load(next(self._ids), [(digests[entry], group) for entry, group in opened.missing], frames)
        self._begun.append(load)
        tokens = sequence.tokens[: reach * size]
        self._loads[load.id] = ActiveLoad(opened, tokens, digests, found, sequence.has_run)
        return Begun(load.id, digests)

    def arriving(self) -> list[int]:
        """Returns the blocks that are under way."""
        return [
            under_way.load.table.blocks[group][entry]
            for under_way in self._loads.values()
            for entry, group in under_way.load.missing
        ]

    def take_begun(self) -> list[Load]:
        """Returns loads that nobody has been told of yet."""
        begun, self._begun = self._begun, []
        return begun

    def lose(self, frames: Set[int]) -> None:
        """Notes that these frames do not hold what they should: loads that need them bring nothing."""
        loads = self._loads.items()
        self.lost.update(ident for ident, under_way in loads if self._memory.lies_in(under_way.load.table, frames))

    def finish(self, load: int, arrived: Sequence[bool], now: float) -> int:
        """Ends a load and publishes its blocks before the first gap; the rest ends.

        arrived: which of its blocks are in their frames. A load that `lose` named publishes nothing: what the pool had
        of its chain may be lost too. Returns how many blocks of the chain are there, as far as the load knows.
        """
        memory, lost = self._memory, load in self.lost
        (table, missing), tokens, digests, found, swaps_in = self._loads.pop(load)
        gap = 0 if lost else [*arrived, False].index(False)
        self.lost.discard(load)
        blocks = missing[gap].entry if gap < len(missing) else len(digests)
        self._missed |= dict.fromkeys(digests[blocks : blocks + 1])
        if len(self._missed) > MOST_MISSED:  # of requests that have ended meanwhile, which never ask
            del self._missed[next(iter(self._missed))]
        if lost:
            blocks = 0
        if swaps_in:
            self.swapped_in_tokens += max(0, blocks - found) * memory.block_size
        memory.end_load(table, blocks, tokens, digests, now)
        return blocks
