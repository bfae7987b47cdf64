"""Admission: which waiting sequences begin to run."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import NamedTuple

import numpy as np

from pagemill.memory.manager import MemoryManager, Opened
from pagemill.scheduling import preemption
from pagemill.scheduling.forecast import Chances, Floats, Forecast, Growing, surely_fits
from pagemill.scheduling.sequence import Sequence
from pagemill.scheduling.state import Refused, SchedulerState, Shared, StepDraft
from pagemill.scheduling.tenancy import TenantState

LOOK_AGAIN = 4
"""Steps after which all blocks of a waiting sequence are looked at again, though nothing has come free: in every step
that would cost more than the step's other sequences."""


class Limit(Enum):
    """Says what keeps a waiting sequence from running: what all share, or what its tenant may have."""

    POOL = "pool"
    QUOTA = "quota"


class Demand(NamedTuple):
    """Frames that the whole sequence takes beyond those of the blocks that it has found.

    So many must be there before it begins: else it would soon be preempted. streams: whether the pool can never hold
    all of its blocks, so that the others stream.
    """

    in_pool: int
    streamed: int
    streams: bool


def admit(state: SchedulerState, draft: StepDraft, now: float) -> None:
    """Lets waiting sequences in while there is budget, a row and memory for the whole prompt.

    A tenant is passed over once its next sequence cannot run. If the sequence lacks what all compete for, only
    sequences whose demand is guaranteed to their tenant may pass it; for these, sequences of borrowers are preempted.
    If it lacks rows, only as many may pass as are their tenant's part: else it might never find all that it needs.
    """
    passed: set[TenantState] = set()
    limited: list[TenantState] = []
    lacks_rows = False
    if draft.budget > 0:
        state.crowded = False
    for tenant in state.waiting.turns():
        while draft.budget > 0 and tenant not in passed and (sequence := state.waiting.first(tenant)) is not None:
            if not tenant.may_run(sequence.num_rows):
                limited.append(tenant)
                break
            beyond_part = lacks_rows and tenant.rows + sequence.num_rows > state.tenants.row_part
            full = state.crowded or len(state.running) >= state.controller.max_running
            guaranteed = not (full and beyond_part) and _is_guaranteed(state, sequence, tenant)
            if full and not guaranteed:
                break
            if (refused := _refused_still(state, sequence, tenant, guaranteed)) is not None:
                if refused.of_quota:
                    limited.append(tenant)
                state.crowded = state.crowded or not refused.of_quota
                break
            if state.batch.num_free >= sequence.num_rows and _waits_for_blocks(state, sequence, now):
                state.waiting.pop(tenant)
                continue
            most = max(1, draft.most(sequence))  # so that nobody waits behind a sequence that waits for others' tokens
            most_rows = state.tenants.row_part if lacks_rows else tenant.max_rows
            limit = _open(state, sequence, tenant, guaranteed, most, most_rows, now)
            while limit is Limit.POOL and _make_room(state, sequence, tenant, guaranteed, passed, draft, now):
                limit = _open(state, sequence, tenant, guaranteed, most, most_rows, now)
            if isinstance(limit, int):
                _begin(state, sequence, tenant, draft, most, limit, now)
                continue
            if limit is Limit.QUOTA:
                limited.append(tenant)
            state.crowded = state.crowded or limit is Limit.POOL
            if state.batch.num_free < sequence.num_rows:
                lacks_rows = True
            elif not state.put_off:
                of_quota, again = limit is Limit.QUOTA, state.batch.steps + LOOK_AGAIN
                state.refused[tenant] = Refused(sequence, again, _room(state, tenant, of_quota), of_quota, guaranteed)
            break
    if limited:
        state.waiting.level(limited)
    for tenant in state.tenants:
        tenant.fresh = 0


def frames_wanted(state: SchedulerState, sequence: Sequence, found: int = 0) -> tuple[int, bool]:
    """Returns the frames of the pool that a sequence is given before it begins behind its first `found` tokens.

    Also returns whether its other blocks must stream, since it can never have room for all of them.
    """
    tokens, footprint = len(sequence.tokens), state.memory.footprint
    whole = footprint.blocks(tokens, state.chunk, found)
    if not state.memory.streamed.count:
        return whole, False
    pinned = state.pinned_entries(sequence)
    if state.tenants.fits(sequence.request, whole, footprint.pinned(tokens, state.chunk, pinned, found)):
        return whole, False
    return footprint.frames(tokens, state.chunk, pinned, found), True


