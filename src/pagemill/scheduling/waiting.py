"""The queue of sequences that wait: tenants by the service they have had, and each tenant's sequences by rank."""

from __future__ import annotations

import heapq
from collections.abc import Collection

from pagemill.scheduling.sequence import Rank, Sequence, Status
from pagemill.scheduling.tenancy import TenantState


class WaitingQueue:
    """A heap for each tenant; a sequence that was finished while waiting is dropped when it comes up.

    The tenant goes first that has had the least service, tokens computed over its weight (the virtual token counter of
    Sheng et al., "Fairness in serving large language models", 2024). One that begins to wait is lifted to the least of
    those that wait already: nobody saves up service by being idle, or by waiting for its own limits. Nor is it ahead of
    that by more than `most`, a step's tokens: what it was given while nobody else could use it is forgotten.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._heaps: dict[TenantState, list[tuple[Rank, Sequence]]] = {}
        self._level = 0.0

    def push(self, sequence: Sequence, load: TenantState) -> None:
        heap = self._heaps.setdefault(load, [])
        if not heap:
            self.level(load)
        heapq.heappush(heap, (sequence.rank, sequence))

    def level(self, load: TenantState) -> None:
        """A tenant begins to wait for what all share."""
        others = [other.service for other, waiting in self._heaps.items() if waiting and other is not load]
        least = min(others, default=self._level)
        load.service = min(max(load.service, least), least + self._most)

    def first(self, passed: Collection[TenantState]) -> tuple[Sequence, TenantState] | None:
        """Whose turn it is among all tenants but those passed over, or None."""
        best: tuple[Sequence, TenantState] | None = None
        for load, heap in self._heaps.items():
            while heap and heap[0][1].status is not Status.WAITING:
                heapq.heappop(heap)
            if heap and load not in passed and (best is None or load.service < best[1].service):
                best = heap[0][1], load
        return best

    def pop(self, load: TenantState) -> None:
        """Takes out a tenant's first sequence."""
        heapq.heappop(self._heaps[load])
        self._level = load.service
