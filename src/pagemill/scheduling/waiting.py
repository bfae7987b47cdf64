"""The queue of sequences that wait, in the order of their rank."""

from __future__ import annotations

import heapq

from pagemill.scheduling.sequence import Rank, Sequence, Status


class WaitingQueue:
    """A heap; a sequence that was finished while waiting is dropped when it comes up."""

    def __init__(self) -> None:
        self._heap: list[tuple[Rank, Sequence]] = []

    def push(self, sequence: Sequence) -> None:
        heapq.heappush(self._heap, (sequence.rank, sequence))

    def pop(self) -> Sequence | None:
        """The waiting sequence of the best rank, or None."""
        while self._heap:
            sequence = heapq.heappop(self._heap)[1]
            if sequence.status is Status.WAITING:
                return sequence
        return None