def _make_room(
    state: SchedulerState,
    sequence: Sequence,
    tenant: TenantState,
    guaranteed: bool,
    passed: set[TenantState],
    draft: StepDraft,
    now: float,
) -> bool:
    """Takes frames of the pool, or rows, from running sequences for a waiting one; returns False if it may take none.

    The largest sequence streams; else, for what is guaranteed, a borrower is preempted, and its tenant passed over. For
    the tenant's part of the rows, so is a sequence of a tenant that has more than its part.
    """
    if preemption.stream_largest(state):
        return True
    if not guaranteed:
        return False
    loser = preemption.borrower(state.running, tenant.account)
    lacks_rows = state.batch.num_free < sequence.num_rows
    if loser is None and lacks_rows and tenant.rows + sequence.num_rows <= state.tenants.row_part:
        loser = preemption.crowding(state)
    if loser is None:
        return False
    if state.batch.flights:
        state.put_off = True
        return False
    passed.add(state.tenants[loser.request.tenant])
    preemption.preempt(state, loser, now, draft)
    return True


def _refused_still(state: SchedulerState, sequence: Sequence, tenant: TenantState, guaranteed: bool) -> Refused | None:
    """Returns how a sequence for which there are rows was refused a few steps ago, if nothing has come free since, and
    nobody can be preempted for what is guaranteed to it."""
    refused, batch = state.refused.get(tenant), state.batch
    if refused is None or refused.sequence is not sequence or not state.running or batch.steps >= refused.again:
        return None
    if batch.num_free < sequence.num_rows or guaranteed > refused.guaranteed:
        return None
    if guaranteed and preemption.borrower(state.running, tenant.account) is not None:
        return None
    return refused if _room(state, tenant, refused.of_quota) <= refused.room else None


def _room(state: SchedulerState, tenant: TenantState, of_quota: bool) -> int:
    """Returns how many blocks a tenant can have within its quota, or of the pool."""
    return tenant.account.room if of_quota else state.memory.available(tenant.account)


