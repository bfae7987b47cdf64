"""Unstreaming: gives sequences that stream their blocks back when the pool has had room for a while."""

from __future__ import annotations

from pagemill.scheduling import admission
from pagemill.scheduling.state import SchedulerState

PATIENCE = 16
"""The pool must have had room in so many steps, one after the other; in twice as many each time when blocks that have
come back are followed by others that stream again."""
MOST_PATIENCE = 4096
CALM = 8
"""After so many times its patience without streaming it is as patient as at first."""
FEW_STEPS = 16
"""A sequence with fewer tokens left keeps its blocks where they are."""
KEPT_FREE = 1 / 8
"""Share of the pool that is left free. Blocks begin to come back when twice as much is, so that what runs can grow for
a while before anything streams again."""
MOST_BLOCKS = 64
"""Blocks that come back in one step: a bound on what the others wait."""


class Unstreaming:
    """Looks at the pool in each step."""

    def __init__(self) -> None:
        self._roomy = 0
        """Steps in which the pool has had room, one after the other."""
        self._patience = PATIENCE
        self._active = 0
        """Streamed blocks of running sequences at the last look."""
        self._quiet = 0
        """Steps since blocks have begun to stream."""
        self._returned = False
        """True if blocks have come back since then."""

    def step(self, state: SchedulerState) -> int:
        """Brings blocks of the first running sequence that streams back into the pool. Returns how many.

        To be called where all that the step needs has been reserved, with no step in flight.
        """
        memory = state.memory
        self._note_streaming(memory.streamed.active)
        if not memory.streamed.active:
            self._roomy = 0
            return 0
        kept = max(admission.headroom(state), int(KEPT_FREE * memory.num_frames))
        room = memory.num_available - kept
        # Once blocks come back they do so until there is no more room; those that wait for room have it first.
        begins = room > (0 if self._roomy >= self._patience else kept)
        if state.crowded or not begins:
            self._roomy = 0
            return 0
        self._roomy = min(self._patience, self._roomy + 1)
        if self._roomy < self._patience:
            return 0
        for sequence in state.running:
            if sequence.table is None or sequence.request.max_len - len(sequence.tokens) < FEW_STEPS:
                continue
            most, tenant = min(room, MOST_BLOCKS), sequence.table.tenant
            if any(other.kept_blocks for other in memory.tenants if other is not tenant):
                most = min(most, tenant.kept_blocks - tenant.active)  # what is borrowed would be taken back
            if count := memory.unstream(sequence.table, most):
                self._returned, self._active = True, memory.streamed.active
                return count
        return 0

    def _note_streaming(self, active: int) -> None:
        """Becomes more patient where blocks stream again that had come back, and less where none have for long."""
        self._quiet += 1
        if active > self._active:
            if self._returned:
                self._patience = min(2 * self._patience, MOST_PATIENCE)
            self._quiet, self._returned = 0, False
        elif self._quiet > CALM * self._patience:
            self._patience = PATIENCE
        self._active = active
