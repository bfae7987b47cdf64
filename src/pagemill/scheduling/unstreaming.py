"""Unstreaming: gives sequences that stream their blocks back when the pool has had room for a while."""

from __future__ import annotations

from pagemill.scheduling import admission
from pagemill.scheduling.state import SchedulerState

PATIENCE = 16
"""The pool must have had room in so many steps, one after the other."""
KEPT_FREE = 1 / 8
"""Of the pool, what is left free. Blocks begin to come back when twice as much is, so that what runs can grow for a
while before anything streams again."""
MOST_BLOCKS = 64
"""Blocks that come back in one step: a bound on what the others wait."""


class Unstreaming:
    """Looks at the pool in each step."""

    def __init__(self) -> None:
        self._roomy = 0
        """Steps in which the pool has had room, one after the other."""

    def step(self, state: SchedulerState) -> int:
        """Brings blocks of the first running sequence that streams back into the pool. Returns how many.

        To be called where all that the step needs has been reserved, with no step in flight.
        """
        memory = state.memory
        if not memory.streamed.active:
            self._roomy = 0
            return 0
        kept = max(admission.headroom(state), int(KEPT_FREE * memory.num_frames))
        room = memory.num_available - kept
        # Once blocks come back they do so until there is no more room; those that wait for room have it first.
        begins = room > (0 if self._roomy >= PATIENCE else kept)
        if state.crowded or not begins:
            self._roomy = 0
            return 0
        self._roomy = min(PATIENCE, self._roomy + 1)
        if self._roomy < PATIENCE:
            return 0
        for sequence in state.running:
            if sequence.table is not None and (count := memory.unstream(sequence.table, min(room, MOST_BLOCKS))):
                return count
        return 0
