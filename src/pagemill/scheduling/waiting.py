"""Waiting: for a turn, tenants by the service they have had and each tenant's sequences by precedence; or for a block.

A sequence waits for a block that a running sequence or a load is about to bring, so that it is not computed twice.
"""

from __future__ import annotations

import collections.abc as abc
import heapq
from collections import Counter
from collections.abc import Hashable
from operator import attrgetter

from pagemill.scheduling.sequence import Precedence, Sequence, Status
from pagemill.scheduling.tenancy import TenantState

by_service = attrgetter("service")


class WaitingQueue:
    """Holds a heap of sequences for each tenant. Those that were finished while waiting are dropped when they come up,
    or are more than half of a heap.

    The tenant goes first that has had the least service: tokens computed over its weight (the virtual token counter of
    Sheng et al., "Fairness in serving large language models", 2024). A tenant that begins to wait is lifted to the
    least service of those that wait already, so nobody saves up service by being idle, or by waiting for its own
    limits. Nor may it be ahead of that by more than `most`, a step's tokens: service that nobody else wanted is
    forgotten. One that is not ahead of its share stays before those that are, by a step's tokens.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._heaps: dict[TenantState, list[tuple[Precedence, Sequence]]] = {}
        self._finished: Counter[TenantState] = Counter()
        self._level = 0.0

    def __len__(self) -> int:
        """Returns how many sequences it keeps, those among them that have finished."""
        return sum(map(len, self._heaps.values()))

    def push(self, sequence: Sequence, tenant: TenantState) -> None:
        heap = self._heaps.setdefault(tenant, [])
        if not heap:
            self.level([tenant])
        heapq.heappush(heap, (sequence.precedence, sequence))

    def level(self, tenants: abc.Sequence[TenantState]) -> None:
        """Adjusts tenants' service, since they begin to wait for what all share. O(all tenants)."""
        most, waiting = self._most, [one for one, heap in self._heaps.items() if heap]
        ahead = heapq.nsmallest(2, (one for one in waiting if one.lead > most), key=by_service)
        others = heapq.nsmallest(2, (one for one in waiting if one.lead <= most), key=by_service)
        for tenant in tenants:
            before = most if tenant.lead <= most else 0
            services = [one.service - before for one in ahead if one is not tenant]
            services += [one.service for one in others if one is not tenant]
            least = min(services, default=self._level)
            tenant.service = min(max(tenant.service, least), least + most)

    def note_elsewhere(self, tenant: TenantState, tokens: int) -> None:
        """Counts tokens that other engines have computed for a tenant as service, while others wait here.

        So tenants share the service of all engines, wherever the work of each is (DistSFQ: Wang and Merchant,
        "Proportional-share scheduling for distributed storage systems", FAST 2007). As in `level`, it makes nobody more
        than a step's tokens later than the others.
        """
        others = [one.service for one, waiting in self._heaps.items() if waiting and one is not tenant]
        if others:
            served = tenant.service + tokens / tenant.limits.weight
            tenant.service = max(tenant.service, min(served, min(others) + self._most))

    def turns(self) -> list[TenantState]:
        """Returns the tenants of whom a sequence waits, in the order of their turns."""
        return sorted((tenant for tenant in self._heaps if self.first(tenant)), key=by_service)

    def first(self, tenant: TenantState) -> Sequence | None:
        """Returns a tenant's first sequence; None if none waits."""
        heap = self._heaps.get(tenant, [])
        while heap and heap[0][1].status is not Status.WAITING:
            heapq.heappop(heap)
            self._finished[tenant] -= 1
        return heap[0][1] if heap else None

    def note_finished(self, tenant: TenantState) -> None:
        """Takes note that one of a tenant's sequences has finished that waits here. Amortized O(1)."""
        self._finished[tenant] += 1
        heap = self._heaps[tenant]
        if 2 * self._finished[tenant] > len(heap):
            heap[:] = [entry for entry in heap if entry[1].status is Status.WAITING]
            heapq.heapify(heap)
            self._finished[tenant] = 0

    def pop(self, tenant: TenantState) -> None:
        """Takes out a tenant's first sequence."""
        heapq.heappop(self._heaps[tenant])
        self._level = tenant.service
        self.first(tenant)  # so that nobody counts as waiting whose other sequences have finished


class PendingPrefixes:
    """The blocks that are coming, by digest, each with its owner: a sequence that computes it, or the id of a load.

    The first that claims a block owns it.
    """

    def __init__(self) -> None:
        self._owner: dict[bytes, Hashable] = {}
        self._claims: dict[Hashable, list[tuple[int, bytes]]] = {}
        """Blocks that an owner has still to bring, (index in its chain, digest); the next one last."""
        self._waiters: dict[bytes, dict[Sequence, None]] = {}
        """By digest, the sequences that wait for the block, in the order in which they came."""
        self._awaited: dict[Sequence, bytes] = {}

    def __len__(self) -> int:
        """Returns how many blocks are coming, and sequences wait for them."""
        return len(self._owner) + len(self._awaited)

    def owned(self, digest: bytes) -> bool:
        return digest in self._owner

    def wait(self, digests: abc.Sequence[bytes], first: int, sequence: Sequence) -> bool:
        """Holds a sequence back until the block of index `first` in its chain has come, and those behind it that the
        same owner brings; or until that has given them up.

        Returns False, and does nothing, if nobody owns the first.
        """
        owner = self._owner.get(digests[first])
        if owner is None:
            return False
        behind = range(first + 1, len(digests))
        last = next((at for at in behind if self._owner.get(digests[at]) != owner), len(digests)) - 1
        self._waiters.setdefault(digests[last], {})[sequence] = None
        self._awaited[sequence] = digests[last]
        return True

    def leave(self, sequence: Sequence) -> bool:
        """Lets a sequence wait no longer. Returns False if it waits for nothing."""
        digest = self._awaited.pop(sequence, None)
        if digest is None:
            return False
        waiters = self._waiters[digest]
        del waiters[sequence]
        if not waiters:
            del self._waiters[digest]
        return True

    def add(self, owner: Hashable, digests: abc.Sequence[bytes], first: int) -> None:
        """Claims the full blocks of a chain from index `first` on for an owner, which brings them in this order."""
        claims = [
            (index, digest)
            for index, digest in enumerate(digests[first:], start=first)
            if self._owner.setdefault(digest, owner) is owner
        ]
        if claims:
            claims.reverse()
            self._claims[owner] = claims

    def computed(self, owner: Hashable, num_blocks: int) -> list[Sequence]:
        """Releases the owner's first `num_blocks` blocks, which are committed.

        Returns the sequences that waited for them.
        """
        claims = self._claims.get(owner)
        if claims is None:
            return []
        released: list[Sequence] = []
        while claims and claims[-1][0] < num_blocks:
            released += self._resolve(claims.pop()[1])
        if not claims:
            del self._claims[owner]
        return released

    def drop(self, owner: Hashable) -> list[Sequence]:
        """Releases all that an owner still claims, since it ends. Returns the sequences that waited for it."""
        released: list[Sequence] = []
        for _, digest in self._claims.pop(owner, ()):
            released += self._resolve(digest)
        return released

    def _resolve(self, digest: bytes) -> list[Sequence]:
        del self._owner[digest]
        released = list(self._waiters.pop(digest, ()))
        for sequence in released:
            del self._awaited[sequence]
        return released
