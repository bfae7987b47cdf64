"""Preemption: which running sequence gives way when blocks run out, by streaming some of its own or by losing all."""

from __future__ import annotations

import collections.abc as abc

from pagemill.memory.manager import Shortage
from pagemill.memory.tenants import Tenant
from pagemill.scheduling.sequence import Sequence, Status
from pagemill.scheduling.state import SchedulerState, StepDraft


def make_room(state: SchedulerState, sequence: Sequence, shortage: Shortage, draft: StepDraft, now: float) -> None:
    """Makes frames free for a running sequence, which may lose its own. No step may be in flight."""
    loser = victim(state.running, sequence, shortage)
    if not _stream(state, sequence, loser, shortage.missing):
        preempt(state, loser, now, draft)


def preempt(state: SchedulerState, sequence: Sequence, now: float, draft: StepDraft | None = None) -> None:
    """Takes a running sequence's blocks and row away, and lets it wait to be computed again; a search loses all beams.

    draft: the step being planned, if one is, of which the sequence may be a part.
    """
    state.tenants[sequence.request.tenant].preemptions += 1
    for lost in [sequence] if sequence.group is None else sequence.group.beams:
        if draft is not None:
            draft.drop(lost)
    if sequence.group is not None:
        for other in sequence.group.park(state.memory.block_size):
            state.finish(other, now)
        (sequence,) = sequence.group.beams
    state.stop(sequence, now)
    sequence.status = Status.WAITING
    if state.swap_blocks:
        state.memory.wanted.want(sequence, sequence.digests)
    state.wait(sequence)


def stream_largest(state: SchedulerState) -> bool:
    """Leaves the first running sequence that has more than half of the pool just that. Returns whether one has, and
    could be left it: not while a step is in flight."""
    half = state.memory.num_frames // 2
    for one in state.running if state.memory.streamed.count else ():
        if one.table is not None and (excess := state.memory.residency(one.table).resident - half) > 0:
            state.put_off = state.put_off or bool(state.batch.flights)
            return state.memory.stream(one.table, excess)
    return False


def victim(running: abc.Sequence[Sequence], sequence: Sequence, shortage: Shortage) -> Sequence:
    """Returns which of the running sequences, by precedence, gives its blocks back for this one, which may be itself.

    It is the last in precedence of those that could help: of its own tenant where that is at its quota or would borrow,
    and of tenants that have borrowed.
    """
    assert sequence.table is not None
    tenant = sequence.table.tenant
    at_quota = shortage.needed > tenant.room
    borrows = tenant.active + shortage.needed > tenant.kept_blocks
    own: Sequence | None = None
    for other in reversed(running):
        account = _account(other)
        if account is not tenant:
            if account.uses_more and not at_quota:
                return other
        elif at_quota or borrows:
            return other
        elif own is None:
            own = other
    return own or sequence


def borrower(running: abc.Sequence[Sequence], tenant: Tenant | None = None) -> Sequence | None:
    """Returns the last running sequence in precedence of a tenant, another than this, that has borrowed."""
    for other in reversed(running):
        if (account := _account(other)) is not tenant and account.uses_more:
            return other
    return None


def crowding(state: SchedulerState) -> Sequence | None:
    """Returns the last running sequence in precedence of a tenant that uses more than its part of the rows."""
    part, tenants = state.tenants.row_part, state.tenants
    return next((one for one in reversed(state.running) if tenants[one.request.tenant].rows > part), None)


def _stream(state: SchedulerState, sequence: Sequence, loser: Sequence, count: int) -> bool:
    """Makes `count` frames free for a sequence without preempting the loser, which may be itself. Returns whether.

    The one of them streams that has more than half of the pool; or the sequence its own, before it loses all.
    """
    memory = state.memory
    for one in (sequence, loser) if memory.streamed.count else ():
        assert one.table is not None
        large = 2 * memory.residency(one.table).resident > memory.num_frames
        if (large or one is loser is sequence) and memory.stream(one.table, count):
            return True
    return False


def _account(sequence: Sequence) -> Tenant:
    assert sequence.table is not None
    return sequence.table.tenant