def _open(
    state: SchedulerState,
    sequence: Sequence,
    tenant: TenantState,
    guaranteed: bool,
    budget: int,
    most_rows: int,
    now: float,
) -> Limit | int:
    """Gives a waiting sequence a table of what is cached of it, with its first chunk reserved behind that.

    Returns with how many rows it begins, so that its tenant has at most so many. Or what limits it; then nothing has
    changed.
    """
    if state.batch.num_free < sequence.num_rows:
        return Limit.POOL
    rows = max(sequence.num_rows, min(sequence.most_rows, state.batch.num_free, most_rows - tenant.rows))
    opened = _look_up(state, sequence, now)
    demand = _demand(state, sequence, opened)
    limit = _limit(state, tenant, demand, guaranteed)
    while limit is None and not guaranteed and not _fits_later(state, sequence, rows, tenant, demand):
        if rows == sequence.num_rows:
            limit = Limit.POOL
        rows = max(sequence.num_rows, rows // 2)
    limit = limit or _reserve(state, sequence, opened, budget, demand.streams)
    if limit is not None:
        state.memory.close(opened.table, now, used=False)
        return limit
    _enter(state, sequence, tenant, opened)
    return rows


def _look_up(state: SchedulerState, sequence: Sequence, now: float) -> Opened:
    """Opens a table of what the prefix cache has of a sequence, up to its last token, which is always computed."""
    state.name_blocks(sequence)
    request, shares = sequence.request, state.shares_prefixes(sequence)
    digests, limit = (sequence.digests, len(sequence.tokens) - 1) if shares else ([], 0)
    return state.memory.open(sequence.tokens, digests, request.root, now, limit, request.tenant)


def _demand(state: SchedulerState, sequence: Sequence, opened: Opened) -> Demand:
    """Returns the frames that a sequence takes beyond those of the blocks that its table has found."""
    memory, found = state.memory, opened.num_cached_tokens
    wanted, streams = frames_wanted(state, sequence, found)
    in_pool, streamed = wanted - opened.table.num_held, 0
    if streams:
        held = memory.residency(opened.table)
        in_pool = wanted - held.resident
        streamed = memory.footprint.blocks(len(sequence.tokens), state.chunk, found) - wanted - held.streamed
    if sequence.group is not None:
        in_pool += sequence.group.blocks_to_unpark(memory.block_size) * len(memory.windows)
    return Demand(in_pool, streamed, streams)


def _limit(state: SchedulerState, tenant: TenantState, demand: Demand, guaranteed: bool) -> Limit | None:
    """Returns what keeps a demand from being met now; None if nothing does.

    Beside it, each running sequence must have room for one more block, and the controller's watermark stays free. If
    the demand is guaranteed to the tenant, only the tenant's own running sequences count, and no watermark.
    """
    if not tenant.within_quota(demand.in_pool):
        return Limit.QUOTA
    # Pins may lie in streamed frames; what does not fit there takes frames of the pool.
    frames = demand.in_pool + max(0, demand.streamed - state.memory.streamed.available)
    room = state.memory.available(tenant.account) - (tenant.running if guaranteed else headroom(state))
    return None if frames <= room and tenant.within_quota(frames) else Limit.POOL


def _fits_later(state: SchedulerState, sequence: Sequence, rows: int, tenant: TenantState, demand: Demand) -> bool:
    """Returns whether a sequence that begins with so many rows, and those that run, will find the blocks that they grow
    by, as is foreseen."""
    memory, lengths = state.memory, state.lengths
    if lengths is None or not state.foresees or not state.running:
        return True
    available, request = memory.available(tenant.account), sequence.request
    most, held, all_sure = _most_held(state)
    most += rows * -(-request.max_len // memory.block_size) * len(memory.windows)
    if surely_fits(demand.in_pool + most, available + held, all_sure and request.ends_at_limit):
        return True
    state.settle()
    names = dict.fromkeys([request.tenant, *(one.request.tenant for one in state.running)])
    kinds = {name: place for place, name in enumerate(names)}
    chances = Chances([lengths.of(name) for name in kinds])
    forecast = Forecast(chances, _growing(state, kinds), available, memory.block_size, memory.windows)
    new = Growing(
        held=0,
        entries=-(-len(sequence.tokens) // memory.block_size),
        coming=0,
        length=len(sequence.tokens),
        has=sequence.num_output_tokens,
        most=max(1, request.max_len - len(sequence.tokens)),
        sure=request.ends_at_limit,
        kind=kinds[request.tenant],
    )
    others = [new] * (rows - 1)
    return forecast.fits([new._replace(coming=demand.in_pool), *others])


def _most_held(state: SchedulerState) -> tuple[int, int, bool]:
    """Returns how many blocks all running sequences hold at most, now or later; how many would come free with one of
    them, if that is plain; and whether all of them get exactly as many tokens as they may."""
    memory = state.memory
    size, groups = memory.block_size, len(memory.windows)
    most, entries, all_sure = 0, 0, True
    for one in state.running:
        table, request = one.table, one.request
        assert table is not None
        now, later = len(table.blocks[0]), -(-request.max_len // size)
        entries += now
        most += later if later > now else now
        all_sure = all_sure and request.ends_at_limit
    return groups * most, entries if _holds_apart(memory) else 0, all_sure


def _holds_apart(memory: MemoryManager) -> bool:
    """Returns whether each entry of a table is a block that comes free with it."""
    return memory.windows == (None,) and not memory.shares_blocks


def _growing(state: SchedulerState, kinds: Mapping[str, int]) -> Floats:
    """Returns what the running sequences hold and take, [fields of `Growing`, sequences]. kinds: by tenant."""
    running, tables = state.running, [one.table for one in state.running if one.table is not None]  # all have one
    requests = [one.request for one in running]
    lengths = np.array([len(one.tokens) for one in running])
    most = np.array([request.max_len for request in requests]) - lengths
    entries = [len(table.blocks[0]) for table in tables]
    return np.array(
        (
            entries if _holds_apart(state.memory) else state.memory.count_own(tables),
            entries,
            np.zeros(len(running)),
            lengths,
            lengths - [one.prompt_len for one in running],
            np.maximum(1, most),
            [request.ends_at_limit for request in requests],
            [kinds[request.tenant] for request in requests],
        ),
        dtype=np.float64,
    )


def headroom(state: SchedulerState) -> int:
    """Returns how many blocks are left for running sequences to grow when another begins."""
    running = len(state.running)
    return running + state.controller.watermark if running else 0


def _reserve(state: SchedulerState, sequence: Sequence, opened: Opened, budget: int, streams: bool) -> Limit | None:
    """Reserves the first chunk of a sequence, by streaming what its table has found if it must.

    Returns None, or the pool as what limits it.
    """
    memory, table = state.memory, opened.table
    up_to = min(len(sequence.tokens), opened.num_cached_tokens + budget)
    shortage = memory.reserve(table, up_to)
    if shortage is not None and streams:
        state.put_off = state.put_off or bool(state.batch.flights)
        if memory.stream(table, shortage.missing):
            shortage = memory.reserve(table, up_to)
    return None if shortage is None else Limit.POOL


def _enter(state: SchedulerState, sequence: Sequence, tenant: TenantState, opened: Opened) -> None:
    """Gives a sequence its table, counts what it found, and claims the blocks that it will compute."""
    found, num_tokens = opened.num_cached_tokens, len(sequence.tokens)
    sequence.table = opened.table
    computed, sequence.scheduled = sequence.scheduled, found
    shares = state.shares_prefixes(sequence)
    if shares:
        state.pending.add(sequence, sequence.digests, found // state.memory.block_size)
    if sequence.was_preempted:
        state.recomputed_tokens += max(0, min(computed, num_tokens) - found)
        return
    sequence.num_cached_tokens = found
    if shares:
        tenant.prefix_queried_tokens += num_tokens
        tenant.prefix_hit_tokens += found


def _begin(
    state: SchedulerState, sequence: Sequence, tenant: TenantState, draft: StepDraft, most: int, rows: int, now: float
) -> None:
    """Takes an opened sequence out of the queue, gives it so many rows and plans its first tokens, at most so many."""
    state.waiting.pop(tenant)
    tenant.waiting -= 1
    tenant.late -= sequence.is_late
    if sequence.scheduled_s is None:
        sequence.scheduled_s = now
    state.seat(sequence, rows)
    state.start(sequence)
    draft.add(sequence, min(sequence.remaining, most))


def _waits_for_blocks(state: SchedulerState, sequence: Sequence, now: float) -> bool:
    """Lets a sequence wait for the next blocks that it needs, if a running sequence or a load is to bring them.

    Begins such a load if offload stores have them. Returns whether it waits.
    """
    if not state.shares_prefixes(sequence):
        return False
    state.name_blocks(sequence)
    found = state.memory.peek(sequence.digests, sequence.request.root)
    if found == len(sequence.digests):
        return False
    if not state.pending.owned(sequence.digests[found]):
        wanted, streams = frames_wanted(state, sequence)
        load = state.loading.begin(sequence, found, headroom(state), wanted if streams else None, now)
        if load is not None:
            state.pending.add(load.id, load.digests, found)
    return state.pending.wait(sequence.digests, found, sequence)


def _is_guaranteed(state: SchedulerState, sequence: Sequence, tenant: TenantState) -> bool:
    """Returns whether the tenant is guaranteed all blocks that a sequence wants and that are not active already."""
    if not tenant.account.kept_blocks:
        return False
    state.name_blocks(sequence)
    wanted, memory, steps = frames_wanted(state, sequence)[0], state.memory, state.batch.steps
    if not tenant.has_right_to(wanted - len(sequence.digests) * len(memory.windows)):
        return False
    shared = state.shared.get(tenant)
    if shared is None or shared.sequence is not sequence or steps >= shared.again:
        active = memory.count_active(sequence.digests, sequence.request.root)
        shared = state.shared[tenant] = Shared(sequence, steps + LOOK_AGAIN, active)
    return tenant.has_right_to(wanted - shared.blocks)
