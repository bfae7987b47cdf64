"""Compactor: whose frames are looked at in which step, and for how long that sequence is likely to go on."""

from __future__ import annotations

from pagemill.scheduling.sequence import Sequence
from pagemill.scheduling.state import SchedulerState

REST = 3
"""Steps without a look after one in vain."""
MAX_COPIES = 64
"""Of one step: a bound on what the others wait."""


class Compactor:
    """Goes around the running sequences, one in a step."""

    def __init__(self) -> None:
        self._next = 0
        self._rest = 0

    def wait(self) -> bool:
        """Lets a step pass in which it cannot compact, behind one in flight. Returns whether it wants the next one."""
        self._rest = max(0, self._rest - 1)
        return not self._rest

    def step(self, state: SchedulerState) -> None:
        """Compacts one sequence; the last thing before a plan is made, with no step in flight."""
        if self._rest or not state.running:
            self._rest = max(0, self._rest - 1)
            return
        self._next = (self._next + 1) % len(state.running)
        sequence, copies = state.running[self._next], 0
        if sequence.table is not None and (left := steps_left(sequence)):
            copies = state.memory.compaction.compact(sequence.table, left, MAX_COPIES)
        self._rest = 0 if copies else REST


def steps_left(sequence: Sequence) -> int:
    """Returns in how many further steps it is likely to generate.

    As many as it may have; and if it may end by itself, no more than it has had already, which is what to expect of a
    length about which nothing is known.
    """
    left = sequence.request.max_len - len(sequence.tokens)
    return (
        left if sequence.request.ends_at_limit and sequence.num_output_tokens else min(left, sequence.num_output_tokens)
    )
